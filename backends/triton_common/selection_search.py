"""The search for the k-th best of scores that a program holds in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from portable_indexer.backends.triton_common import selection_keys as keys

ZERO = tl.constexpr(0x80000000)  # image of 0.0; no score has the image just below


@triton.jit
def moments(scores):
    """(count, mean, deviation) of the finite scores."""
    finite = tl.abs(scores) < float("inf")
    scores = tl.where(finite, scores, 0.0)
    count = tl.maximum(tl.sum(finite.to(tl.int32)), 1).to(tl.float32)
    mean = tl.sum(scores) / count
    return count, mean, tl.sqrt(tl.maximum(tl.sum(scores * scores) / count - mean * mean, 0.0))


@triton.jit
def logistic_guess(mean, spread, length, k):
    """The score that k of ``length`` keys would reach if scores were logistic."""
    odds = k.to(tl.float32) / tl.maximum(length - k, 1).to(tl.float32)
    # ln(odds) / (pi / sqrt(3)) deviations below the mean
    return mean - spread * tl.log2(odds) * 0.3822


@triton.jit
def guess_of_sample(row_keys, length, k, SAMPLE: tl.constexpr):
    """(guess, spread): about the score that k of a row's keys reach, and the deviation of scores.

    From runs of 32 keys, spread over the row; a poor guess, NaN too, costs turns, never correctness.
    """
    RUNS: tl.constexpr = SAMPLE // 32
    stride = tl.maximum(length // RUNS, 32)
    place = (tl.arange(0, RUNS) * stride)[:, None] + tl.arange(0, 32)[None, :]
    _, mean, spread = moments(tl.load(row_keys + place, mask=place < length, other=float("nan")))
    return logistic_guess(mean, spread, length, k), spread


@triton.jit
def _least(scores, bound):
    """The least of the scores that reach ``bound``; +inf if none does."""
    return tl.min(tl.where(scores >= bound, scores, float("inf")))


@triton.jit
def find_cut(scores, low, low_count, left, trial, right, k):
    """(T, ties): with ties 0 the k best keys are those that reach image T; else those above, and ``ties`` equal to it.

    ``low_count`` of the scores, at least k, reach the image ``low``; places without a key hold -inf or NaN. The
    image of -inf as ``low`` stands for all keys; ``low_count`` is their number then, more than k. ``left``,
    ``trial`` and ``right`` guess at a score near ``low``, at the k-th, and at one that few reach.

    A bracket [low, high) of images with the number of keys that reach each end closes in on the k-th key. A trial
    lies where the counts, taken as linear in the score, say; an end that stays twice counts half, so that trials
    fall on both sides of k.
    """
    high = tl.full((), keys.ABOVE_ALL, tl.uint32)
    high_count = tl.zeros((), tl.int32)
    # How many keys the ends of the line are off.
    more = (low_count - k).to(tl.float32)
    less = k.to(tl.float32)
    side = 0
    turn = 0
    while (high > low + 1) & (low_count > k):
        one_less = (low_count == k + 1) & (low > keys.NEGATIVE_INFINITY)
        one_more = high_count == k - 1
        found = tl.where((trial > left) & (trial < right), keys.image(trial), low + ((high - low) >> 1))
        if one_less | one_more:
            # One key decides: the least within, which is one too many, or the largest, which is missing.
            sign = tl.where(one_less, 1.0, -1.0)
            edge = tl.where(one_less, keys.score(low), -keys.score(high - 1))
            nearest = keys.image(_least(scores * sign, edge) * sign)
            low = tl.where(one_less, nearest, low)
            high = tl.where(one_less, high, nearest + 1)
            found = tl.where(one_less, nearest + 1, nearest)
        elif (turn % 8 == 7) | ((turn == 0) & (left == right)):
            # Draw both ends in to keys that are there: ends on ties, and steps over wide gaps.
            high = keys.image(-_least(-scores, -keys.score(high - 1))) + 1
            right = keys.score(high)
            found = low + 1
            if low > keys.NEGATIVE_INFINITY:
                low = keys.image(_least(scores, keys.score(low)))
                left = keys.score(low)
                found = low + ((high - low) >> 1)
        found = tl.minimum(tl.maximum(found, low + 1), high - 1)
        trial = keys.score(found)
        count = tl.sum(tl.where(scores >= trial, 1.0, 0.0)).to(tl.int32)
        enough = (count >= k) | (found == low)
        off = (count - k).to(tl.float32)
        more = tl.where(enough, off + 0.5, tl.where(side < 0, more * 0.5, more))
        less = tl.where(enough, tl.where(side > 0, less * 0.5, less), 0.5 - off)
        side = tl.where(enough, 1, -1)
        left = tl.where(enough, trial, left)
        right = tl.where(enough, right, trial)
        # 0.0 and -0.0 are one score with two images: the higher one at the low end, the lower one at the high end.
        low = tl.where(enough, tl.where(found == ZERO - 1, ZERO, found), low)
        low_count = tl.where(enough, count, low_count)
        high = tl.where(enough, high, tl.where(found == ZERO, ZERO - 1, found))
        high_count = tl.where(enough, high_count, count)
        trial = left + (right - left) * (more / (more + less))
        turn += 1
    exact = (low_count == k) & (low > keys.NEGATIVE_INFINITY)
    return low, tl.where(exact, 0, k - high_count)
