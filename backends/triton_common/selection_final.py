"""The exact choice among a row's candidates, in the order of their ids."""

from __future__ import annotations

import triton
import triton.language as tl

from portable_indexer.backends.triton_common import selection_keys as keys
from portable_indexer.backends.triton_common.selection_guess import power, sample_best, threshold_of_share
from portable_indexer.backends.triton_common.selection_search import find_cut, logistic_guess, moments
from portable_indexer.backends.triton_common.selection_short import choose_row


@triton.jit
def _list_places(segment, tiles, index, pitch, TILES: tl.constexpr, LOG_TILES: tl.constexpr):
    """Places in the list of the entries number ``index`` in ascending id order."""
    lane = tl.arange(0, TILES)
    places = tl.zeros_like(index)
    before = tl.zeros((), tl.int32)
    for begin in range(0, tiles, TILES):
        known = begin + lane < tiles
        place = tl.load(segment + begin + lane, mask=known, other=0)
        count = tl.load(segment + pitch + begin + lane, mask=known, other=0)
        end = before + tl.cumsum(count, axis=0)
        # Bisection: how many segments end at or before the entry.
        passed = tl.zeros_like(index)
        for level in tl.static_range(LOG_TILES):
            half = TILES >> (level + 1)
            passed += tl.where(tl.gather(end, passed + (half - 1), 0) <= index, half, 0)
        within = (index >= before) & (index < tl.max(end, axis=0))
        places = tl.where(within, index + tl.gather(place - end + count, passed, 0), places)
        before = tl.max(end, axis=0)
    return places


@triton.jit
def _cut_of_listed(scores, limit, total, k):
    """What ``find_cut`` says of the ``total`` scores, at least k, that reach ``limit``; -inf: all keys of the row."""
    if limit == float("-inf"):
        _, mean, spread = moments(scores)
        left = mean - 3.0 * spread
        trial = logistic_guess(mean, spread, total, k)
        right = mean + 3.0 * spread
    else:
        # Above a limit they are taken for an exponential tail.
        excess = tl.sum(tl.where(scores >= limit, scores - limit, 0.0), axis=0) / total.to(tl.float32)
        left = limit
        trial = limit + excess * tl.log2(total.to(tl.float32) / k.to(tl.float32)) * 0.6931
        right = trial + 2.0 * excess
    return find_cut(scores, keys.image(limit), total, left, trial, right, k)


@triton.jit
def choose_listed(
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
    CAPACITY: tl.constexpr,
    PIECE: tl.constexpr,
    TILES: tl.constexpr,
    LOG_TILES: tl.constexpr,
):
    """Write the ids of the k best of a row's ``total`` candidates, at least k and at most CAPACITY."""
    slot = tl.arange(0, CAPACITY)
    found = tl.load(scores + row * CAPACITY + slot, mask=slot < total, other=float("-inf"))
    cut, ties = _cut_of_listed(found, tl.load(threshold + row), total, k)
    bound = keys.score(cut)
    used = tl.cdiv(last - first // 32 * 32, tile_keys)
    segment = segments + row * tiles * 2
    done = tl.zeros((), tl.int32)
    equals = tl.zeros((), tl.int32)
    for begin in range(0, total, PIECE):
        index = begin + tl.arange(0, PIECE)
        inside = index < total
        place = row * CAPACITY + _list_places(segment, used, index, tiles, TILES, LOG_TILES)
        piece = tl.load(scores + place, mask=inside, other=float("-inf"))
        ids_found = tl.load(ids + place, mask=inside, other=0) + (first - start)
        done, equals = keys.write_chosen(target, piece, inside, ids_found, bound, ties, done, equals, k)


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
    ]
)
def choose_candidates(
    logits,  # float32 [M, width], row pitch in units of UNIT elements
    ks,  # int32 [M]
    ke,  # int32 [M]
    threshold,  # float32 [M], replaced by a better guess in rows that fail
    counter,  # int32 [M], zeroed in rows that fail
    failures,  # int32 [1 + M]: gains the rows whose candidates are fewer than k, or too many
    bracket,  # uint32 [M, 4], written in rows that fail: images around the k-th one, with the keys that reach each
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
    UNIT: tl.constexpr,
    CAPACITY: tl.constexpr,
    PIECE: tl.constexpr,  # ids written at a time
    TILES: tl.constexpr,  # segments looked up at a time
    LOG_TILES: tl.constexpr,
    SAMPLE: tl.constexpr,
    RUN: tl.constexpr,
    SHORT: tl.constexpr,  # keys of a row that is chosen without candidates
    PARTS: tl.constexpr,
    SHORT_PIECE: tl.constexpr,
    SHORT_SAMPLE: tl.constexpr,
):
    """One program a row: writes its ids, or puts it on the list of those that are tried again."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(ks + row)
    first = tl.maximum(start, 0)
    last = tl.maximum(tl.minimum(tl.load(ke + row), width), 0)
    length = tl.maximum(last - first, 0)
    target = out + row * out_pitch
    total = tl.load(counter + row)
    limit = tl.load(threshold + row)
    if length <= k:
        keys.write_all(target, length, first - start, k, CAPACITY)
    elif limit != limit:
        row_keys = logits + row * pitch * UNIT + first
        choose_row(row_keys, target, length, first - start, k, SHORT, PARTS, SHORT_PIECE, SHORT_SAMPLE)
    elif (total >= k) & (total <= CAPACITY):
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
        tl.store(failures + 1 + tl.atomic_add(failures, 1, sem="relaxed"), row.to(tl.int32))
        base = tl.multiple_of(logits + row * pitch * UNIT, 4 * UNIT)
        best, groups, size = sample_best(base, first, last, SAMPLE, RUN)
        goal = tl.sqrt(k.to(tl.float32) * CAPACITY)
        share = goal / length.to(tl.float32)
        # How the sample stands for the row is known better now: from its keys that reach the first threshold.
        lowest = keys.image(limit)
        reached = tl.sum((best >= lowest).to(tl.int32), axis=0)
        if (reached > 0) & (reached < groups) & (total > 0):
            missed = 1.0 - reached.to(tl.float32) / groups.to(tl.float32)
            share = (1.0 - power(missed, 1.0 / size)) * goal / total.to(tl.float32)
        found = keys.image(threshold_of_share(best, groups, size, share))
        # A guess that many keys equal is moved just above them: then they need not be listed, only counted.
        reach = tl.sum((best >= found).to(tl.int32), axis=0)
        pass_by = tl.sum((best > found).to(tl.int32), axis=0)
        low = tl.full((), keys.NEGATIVE_INFINITY, tl.uint32)
        low_count = length
        high = tl.full((), keys.ABOVE_ALL, tl.uint32)
        high_count = tl.zeros((), tl.int32)
        if total >= k:
            low = lowest
            low_count = total
        else:
            high = lowest
            high_count = total
        found = tl.where(reach > 2 * pass_by + 16, found + 1, found)
        found = tl.minimum(tl.maximum(found, low + 1), high - 1)
        tl.store(threshold + row, keys.score(found))
        tl.store(bracket + row * 4, low)
        tl.store(bracket + row * 4 + 1, low_count.to(tl.uint32))
        tl.store(bracket + row * 4 + 2, high)
        tl.store(bracket + row * 4 + 3, high_count.to(tl.uint32))
        tl.store(counter + row, 0)
