"""Rows that fit into one program's registers: read once, chosen in place, one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from portable_indexer.backends.triton_common import selection_keys as keys


@triton.jit
def _ragged_group(base, group, first, last):
    """Images of the 32 keys of a group, 0 for those outside [first, last), which are not read."""
    column = group * 32 + tl.arange(0, 32)
    valid = (column >= first) & (column < last)
    return tl.where(valid, keys.image(tl.load(base + column, mask=valid, other=0.0)), 0)


@triton.jit(do_not_specialize=["logits", "ks", "ke", "out", "pitch", "out_pitch", "width", "k"])
def select_short(
    logits,  # float32 [M, width], row pitch in units of UNIT elements
    ks,  # int32 [M]
    ke,  # int32 [M]
    out,  # int32 [M, k]
    pitch: tl.int64,
    out_pitch: tl.int64,
    width,  # columns of logits, at most BLOCK
    k,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,  # keys written at a time
    SLOTS: tl.constexpr,  # at least k
):
    """One program a row: out[row] = ids of the k best of [ks, ke), relative to ks, ascending, then -1."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(ks + row)
    first = tl.maximum(start, 0)
    last = tl.maximum(tl.minimum(tl.load(ke + row), width), 0)
    base = tl.multiple_of(logits + row * pitch * UNIT, 4 * UNIT)
    lane = tl.arange(0, 32)
    group = tl.arange(0, BLOCK // 32)
    # Groups of 32 keys that lie within [first, last) are read whole, the two ragged ones element by element.
    whole = (group * 32 >= first) & (group * 32 <= last - 32)
    column = group[:, None] * 32 + lane[None, :]
    inside = tl.broadcast_to(whole[:, None], [BLOCK // 32, 32])
    images = tl.where(inside, keys.image(tl.load(base + column, mask=inside, other=0.0)), 0)
    length = tl.maximum(last - first, 0)
    if length > 0:
        head = _ragged_group(base, first // 32, first, last)
        images = tl.where((group == first // 32)[:, None] & ~inside, head[None, :], images)
        tail = _ragged_group(base, last // 32, first, last)
        images = tl.where((group == last // 32)[:, None] & ~inside, tail[None, :], images)
    images = tl.reshape(images, [BLOCK])
    cut = tl.zeros((), tl.uint32)
    ties = 0
    if length > k:
        lowest = tl.full((), keys.NEGATIVE_INFINITY, tl.uint32)
        cut = keys.kth(images, lowest, length, k, k)
        ties = keys.missing_ties(images, cut, k)
    # Read again piece by piece, from the cache: all at once would take three times the registers.
    target = out + row * out_pitch
    aboves = tl.zeros((), tl.int32)
    equals = tl.zeros((), tl.int32)
    for begin in range(first // 32 * 32, last, PIECE):
        columns, piece = keys.load_images(base, begin, first, last, PIECE)
        aboves, equals = keys.write_chosen(target, piece, columns - start, cut, ties, aboves, equals, k)
    empty = tl.arange(0, SLOTS)
    tl.store(target + empty, tl.full([SLOTS], -1, tl.int32), mask=(empty >= length) & (empty < k))
