"""Rows on which the guessed threshold failed, twice: the exact choice without candidates.

A search over the scores, one read of the row a turn, finds the k-th key; a last read writes the ids. It
asks nothing of the scores' distribution: ties, order and clusters change its time only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from portable_indexer.backends.triton_common import selection_keys as keys
from portable_indexer.backends.triton_common.selection_final import choose_listed


@triton.jit
def _tally(images, trial, counts, least, largest):
    reach = images >= trial
    least = tl.minimum(least, tl.where(reach, images, 0xFFFFFFFF))
    return counts + reach.to(tl.int32), least, tl.maximum(largest, tl.where(reach, 0, images))


@triton.jit
def _count(base, first, last, trial, CHUNK: tl.constexpr):
    """How many keys of a row reach ``trial``, the least image that does and the largest that does not."""
    counts = tl.zeros([CHUNK], tl.int32)
    least = tl.full([CHUNK], 0xFFFFFFFF, tl.uint32)
    largest = tl.zeros([CHUNK], tl.uint32)
    for begin in range(first // 32 * 32, last, CHUNK * 4):
        # Four pieces at a time, so that their loads overlap.
        _, images0 = keys.load_images(base, begin, first, last, CHUNK)
        _, images1 = keys.load_images(base, begin + CHUNK, first, last, CHUNK)
        _, images2 = keys.load_images(base, begin + CHUNK * 2, first, last, CHUNK)
        _, images3 = keys.load_images(base, begin + CHUNK * 3, first, last, CHUNK)
        counts, least, largest = _tally(images0, trial, counts, least, largest)
        counts, least, largest = _tally(images1, trial, counts, least, largest)
        counts, least, largest = _tally(images2, trial, counts, least, largest)
        counts, least, largest = _tally(images3, trial, counts, least, largest)
    return tl.sum(counts, axis=0), tl.min(least, axis=0), tl.max(largest, axis=0)


@triton.jit
def _cut(base, first, last, low, low_count, high, high_count, k, CHUNK: tl.constexpr):
    """(T, ties): with ties 0 the k best are the keys that reach image T; else those above, and ``ties`` equal to it.

    ``low_count`` keys, at least k, reach the image ``low``; ``high_count``, fewer than k, reach ``high``.
    """
    turn = 0
    while (high > low + 1) & (low_count > k):
        trial = keys.between(low, low_count, high, high_count, k.to(tl.float32), turn)
        count, least, largest = _count(base, first, last, trial, CHUNK)
        enough = count >= k
        low = tl.where(enough, least, low)
        low_count = tl.where(enough, count, low_count)
        high = tl.where(enough, high, largest + 1)
        high_count = tl.where(enough, high_count, count)
        turn += 1
    return low, tl.where((low_count == k) & (low > keys.NEGATIVE_INFINITY), 0, k - high_count)


@triton.jit
def _write(base, target, start, first, last, cut, ties, k, CHUNK: tl.constexpr):
    """Write the ids of the k best, ascending, as ``_cut`` tells them."""
    bound = keys.score(cut)
    done = tl.zeros((), tl.int32)
    equals = tl.zeros((), tl.int32)
    for begin in range(first // 32 * 32, last, CHUNK):
        column = begin + tl.arange(0, CHUNK)
        inside = (column >= first) & (column < last)
        scores = tl.load(base + column, mask=inside, other=float("-inf"))
        wanted = (scores > bound) | (inside & (equals < ties)) | ((scores >= bound) & (ties == 0))
        if tl.max(wanted.to(tl.int32), axis=0) > 0:
            done, equals = keys.write_chosen(target, scores, inside, column - start, bound, ties, done, equals, k)


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
        "scores",
        "out",
        "pitch",
        "out_pitch",
        "width",
        "tiles",
        "tile_keys",
        "k",
        "programs",
    ]
)
def finish_rows(
    logits,  # float32 [M, width], row pitch in units of UNIT elements
    ks,  # int32 [M]
    ke,  # int32 [M]
    threshold,  # float32 [M]
    counter,  # int32 [M]: keys that reach the threshold
    failures,  # int32 [1 + M]: how many rows failed, and which
    bracket,  # uint32 [M, 4]: images around the k-th one, with the keys that reach each, from the first guess
    segments,  # int32 [M, 2, tiles]
    ids,  # int32 [M, CAPACITY]
    scores,  # float32 [M, CAPACITY]: those of the candidates
    out,  # int32 [M, k]
    pitch: tl.int64,
    out_pitch: tl.int64,
    width,
    tiles,
    tile_keys,
    k,
    programs,
    UNIT: tl.constexpr,
    CAPACITY: tl.constexpr,
    PIECE: tl.constexpr,  # ids written at a time
    TILES: tl.constexpr,  # segments looked up at a time
    LOG_TILES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A fixed number of programs share the rows that failed: from their new candidates, or else by a search."""
    for index in range(tl.program_id(0), tl.load(failures), programs):
        row = tl.load(failures + 1 + index).to(tl.int64)
        start = tl.load(ks + row)
        first = tl.maximum(start, 0)
        last = tl.maximum(tl.minimum(tl.load(ke + row), width), 0)
        total = tl.load(counter + row)
        target = out + row * out_pitch
        if (total >= k) & (total <= CAPACITY):
            choose_listed(
                row,
                first,
                last,
                start,
                total,
                threshold,
                segments,
                ids,
                scores,
                target,
                tiles,
                tile_keys,
                k,
                CAPACITY,
                PIECE,
                TILES,
                LOG_TILES,
            )
        else:
            base = tl.multiple_of(logits + row * pitch * UNIT, 4 * UNIT)
            limit = keys.image(tl.load(threshold + row))
            low = tl.load(bracket + row * 4)
            low_count = tl.load(bracket + row * 4 + 1).to(tl.int32)
            high = tl.load(bracket + row * 4 + 2)
            high_count = tl.load(bracket + row * 4 + 3).to(tl.int32)
            if (total >= k) & (limit > low):
                low = limit
                low_count = total
            if (total < k) & (limit < high):
                high = limit
                high_count = total
            cut, ties = _cut(base, first, last, low, low_count, high, high_count, k, CHUNK)
            _write(base, target, start, first, last, cut, ties, k, CHUNK)
