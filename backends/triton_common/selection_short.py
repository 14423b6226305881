"""Rows that fit into one program's registers: read once, chosen in place, one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from portable_indexer.backends.triton_common import selection_keys as keys
from portable_indexer.backends.triton_common.selection_search import find_cut, guess_of_sample

LINE = tl.constexpr(32)  # keys side by side; their marks make one word


@triton.jit
def _ranks(marked):
    """How many marks stand before each place of ``marked`` [32, PARTS, LINES], in the order of keys, and in all."""
    bit = (1 << tl.arange(0, LINE)).to(tl.uint32)[:, None, None]
    words = tl.sum(tl.where(marked, bit, 0), axis=0)
    counts = keys.bit_count(words)
    part = tl.sum(counts, axis=1)
    before = tl.cumsum(counts, axis=1) - counts + (tl.cumsum(part, axis=0) - part)[:, None]
    return before[None, :, :] + keys.bit_count(words[None, :, :] & (bit - 1)), tl.sum(part, axis=0)


@triton.jit
def _places(BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """0 to BLOCK - 1 as [32, PARTS, LINES]: lines of 32 keys lie across lanes, each part's lines within a warp."""
    LINES: tl.constexpr = BLOCK // (PARTS * LINE)
    line = tl.arange(0, PARTS)[None, :, None] * LINES + tl.arange(0, LINES)[None, None, :]
    return line * LINE + tl.arange(0, LINE)[:, None, None]


@triton.jit
def _write(target, chosen, ids, done, k):
    """Write the chosen ids behind the ``done`` ones, in order; returns how many are done then."""
    rank, found = _ranks(chosen)
    slot = done + rank
    tl.store(target + slot, ids, mask=chosen & (slot < k))
    return done + found


@triton.jit
def _choose_block(
    row_keys,
    target,
    length,
    offset,
    k,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PIECE: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    everywhere = _places(BLOCK, PARTS)
    row = tl.load(row_keys + everywhere, mask=everywhere < length, other=float("-inf"))
    guess, spread = guess_of_sample(row_keys, length, k, SAMPLE)
    everything = tl.full((), keys.NEGATIVE_INFINITY, tl.uint32)
    cut, ties = find_cut(row, everything, length, guess - 3.0 * spread, guess, guess + 3.0 * spread, k)
    bound = keys.score(cut)
    # Read again piece by piece, from the cache: all at once would take three times the registers.
    done = tl.zeros((), tl.int32)
    if ties == 0:
        for begin in range(0, length, PIECE):
            place = begin + _places(PIECE, PARTS)
            scores = tl.load(row_keys + place, mask=place < length, other=float("-inf"))
            done = _write(target, scores >= bound, place + offset, done, k)
    else:
        equals = tl.zeros((), tl.int32)
        for begin in range(0, length, PIECE):
            place = begin + _places(PIECE, PARTS)
            inside = place < length
            scores = tl.load(row_keys + place, mask=inside, other=float("-inf"))
            scores = tl.where(scores == scores, scores, float("-inf"))
            equal = inside & (scores == bound)
            rank, found = _ranks(equal)
            chosen = (scores > bound) | (equal & (rank < ties - equals))
            done = _write(target, chosen, place + offset, done, k)
            equals += found


@triton.jit
def choose_row(
    row_keys,  # float32 [length]
    target,
    length,
    offset,
    k,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PIECE: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    """Write the ids of the k best of a row's ``length`` keys, more than k and at most BLOCK, plus ``offset``."""
    # Most rows of a causal prompt are shorter than the longest: they take a smaller block.
    if length <= BLOCK // 2:
        _choose_block(row_keys, target, length, offset, k, BLOCK // 2, PARTS, PIECE, SAMPLE)
    else:
        _choose_block(row_keys, target, length, offset, k, BLOCK, PARTS, PIECE, SAMPLE)


@triton.jit(do_not_specialize=["logits", "ks", "ke", "out", "pitch", "out_pitch", "width", "k"])
def select_short(
    logits,  # float32 [M, width]
    ks,  # int32 [M]
    ke,  # int32 [M]
    out,  # int32 [M, k]
    pitch: tl.int64,
    out_pitch: tl.int64,
    width,  # columns of logits, at most BLOCK
    k,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,  # at least k
    PIECE: tl.constexpr,  # keys written at a time
    SAMPLE: tl.constexpr,
):
    """One program a row: out[row] = ids of the k best of [ks, ke), relative to ks, ascending, then -1."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(ks + row)
    first = tl.maximum(start, 0)
    last = tl.maximum(tl.minimum(tl.load(ke + row), width), 0)
    length = tl.maximum(last - first, 0)
    row_keys = logits + row * pitch + first
    target = out + row * out_pitch
    if length <= k:
        keys.write_all(target, length, first - start, k, SLOTS)
    else:
        choose_row(row_keys, target, length, first - start, k, BLOCK, PARTS, PIECE, SAMPLE)
