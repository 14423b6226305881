"""Device functions that every selection kernel shares: integer images of scores, bit counts, the k-th key.

An image is a uint32 in the order of the scores: NaN has the image of -inf, -0.0 that of 0.0, and 0 lies
below all of them and stands for "no key". Comparing images is exact and free of float rounding modes.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEGATIVE_INFINITY = tl.constexpr(0x007FFFFF)  # image of -inf
ABOVE_ALL = tl.constexpr(0xFF800001)  # just above the image of +inf


@triton.jit
def image(scores):
    """uint32 images of float32 scores."""
    bits = scores.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    bits = tl.where(magnitude == 0, 0, bits)
    ordered = tl.where(bits >= 0x80000000, ~bits, bits | 0x80000000)
    return tl.where(magnitude > 0x7F800000, NEGATIVE_INFINITY, ordered)


@triton.jit
def score(images):
    """float32 scores of uint32 images."""
    return tl.where(images >= 0x80000000, images & 0x7FFFFFFF, ~images).to(tl.float32, bitcast=True)


@triton.jit
def bit_count(words):
    """Number of set bits of each uint32."""
    pairs = words - ((words >> 1) & 0x55555555)
    nibbles = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    return ((((nibbles + (nibbles >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def between(low, low_count, high, high_count, goal, turn):
    """An image strictly between two others, where about ``goal`` keys should remain.

    First as if the logarithm of the count were linear in the score, as in the tail of a distribution, then
    as if the count were; every fourth turn halves the images instead, which bounds the number of turns.
    """
    bottom = score(low)
    top = score(high)
    more = low_count.to(tl.float32)
    less = high_count.to(tl.float32)
    if turn < 2:
        more, less, goal = tl.log2(more), tl.log2(tl.maximum(less, 0.5)), tl.log2(goal)
    part = (more - goal) / (more - less)
    middle = bottom + (top - bottom) * part
    half = low + ((high - low) >> 1)
    found = tl.where((middle > bottom) & (middle < top) & (turn % 4 != 3), image(middle), half)
    return tl.minimum(tl.maximum(found, low + 1), high - 1)


@triton.jit
def kth(images, lowest, reached, least, most):
    """An image T that at least ``least`` and, unless ties forbid it, at most ``most`` of ``images`` reach.

    ``reached`` of them, at least ``least``, reach ``lowest``. With ``least == most == k`` the k best are
    exactly those above T and, of those equal to T, as many as are missing.
    """
    low = lowest
    low_count = reached
    high = tl.max(images, axis=0) + 1
    high_count = 0
    goal = (least + most).to(tl.float32) * 0.5
    turn = 0
    while (high > low + 1) & (low_count > most):
        if turn % 4 == 3:
            # Draw both ends in to keys that are there: steps over wide gaps, and ends the search on ties.
            low = tl.min(tl.where(images >= low, images, 0xFFFFFFFF), axis=0)
            high = tl.max(tl.where(images < high, images, 0), axis=0) + 1
        trial = between(low, low_count, high, high_count, goal, turn)
        count = tl.sum((images >= trial).to(tl.int32), axis=0)
        enough = count >= least
        low = tl.where(enough, trial, low)
        low_count = tl.where(enough, count, low_count)
        high = tl.where(enough, high, trial)
        high_count = tl.where(enough, high_count, count)
        turn += 1
    return low


@triton.jit
def write_all(target, length, offset, k, SLOTS: tl.constexpr):
    """Write the ids of a row of ``length`` keys, at most k: all of them from ``offset`` on, then -1 up to slot k."""
    slot = tl.arange(0, SLOTS)
    tl.store(target + slot, tl.where(slot < length, slot + offset, -1), mask=slot < k)


@triton.jit
def write_chosen(target, scores, inside, ids, bound, ties, done, equals, k):
    """Write the ids of one stretch of a row, in order: with ties 0 of the keys that reach ``bound``, else of those
    above it and of ``ties`` in all equal to it.

    ``done`` ids and ``equals`` such keys came in the stretches before; returns them with this one's added. Nothing
    is written past slot k. ``scores`` has -inf or NaN where a place is not ``inside``; NaN is equal to -inf.
    """
    if ties == 0:
        chosen = scores >= bound
        upto = tl.cumsum(chosen.to(tl.int32), axis=0)
        slot = done + upto - 1
        tl.store(target + slot, ids, mask=chosen & (slot < k))
        done += tl.max(upto, axis=0)
    else:
        scores = tl.where(scores == scores, scores, float("-inf"))
        above = scores > bound
        equal = inside & (scores == bound)
        # A stretch holds fewer than 2^15 keys, so that one sum carries both counts.
        both = above.to(tl.int32) + (equal.to(tl.int32) << 16)
        upto = tl.cumsum(both, axis=0)
        rank = equals + (upto >> 16)
        slot = done + (upto & 0xFFFF) + tl.minimum(rank, ties) - tl.minimum(equals, ties) - 1
        tl.store(target + slot, ids, mask=(above | (equal & (rank <= ties))) & (slot < k))
        total = tl.sum(both, axis=0)
        done += (total & 0xFFFF) + tl.minimum(equals + (total >> 16), ties) - tl.minimum(equals, ties)
        equals += total >> 16
    return done, equals


@triton.jit
def load_images(base, begin, first, last, CHUNK: tl.constexpr):
    """Columns from ``begin`` on and the images of their keys, 0 outside [first, last), which is not read."""
    column = begin + tl.arange(0, CHUNK)
    valid = (column >= first) & (column < last)
    return column, tl.where(valid, image(tl.load(base + column, mask=valid, other=0.0)), 0)
