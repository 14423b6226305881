"""Pools to tokens: one launch, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from portable_indexer.backend import MAX_TOPK
from portable_indexer.backends.triton_common.kept import KeptKernel
from portable_indexer.backends.triton_common.runtime import interpreting
from portable_indexer.backends.triton_common.selection import kept_kernel


@triton.jit(
    do_not_specialize=["pool_ids", "ks", "ke", "positions", "out", "pitch", "out_pitch", "width", "pools", "pool"]
)
def expand_kernel(
    pool_ids,  # int32 [M, pools]: ascending, then -1; may be the first columns of out
    ks,  # int32 [M], in pools
    ke,  # int32 [M], in pools
    positions,  # int32 [M], in tokens
    out,  # int32 [M, width]
    pitch: tl.int64,
    out_pitch: tl.int64,
    width,
    pools,
    pool,
    SLOTS: tl.constexpr,  # at least pools
    PIECE: tl.constexpr,
):
    """One program a row: the tokens of its pools, then the tail that no pool holds, then -1."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    ids = tl.load(pool_ids + row * pitch + slot, mask=slot < pools, other=-1)
    # Known once every id is read: nothing is overwritten before.
    count = tl.sum((ids >= 0).to(tl.int32), axis=0)
    visible = tl.maximum(tl.load(ke + row) - tl.load(ks + row), 0)
    end = tl.load(positions + row) + 1
    tail = tl.minimum(tl.maximum(end - visible * pool, 0), width)
    from_pools = tl.minimum(count * pool, width - tail)
    target = out + row * out_pitch
    for token in range(pool):
        place = slot * pool + token
        tl.store(target + place, ids * pool + token, mask=(slot < count) & (place < from_pools))
    for begin in range(from_pools, width, PIECE):
        place = begin + tl.arange(0, PIECE)
        after = place - from_pools
        tl.store(target + place, tl.where(after < tail, end - tail + after, -1), mask=place < width)


def _kernel() -> KeptKernel:
    return kept_kernel(expand_kernel, 8, ("SLOTS", MAX_TOPK), ("PIECE", 1024))


def warmup_pools(device: torch.device) -> int:
    """Compile, and load on a GPU, the one variant; returns how many are kept."""
    if interpreting():
        return 0
    ids = torch.empty(1, dtype=torch.int32, device=device)
    _kernel().prepare(device, *(ids,) * 5, *(1,) * 5)
    return 1


def expand_pools(
    pool_ids: torch.Tensor,  # [M, P] int32, ascending, then -1; may be the first columns of out
    ks: torch.Tensor,  # [M] int32, in pools
    ke: torch.Tensor,  # [M] int32, in pools
    positions: torch.Tensor,  # [M] int32, in tokens
    pool: int,
    out: torch.Tensor,  # [M, W] int32, row pitch free
) -> None:
    """Write each row's tokens; the rule is the reference's."""
    rows, pools = pool_ids.shape
    if rows == 0:
        return
    _kernel().launch_tensors(
        (rows, 1),
        out.device,
        *(pool_ids, ks, ke, positions, out),
        *(pool_ids.stride(0), out.stride(0), out.shape[1], pools, pool),
    )
