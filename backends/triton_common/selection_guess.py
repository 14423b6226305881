"""A threshold for each long row, from a sample of it; a poor guess costs time, never correctness."""

from __future__ import annotations

import triton
import triton.language as tl

from portable_indexer.backends.triton_common import selection_keys as keys

# Keys of the sample, far apart in the row, of which only the best counts: the search sees a quarter of them.
GROUP = tl.constexpr(4)


@triton.jit
def sample_best(base, first, last, SAMPLE: tl.constexpr, RUN: tl.constexpr):
    """Images of the best key of each group, and how many keys a group has, of a sample spread over [first, last).

    The sample consists of runs of RUN keys side by side. The image of a group without keys is 0.
    """
    stride = tl.maximum((last - first) // (SAMPLE // RUN), RUN)
    # Runs start at multiples of RUN; one that is not wholly within the row is left out.
    begin = (first + tl.arange(0, SAMPLE // RUN) * stride + (RUN - 1)) // RUN * RUN
    whole = begin <= last - RUN
    inside = tl.broadcast_to(whole[:, None], [SAMPLE // RUN, RUN])
    column = begin[:, None] + tl.arange(0, RUN)[None, :]
    images = tl.where(inside, keys.image(tl.load(base + column, mask=inside, other=0.0)), 0)
    best = tl.max(tl.reshape(images, [GROUP, SAMPLE // GROUP]), axis=0)
    taken = tl.sum(whole.to(tl.int32), axis=0) * RUN
    groups = tl.sum((best != 0).to(tl.int32), axis=0)
    return best, groups, taken.to(tl.float32) / tl.maximum(groups, 1).to(tl.float32)


@triton.jit
def power(base, exponent):
    return tl.exp2(tl.log2(base) * exponent)


@triton.jit
def threshold_of_share(best, groups, size, share):
    """The score that about ``share`` of the row's keys reach, given the best of ``groups`` groups of ``size``."""
    rank = groups.to(tl.float32) * (1.0 - power(1.0 - tl.minimum(share, 0.999), size))
    least = tl.minimum(tl.maximum(rank.to(tl.int32), 1), groups)
    lowest = tl.full((), keys.NEGATIVE_INFINITY, tl.uint32)
    return keys.score(keys.kth(best, lowest, groups, least, least + least // 32))


@triton.jit(
    do_not_specialize=[
        "logits",
        "ks",
        "ke",
        "threshold",
        "counter",
        "failures",
        "bracket",
        "pitch",
        "width",
        "k",
        "prefix",
    ]
)
def guess_threshold(
    logits,  # float32 [M, width], row pitch in units of UNIT elements
    ks,  # int32 [M]
    ke,  # int32 [M]
    threshold,  # float32 [M], written; kept where the row starts with k best keys of earlier stages
    counter,  # int32 [M], set to zero
    failures,  # int32 [1 + M]: the first one is set to zero
    bracket,  # uint32 [M, 4], not read
    pitch: tl.int64,
    width,
    k,
    prefix,  # columns in front that hold the best keys of earlier stages; 0 where there are none
    UNIT: tl.constexpr,
    SAMPLE: tl.constexpr,
    RUN: tl.constexpr,
    CAPACITY: tl.constexpr,  # candidates that a row's list holds
    SHORT: tl.constexpr,  # keys of a row that is chosen without candidates
):
    """One program a row: threshold[row] such that a little more than k keys are likely to reach it.

    NaN where no candidates are needed: at most SHORT keys, or k.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.maximum(tl.load(ks + row), 0)
    last = tl.maximum(tl.minimum(tl.load(ke + row), width), 0)
    length = tl.maximum(last - first, 0)
    found = tl.full((), float("nan"), tl.float32)
    if first == prefix - k:
        found = tl.load(threshold + row)
    elif length > tl.maximum(SHORT, k):
        base = tl.multiple_of(logits + row * pitch * UNIT, 4 * UNIT)
        best, groups, size = sample_best(base, first, last, SAMPLE, RUN)
        part = size * groups.to(tl.float32) / length.to(tl.float32)
        # Rank r in the sample has a relative spread of 1 / sqrt(r): take the r whose r - 4.3 sqrt(r) is k's share.
        root = (4.3 + tl.sqrt(18.49 + 4.0 * k * part)) * 0.5
        wanted = tl.minimum(root * root / part, 0.8 * CAPACITY)
        found = threshold_of_share(best, groups, size, wanted / length.to(tl.float32))
    tl.store(threshold + row, found)
    tl.store(counter + row, 0)
    if row == 0:
        tl.store(failures, 0)
