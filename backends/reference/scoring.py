"""Multi-query logits, written out in PyTorch."""

from __future__ import annotations

import torch

# Keys in one step: bounds the float64 copies to tens of MB whatever the history's length.
KEY_STEP = 16_384
# Rows x heads x keys of float64 products held at once (128 MiB).
PRODUCT_STEP = 1 << 24


@torch.no_grad()
def scores(
    q: torch.Tensor,  # [M, H, D] fp8
    k: torch.Tensor,  # [N, D] fp8
    k_scale: torch.Tensor,  # [N] float32
    weights: torch.Tensor,  # [M, H] float32
    ks: torch.Tensor,  # [M] int32
    ke: torch.Tensor,  # [M] int32
    out: torch.Tensor,  # [M, N] float32
    clean_logits: bool,
) -> None:
    """Write the logits of every valid key into ``out``; the rest is -inf if ``clean_logits``, else untouched.

    A product of two e4m3 numbers and a sum of D of them are exact in float64, so q . k does not
    depend on the order in which a library sums. It is rounded to float32 once; then the heads are
    added one after the other, multiply and add apart, so a row's bits depend on that row alone.
    """
    rows, heads, _ = q.shape
    first, last = _key_range(ks, ke, k.shape[0])
    if clean_logits:
        out[:, :first].fill_(-torch.inf)
        out[:, last:].fill_(-torch.inf)
    row_step = max(1, PRODUCT_STEP // (heads * min(KEY_STEP, max(last - first, 1))))
    for n0 in range(first, last, KEY_STEP):
        n1 = min(n0 + KEY_STEP, last)
        keys = k[n0:n1].to(torch.float64).T
        column = torch.arange(n0, n1, device=out.device)
        for m0 in range(0, rows, row_step):
            part = slice(m0, min(m0 + row_step, rows))
            products = (q[part].to(torch.float64) @ keys).to(torch.float32)
            total = torch.zeros_like(products[:, 0])
            for h in range(heads):
                total = total + torch.relu(products[:, h]) * weights[part, h, None]
            total = total * k_scale[None, n0:n1]
            valid = (column >= ks[part, None]) & (column < ke[part, None])
            target = out[part, n0:n1]
            rest = torch.full_like(target, -torch.inf) if clean_logits else target
            target.copy_(torch.where(valid, total, rest))


def _key_range(ks: torch.Tensor, ke: torch.Tensor, keys: int) -> tuple[int, int]:
    """Keys that any row may see; read from the bounds on a CPU only, where that waits for no device."""
    if ks.device.type != "cpu" or ks.numel() == 0:
        return 0, keys
    first = min(max(int(ks.min()), 0), keys)
    return first, max(first, min(int(ke.max()), keys))
