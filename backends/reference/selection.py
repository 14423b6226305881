"""Exact, ordered top-k of each row, written out in PyTorch."""

from __future__ import annotations

import torch

INVALID = -(2**31)  # below the image of -inf


def sortable(scores: torch.Tensor) -> torch.Tensor:
    """Map float32 scores to int32 keys in the same order; NaN becomes -inf, -0.0 becomes 0.0."""
    scores = torch.where(scores.isnan(), -torch.inf, scores) + 0.0
    bits = scores.view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@torch.no_grad()
def select(
    logits: torch.Tensor,  # [M, N] float32, any row pitch
    ks: torch.Tensor,  # [M] int32
    ke: torch.Tensor,  # [M] int32
    topk: int,
    out: torch.Tensor,  # [M, topk] int32, any row pitch
) -> None:
    """Write each row's ``topk`` best keys: ids relative to ``ks``, ascending, then -1.

    The set is defined by (score descending, index ascending): everything above the k-th score,
    then of its equals those with the lowest index.
    """
    rows, keys = logits.shape
    if rows == 0:
        return
    column = torch.arange(keys, device=logits.device)
    valid = (column >= ks[:, None]) & (column < ke[:, None])
    key = torch.where(valid, sortable(logits), INVALID)
    want = min(topk, keys)
    if want == 0:
        out.fill_(-1)
        return
    kth = key.topk(want, dim=1).values[:, -1:]
    above = key > kth
    equal = (key == kth) & valid
    missing = want - above.sum(dim=1, keepdim=True)
    chosen = (above & valid) | (equal & (equal.cumsum(dim=1) <= missing))
    # Rejected columns all land in one slot past the end, which is then dropped.
    slot = torch.where(chosen, chosen.cumsum(dim=1) - 1, topk)
    ids = torch.full((rows, topk + 1), -1, dtype=torch.int32, device=logits.device)
    ids.scatter_(1, slot, (column - ks[:, None].long()).to(torch.int32))
    out.copy_(ids[:, :topk])
