"""The one full read: every key that reaches its row's threshold goes into the row's list of candidates."""

from __future__ import annotations

import triton
import triton.language as tl

from portable_indexer.backends.triton_common import selection_keys as keys


@triton.jit
def _words(scores, limit, axis: tl.constexpr):
    """uint32 with bit i set where score i of 32 reaches the limit; -inf is reached by NaN too."""
    bit = (1 << tl.arange(0, 32)).to(tl.uint32)
    if axis == 1:
        bit = bit[None, :]
    found = tl.sum(tl.where(scores >= limit, bit, 0), axis=axis)
    return tl.where(limit == float("-inf"), 0xFFFFFFFF, found)


@triton.jit
def _ragged_word(base, begin, first, last, limit):
    """The word of the 32 keys from ``begin`` on, of which only those within [first, last) are read."""
    column = begin + tl.arange(0, 32)
    valid = (column >= first) & (column < last)
    scores = tl.load(base + column, mask=valid, other=0.0)
    return _words(scores, limit, 0) & _words(valid.to(tl.float32), 1.0, 0)


@triton.jit
def _lowest_bit(words):
    """Position of each word's lowest set bit; 32 where there is none."""
    return keys.bit_count((words & (~words + 1)) - 1)


@triton.jit
def _put(ids, values, slot, column, scores, mask):
    tl.store(ids + slot, column, mask=mask)
    tl.store(values + slot, scores, mask=mask)


