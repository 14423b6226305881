"""A threshold for each long row, from a sample of it; a poor guess costs time, never correctness."""

from __future__ import annotations

import triton
import triton.language as tl

from portable_indexer.backends.triton_common import selection_keys as keys


@triton.jit
def sample_images(base, first, last, SAMPLE: tl.constexpr, RUN: tl.constexpr):
    """Images of SAMPLE keys spread evenly over [first, last), RUN of them side by side; 0 where none was taken."""
    stride = tl.maximum((last - first) // (SAMPLE // RUN), RUN)
    # Runs start at multiples of RUN; one that is not wholly within the row is left out.
    begin = (first + tl.arange(0, SAMPLE // RUN) * stride + (RUN - 1)) // RUN * RUN
    whole = tl.broadcast_to((begin <= last - RUN)[:, None], [SAMPLE // RUN, RUN])
    column = begin[:, None] + tl.arange(0, RUN)[None, :]
    images = tl.where(whole, keys.image(tl.load(base + column, mask=whole, other=0.0)), 0)
    return tl.reshape(images, [SAMPLE])


@triton.jit
def threshold_of_rank(images, taken, rank):
    """The score that about ``rank`` of the ``taken`` keys of a sample reach."""
    least = tl.minimum(tl.maximum(rank.to(tl.int32), 1), taken)
    lowest = tl.full((), keys.NEGATIVE_INFINITY, tl.uint32)
    return keys.score(keys.kth(images, lowest, taken, least, least + least // 32))


@triton.jit(
    do_not_specialize=[
        "logits",
        "ks",
        "ke",
        "threshold",
        "counter",
        "failures",
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
    pitch: tl.int64,
    width,
    k,
    prefix,  # columns in front that hold the best keys of earlier stages; 0 where there are none
    UNIT: tl.constexpr,
    SAMPLE: tl.constexpr,
    RUN: tl.constexpr,
    CAPACITY: tl.constexpr,  # candidates that a row's list holds
):
    """One program a row: threshold[row] such that a little more than k keys are likely to reach it.

    +inf where no candidates are needed (at most k keys), -inf where all keys fit into the list.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.maximum(tl.load(ks + row), 0)
    last = tl.minimum(tl.load(ke + row), width)
    length = tl.maximum(last - first, 0)
    found = tl.full((), float("-inf"), tl.float32)
    if length <= k:
        found = tl.full((), float("inf"), tl.float32)
    if first == prefix - k:
        found = tl.load(threshold + row)
    elif length > CAPACITY:
        base = tl.multiple_of(logits + row * pitch * UNIT, 4 * UNIT)
        images = sample_images(base, first, last, SAMPLE, RUN)
        taken = tl.sum((images != 0).to(tl.int32), axis=0)
        part = taken.to(tl.float32) / length.to(tl.float32)
        # Rank r in the sample has a relative spread of 1 / sqrt(r): take the r whose r - 4.3 sqrt(r) is k's share.
        root = (4.3 + tl.sqrt(18.49 + 4.0 * k * part)) * 0.5
        found = threshold_of_rank(images, taken, tl.minimum(root * root, 0.8 * CAPACITY * part))
    tl.store(threshold + row, found)
    tl.store(counter + row, 0)
    if row == 0:
        tl.store(failures, 0)
