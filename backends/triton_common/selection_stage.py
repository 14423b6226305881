"""Stages along the keys, for budgets that hold no whole row: the best keys so far stand before each stage's.

A row of the stage's logits is ``prefix`` columns of scores kept from the stages before, right-aligned, and
then the stage's own. Kept keys come first and in order, so the order of columns is the order of ids.
"""

from __future__ import annotations

import triton
import triton.language as tl

from portable_indexer.backends.triton_common import selection_keys as keys


@triton.jit(
    do_not_specialize=[
        "ks",
        "ke",
        "score_ks",
        "score_ke",
        "select_ks",
        "select_ke",
        "bounds_pitch",
        "rows",
        "width",
        "stage_keys",
        "prefix",
        "k",
        "blocks",
    ]
)
def stage_bounds(
    ks,  # int32 [M]
    ke,  # int32 [M]
    score_ks,  # int32 [stages, bounds_pitch], written: the row's keys in the stage, from the stage's first key on
    score_ke,
    select_ks,  # int32 [stages, bounds_pitch], written: the columns to choose from
    select_ke,
    bounds_pitch,
    rows,
    width,  # keys in all
    stage_keys,
    prefix,
    k,
    blocks,  # blocks of rows in a stage
    BLOCK: tl.constexpr,
):
    """One program a block of rows of one stage."""
    stage = tl.program_id(0) // blocks
    row = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    here = row < rows
    first = tl.maximum(tl.load(ks + row, mask=here, other=0), 0)
    last = tl.maximum(tl.minimum(tl.load(ke + row, mask=here, other=0), width), 0)
    origin = stage * stage_keys
    begin = tl.minimum(tl.maximum(first - origin, 0), stage_keys)
    end = tl.minimum(tl.maximum(last - origin, 0), stage_keys)
    kept = tl.minimum(tl.maximum(tl.minimum(last, origin) - first, 0), k)
    at = stage * bounds_pitch + row
    tl.store(score_ks + at, begin, mask=here)
    tl.store(score_ke + at, end, mask=here)
    tl.store(select_ks + at, tl.where(kept > 0, prefix - kept, prefix + begin), mask=here)
    tl.store(select_ke + at, prefix + end, mask=here)


@triton.jit(
    do_not_specialize=[
        "logits",
        "ks",
        "select_ks",
        "select_ke",
        "chosen",
        "best",
        "threshold",
        "out",
        "pitch",
        "out_pitch",
        "origin",
        "prefix",
        "k",
    ]
)
def carry_best(
    logits,  # float32 [M, prefix + stage_keys]
    ks,  # int32 [M]
    select_ks,  # int32 [M]
    select_ke,  # int32 [M]
    chosen,  # int32 [M, k]: columns relative to select_ks, ascending
    best,  # int32 [M, prefix]: ids of the keys that the prefix holds
    threshold,  # float32 [M], written: the least of k kept scores
    out,  # int32 [M, k], written by the last stage
    pitch: tl.int64,
    out_pitch: tl.int64,
    origin,  # the stage's first key
    prefix,
    k,
    SLOTS: tl.constexpr,  # at least k
    LAST: tl.constexpr,
):
    """One program a row: move the chosen keys into the prefix, or their ids into ``out`` after the last stage."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(select_ks + row)
    count = tl.minimum(tl.maximum(tl.load(select_ke + row) - first, 0), k)
    slot = tl.arange(0, SLOTS)
    there = slot < count
    column = first + tl.load(chosen + row * k + slot, mask=there, other=0)
    kept = there & (column < prefix)
    ids = tl.load(best + row * prefix + column, mask=kept, other=0)
    ids = tl.where(kept, ids, origin + (column - prefix) - tl.load(ks + row))
    if LAST:
        tl.store(out + row * out_pitch + slot, tl.where(there, ids, -1), mask=slot < k)
    else:
        scores = tl.load(logits + row * pitch + column, mask=there, other=0.0)
        least = tl.min(tl.where(there, keys.image(scores), 0xFFFFFFFF), axis=0)
        largest = tl.max(tl.where(there, ids, 0), axis=0)
        # Always ``count``, but known only once every key is read: nothing is overwritten before.
        read = slot < tl.where((least > 0) & (largest < 0x7FFFFFFF), count, 0)
        place = prefix - count + slot
        tl.store(logits + row * pitch + place, scores, mask=read)
        tl.store(best + row * prefix + place, ids, mask=read)
        tl.store(threshold + row, keys.score(least), mask=count == k)