@triton.jit
def _mark_tile(
    row,
    tile,
    logits,
    ks,
    ke,
    threshold,
    counter,
    segments,
    ids,
    values,
    pitch: tl.int64,
    width,
    tiles,
    capacity,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Collect the candidates of one tile. Which tile comes first in the list is up to chance, the order within
    a tile is not; ``segments`` restores the order of the tiles. A row with more candidates than ``capacity``
    keeps an unspecified part of them, and ``counter`` tells."""
    first = tl.maximum(tl.load(ks + row), 0)
    last = tl.maximum(tl.minimum(tl.load(ke + row), width), 0)
    limit = tl.load(threshold + row)
    start = first // 32 * 32 + tile * (BLOCK * STEPS)
    if (start < last) & (limit == limit):
        WORDS: tl.constexpr = BLOCK // 32
        base = tl.multiple_of(logits + row * pitch * UNIT, 4 * UNIT)
        lane = tl.arange(0, 32)
        group = tl.arange(0, WORDS)
        # Groups of 32 keys that lie within [first, last) are read whole; the row's two ragged ends apart.
        head = first // 32 * 32
        tail = last // 32 * 32
        word_head = _ragged_word(base, head, first, last, limit)
        word_tail = _ragged_word(base, tail, first, last, limit)
        words = tl.zeros([STEPS, WORDS], tl.uint32)
        step = tl.arange(0, STEPS)
        for s in tl.static_range(STEPS):
            begin = start + s * BLOCK + group * 32
            whole = (begin >= first) & (begin <= last - 32)
            column = tl.multiple_of(start + s * BLOCK, 32) + group[:, None] * 32 + lane[None, :]
            inside = tl.broadcast_to(whole[:, None], [WORDS, 32])
            scores = tl.load(base + column, mask=inside, other=0.0)
            found = _words(scores, limit, 1)
            found = tl.where(whole, found, tl.where(begin == head, word_head, tl.where(begin == tail, word_tail, 0)))
            words = tl.where(step[:, None] == s, found[None, :], words)
        words = tl.reshape(words, [STEPS * WORDS])
        counts = keys.bit_count(words)
        total = tl.sum(counts, axis=0)
        place = tl.atomic_add(counter + row, total, sem="relaxed")
        segment = segments + row * tiles * 2 + tile
        tl.store(segment, place)
        tl.store(segment + tiles, total)
        if place + total <= capacity:
            slot = row * capacity + place + tl.cumsum(counts, axis=0) - counts
            origin = start + tl.arange(0, STEPS * WORDS) * 32
            rounds = tl.cdiv(tl.max(counts, axis=0), 4)
            for _ in range(rounds):
                # Four keys of each word at a time, so that their loads overlap.
                second = words & (words - 1)
                third = second & (second - 1)
                fourth = third & (third - 1)
                column0 = origin + _lowest_bit(words)
                column1 = origin + _lowest_bit(second)
                column2 = origin + _lowest_bit(third)
                column3 = origin + _lowest_bit(fourth)
                score0 = tl.load(base + column0, mask=words != 0, other=0.0)
                score1 = tl.load(base + column1, mask=second != 0, other=0.0)
                score2 = tl.load(base + column2, mask=third != 0, other=0.0)
                score3 = tl.load(base + column3, mask=fourth != 0, other=0.0)
                _put(ids, values, slot, column0 - first, score0, words != 0)
                _put(ids, values, slot + 1, column1 - first, score1, second != 0)
                _put(ids, values, slot + 2, column2 - first, score2, third != 0)
                _put(ids, values, slot + 3, column3 - first, score3, fourth != 0)
                slot += 4
                words = fourth & (fourth - 1)


@triton.jit(
    do_not_specialize=[
        "logits",
        "ks",
        "ke",
        "threshold",
        "counter",
        "failures",
        "bracket",
        "segments",
        "ids",
        "values",
        "pitch",
        "width",
        "tiles",
        "capacity",
    ]
)
def mark_candidates(
    logits,  # float32 [M, width], row pitch in units of UNIT elements
    ks,  # int32 [M]
    ke,  # int32 [M]
    threshold,  # float32 [M]: NaN asks for nothing, -inf for every key
    counter,  # int32 [M], zero at the start: candidates found in the row
    failures,  # int32 [1 + M], not read
    bracket,  # uint32 [M, 4], not read
    segments,  # int32 [M, 2, tiles], written: place in the list and length of each tile's candidates
    ids,  # int32 [M, capacity], written: column less max(ks, 0)
    values,  # float32 [M, capacity], written: their scores
    pitch: tl.int64,
    width,
    tiles,
    capacity,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,  # keys read at a time
    STEPS: tl.constexpr,  # blocks in a tile
):
    """One program a tile of BLOCK * STEPS keys."""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    _mark_tile(
        row,
        tile,
        logits,
        ks,
        ke,
        threshold,
        counter,
        segments,
        ids,
        values,
        pitch,
        width,
        tiles,
        capacity,
        UNIT,
        BLOCK,
        STEPS,
    )


@triton.jit(
    do_not_specialize=[
        "logits",
        "ks",
        "ke",
        "threshold",
        "counter",
        "failures",
        "bracket",
        "segments",
        "ids",
        "values",
        "pitch",
        "width",
        "tiles",
        "capacity",
        "programs",
    ]
)
def mark_again(
    logits,  # float32 [M, width], row pitch in units of UNIT elements
    ks,  # int32 [M]
    ke,  # int32 [M]
    threshold,  # float32 [M]: NaN asks for nothing, -inf for every key
    counter,  # int32 [M], zero at the start: candidates found in the row
    failures,  # int32 [1 + M]: how many rows failed, and which
    bracket,  # uint32 [M, 4], not read
    segments,  # int32 [M, 2, tiles], written: place in the list and length of each tile's candidates
    ids,  # int32 [M, capacity], written: column less max(ks, 0)
    values,  # float32 [M, capacity], written: their scores
    pitch: tl.int64,
    width,
    tiles,
    capacity,
    programs,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,  # keys read at a time
    STEPS: tl.constexpr,  # blocks in a tile
):
    """A fixed number of programs share the tiles of the rows that failed; at once done where none did."""
    for index in range(tl.program_id(0), tl.load(failures) * tiles, programs):
        row = tl.load(failures + 1 + index // tiles).to(tl.int64)
        tile = index % tiles
        _mark_tile(
            row,
            tile,
            logits,
            ks,
            ke,
            threshold,
            counter,
            segments,
            ids,
            values,
            pitch,
            width,
            tiles,
            capacity,
            UNIT,
            BLOCK,
            STEPS,
        )
