"""``PrefillRowShard``: which step rows a rank owns, and what of a chunk it scores."""

from __future__ import annotations

import dataclasses
import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from portable_indexer.sharding import PrefillRowShard, balanced_prefill_row_shard


def shards(num_decode_tokens: int, sizes: list[int]) -> list[PrefillRowShard]:
    return [PrefillRowShard(num_decode_tokens, tuple(sizes), rank) for rank in range(len(sizes))]


def chunk(start: int, end: int, bounds: torch.Tensor) -> SimpleNamespace:
    """Step rows [start, end) of a step whose row m has the bounds (bounds[m], bounds[m] + 100)."""
    own = bounds[start:end]
    return SimpleNamespace(token_start=start, token_end=end, cu_seqlen_ks=own, cu_seqlen_ke=own + 100)


def test_rows_follow_the_decode_rows() -> None:  # P02
    sizes = balanced_prefill_row_shard([4098], [4098], 1, 4)
    assert sizes is not None
    parts = shards(3, sizes)
    assert parts[0].start == 3 and parts[-1].stop == 3 + 4098
    assert all(left.stop == right.start for left, right in pairwise(parts))
    assert [part.stop - part.start for part in parts] == sizes


def test_padded_tail_rows_belong_to_nobody() -> None:  # P01
    sizes = balanced_prefill_row_shard([1000], [1000], 1, 4)
    assert sizes is not None and shards(0, sizes)[-1].stop == 1000  # of 1,024 with padding


def test_is_frozen_and_takes_any_sequence() -> None:
    shard = PrefillRowShard(2, [3, 4], 1)  # type: ignore[arg-type]
    assert shard.sizes == (3, 4) and hash(shard) == hash(PrefillRowShard(2, (3, 4), 1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        shard.rank = 0  # type: ignore[misc]


def test_narrow_takes_each_row_exactly_once() -> None:
    rng = random.Random()
    for _ in range(200):
        decode, rows, ranks = rng.randrange(5), rng.randrange(0, 60), rng.randrange(1, 9)
        cuts = sorted(rng.randrange(rows + 1) for _ in range(ranks - 1))
        sizes = [stop - start for start, stop in zip([0, *cuts], [*cuts, rows], strict=True)]
        bounds = torch.randint(-5, 1000, (decode + rows + 7,), dtype=torch.int32)
        ends = sorted({decode, decode + rows, *(rng.randrange(decode, decode + rows + 1) for _ in range(3))})
        owner = [-1] * (decode + rows)
        for part in shards(decode, sizes):
            for first, last in pairwise(ends):
                narrowed = part.narrow(chunk(first, last, bounds))
                if narrowed is None:
                    assert max(first, part.start) >= min(last, part.stop)
                    continue
                start, end, ks, ke = narrowed
                assert max(first, part.start) == start < end == min(last, part.stop)
                assert torch.equal(ks, bounds[start:end]) and torch.equal(ke, bounds[start:end] + 100)
                assert ks.dtype == torch.int32 and ks.is_contiguous()
                for row in range(start, end):
                    assert owner[row] == -1
                    owner[row] = part.rank
        wanted = [-1] * decode + [rank for rank, size in enumerate(sizes) for _ in range(size)]
        assert owner == wanted


def test_narrow_of_a_rank_without_rows() -> None:
    bounds = torch.arange(10, dtype=torch.int32)
    assert PrefillRowShard(0, (10, 0), 1).narrow(chunk(0, 10, bounds)) is None
    assert PrefillRowShard(0, (4, 6), 0).narrow(chunk(4, 10, bounds)) is None
    assert PrefillRowShard(0, (4, 6), 0).narrow(chunk(3, 3, bounds)) is None


def test_narrow_gives_views() -> None:
    bounds = torch.arange(10, dtype=torch.int32)
    narrowed = PrefillRowShard(0, (4, 6), 1).narrow(chunk(0, 10, bounds))
    assert narrowed is not None
    narrowed[2][0] = 77
    assert bounds[4] == 77


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((-1, (1, 2), 0), ValueError, "num_decode_tokens must be at least 0, got -1"),
        ((0, (1, -2), 0), ValueError, r"sizes must be at least 0, got \[1, -2\]"),
        ((0, (1, 2.0), 0), TypeError, r"sizes\[1\] must be an integer, got float"),
        ((0, (1, 2), 2), ValueError, r"rank must be in \[0, 2\).*got 2"),
        ((0, (), 0), ValueError, r"rank must be in \[0, 0\)"),
        ((0, (1, 2), True), TypeError, "rank must be an integer, got bool"),
        ((0, None, 0), TypeError, "pass shard=None instead"),
    ],
)
def test_bad_shard(arguments: tuple[object, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PrefillRowShard(*arguments)  # type: ignore[arg-type]


def test_bad_chunk() -> None:
    shard = PrefillRowShard(0, (4, 6), 0)
    wrong = chunk(0, 5, torch.arange(10, dtype=torch.int32))
    wrong.cu_seqlen_ke = wrong.cu_seqlen_ke[:4]
    with pytest.raises(ValueError, match=r"chunk.cu_seqlen_ke must be \[5\].*got \[4\]"):
        shard.narrow(wrong)


def test_check_needs_room_for_all_rows() -> None:
    with pytest.raises(ValueError, match="fit the step's 12 rows, got 3 decode rows and 10 prefill rows"):
        PrefillRowShard(3, (4, 6), 0).check(12)
    with pytest.raises(ValueError, match="init_process_group first"):
        PrefillRowShard(3, (4, 6), 0).check(13)
