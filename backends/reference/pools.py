"""Pools to tokens, written out in PyTorch."""

from __future__ import annotations

import torch


def expand_pools(
    pool_ids: torch.Tensor,  # [M, P] int32, ascending, then -1; may be the first columns of out
    ks: torch.Tensor,  # [M] int32, in pools
    ke: torch.Tensor,  # [M] int32, in pools
    positions: torch.Tensor,  # [M] int32, in tokens
    pool: int,
    out: torch.Tensor,  # [M, W] int32, any row pitch
) -> None:
    """Write each row's tokens: those of its pools, then the tail that no pool holds, then -1.

    The tail runs from ``pool * (ke - ks)`` to the row's position. It keeps its newest ``W`` tokens, and the
    pools' tokens fill what is left, lowest first.
    """
    rows, width = out.shape
    slot = torch.arange(width, device=out.device)
    ids = pool_ids.clone().long()
    visible = (ke.long() - ks.long()).clamp(min=0)
    tail = (positions.long() + 1 - pool * visible).clamp(0, width)[:, None]
    from_pools = torch.minimum(pool * (ids >= 0).sum(dim=1, keepdim=True), width - tail)
    pools = ids.gather(1, (slot // pool).clamp(max=ids.shape[1] - 1).expand(rows, width))
    in_pools = pools * pool + slot % pool
    in_tail = positions.long()[:, None] + 1 - tail + (slot - from_pools)
    tokens = torch.where(slot < from_pools, in_pools, in_tail)
    out.copy_(torch.where(slot < from_pools + tail, tokens, -1))
