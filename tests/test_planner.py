"""``balanced_prefill_row_shard`` against costs that are counted row by row in plain integers."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from portable_indexer import sharding
from portable_indexer.sharding import balanced_prefill_row_shard

# Enough requests that the planner takes its array path.
MANY = 4 * sharding._VECTORISE_FROM


def row_costs(seqs: list[int], queries: list[int], ratio: int) -> list[int]:
    return [
        max(0, seq - query + 1 + j) // ratio for seq, query in zip(seqs, queries, strict=True) for j in range(query)
    ]


def shard_costs(sizes: list[int], costs: list[int]) -> list[int]:
    ends = list(itertools.accumulate(sizes))
    return [sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def check(seqs: list[int], queries: list[int], ratio: int, ranks: int) -> list[int]:
    """All that a plan promises."""
    sizes = balanced_prefill_row_shard(seqs, queries, ratio, ranks)
    assert sizes is not None
    costs = row_costs(seqs, queries, ratio)
    assert len(sizes) == ranks and min(sizes) >= 0 and sum(sizes) == len(costs)
    assert ranks * max(shard_costs(sizes, costs)) <= sum(costs) + ranks * max(costs, default=0)
    if not any(costs):
        assert max(sizes) - min(sizes) <= 1
    return sizes


@dataclass
class Asked:
    """A policy that answers what it is told to, and remembers what it was asked."""

    answer: bool
    calls: list[dict[str, int]] = field(default_factory=list)

    def decide(self, *, rows: int, pairs: int, tp_size: int) -> bool:
        self.calls.append({"rows": rows, "pairs": pairs, "tp_size": tp_size})
        return self.answer


requests = st.lists(st.tuples(st.integers(0, 60), st.integers(-60, 200)), max_size=12)


@given(requests, st.integers(1, 9), st.integers(2, 17))
@settings(max_examples=400, deadline=None)
def test_covers_every_row_once_and_balances(spans: list[tuple[int, int]], ratio: int, ranks: int) -> None:
    queries = [query for query, _ in spans]
    check([max(0, query + context) for query, context in spans], queries, ratio, ranks)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 3, 4, 7, 64, 1000]), st.integers(2, 9))
@settings(max_examples=60, deadline=None)
def test_array_path_equals_plain_integers(seed: int, ratio: int, ranks: int) -> None:
    rng = random.Random(seed)
    queries = [rng.choice([0, 1, rng.randrange(40)]) for _ in range(MANY)]
    seqs = [max(0, query + rng.randrange(-20, 3000)) for query in queries]
    sizes = check(seqs, queries, ratio, ranks)
    assert isinstance(sharding._lengths("query_lens", queries), sharding.numpy.ndarray)
    step = sharding._Step(seqs, queries, ratio)  # lists are never vectorised
    cuts = [0, *(step.cut(rank, ranks) for rank in range(1, ranks)), step.rows]
    assert sizes == [stop - start for start, stop in itertools.pairwise(cuts)]


def test_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(7)
    queries = torch.tensor([rng.randrange(50) for _ in range(MANY)])
    seqs = queries + torch.tensor([rng.randrange(5000) for _ in range(MANY)])
    with_arrays = balanced_prefill_row_shard(seqs, queries, 4, 8)
    monkeypatch.setattr(sharding, "numpy", None)
    assert balanced_prefill_row_shard(seqs, queries, 4, 8) == with_arrays


@given(st.integers(0, 10**7), st.integers(1, 999))
def test_series_and_its_inverse(count: int, ratio: int) -> None:
    value = sharding._series(count, ratio)
    if count < 2000:
        assert value == sum(x // ratio for x in range(count))
    length = sharding._series_length(value, ratio)
    assert sharding._series(length, ratio) <= value < sharding._series(length + 1, ratio)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8])  # P09
def test_one_long_causal_prompt(ranks: int) -> None:
    sizes = check([50_000], [50_000], 1, ranks)
    assert sizes == sorted(sizes, reverse=True)  # later rows see more keys


@pytest.mark.parametrize(
    ("rows", "ranks", "sizes"),
    [
        (6, 4, None),  # P04
        (6, 8, None),  # P04
        (3, 4, [0, 1, 1, 1]),
        (1, 4, None),
        (0, 4, [0, 0, 0, 0]),
    ],
)
def test_zero_cost_rows_and_fewer_rows_than_ranks(rows: int, ranks: int, sizes: list[int] | None) -> None:
    found = check([rows], [rows], 4, ranks)
    assert sizes is None or found == sizes


def test_lengths_beyond_int32_are_exact() -> None:
    # One row of 2^40 keys among small ones, and costs whose sum passes 2^63.
    assert check([1 << 40, 10, 10], [1, 4, 4], 1, 2) == [1, 8]
    context = 1 << 62
    assert balanced_prefill_row_shard([context] * MANY, [8] * MANY, 1, 4) == [2 * MANY] * 4
    huge = torch.full((MANY,), (1 << 63) - 1)
    assert balanced_prefill_row_shard(huge, torch.full((MANY,), 8), 1, 4) == [2 * MANY] * 4


def test_costs_where_int32_would_wrap() -> None:
    seqs = torch.full((MANY,), 1_048_576, dtype=torch.int32)
    queries = torch.full((MANY,), 65_536, dtype=torch.int32)
    sizes = balanced_prefill_row_shard(seqs, queries, 1, 4)
    assert sizes == [MANY // 4 * 65_536] * 4


INTEGERS = [
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
]


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("count", [3, MANY])
def test_every_integer_dtype_and_sequence(dtype: torch.dtype, count: int) -> None:
    queries = [5 + i % 40 for i in range(count)]
    seqs = [query + i % 60 for i, query in enumerate(queries)]
    wanted = check(seqs, queries, 2, 3)
    assert balanced_prefill_row_shard(torch.tensor(seqs).to(dtype), torch.tensor(queries).to(dtype), 2, 3) == wanted
    assert balanced_prefill_row_shard(tuple(seqs), torch.tensor(queries).to(dtype), 2, 3) == wanted
    strided = torch.tensor(seqs).to(dtype).repeat_interleave(2)[::2] if dtype.itemsize < 4 else None
    if strided is not None:
        assert balanced_prefill_row_shard(strided, queries, 2, 3) == wanted


def test_inputs_are_not_written() -> None:
    seqs, queries = torch.randint(100, 200, (MANY,)), torch.randint(0, 100, (MANY,))
    before = seqs.clone(), queries.clone()
    balanced_prefill_row_shard(seqs, queries, 1, 4)
    assert torch.equal(seqs, before[0]) and torch.equal(queries, before[1])


def test_none_where_the_step_is_not_sharded() -> None:
    seqs, queries = [1000] * 8, [1000] * 8
    assert balanced_prefill_row_shard(seqs, queries, 1, 1) is None
    assert balanced_prefill_row_shard(seqs, queries, 1, 4, min_rows=8001) is None
    assert balanced_prefill_row_shard(seqs, queries, 1, 4, min_rows=8000) is not None
    assert balanced_prefill_row_shard(seqs, queries, 1, 4, policy=Asked(False)) is None
    assert balanced_prefill_row_shard(seqs, queries, 1, 4, policy=Asked(True)) is not None


def test_min_rows_counts_all_rows_of_the_step() -> None:  # P12
    many, one = ([1024] * 8, [1024] * 8), ([8192], [8192])
    for seqs, queries in (many, one):
        assert balanced_prefill_row_shard(seqs, queries, 1, 4, min_rows=8192) is not None
        assert balanced_prefill_row_shard(seqs, queries, 1, 4, min_rows=8193) is None
    # The policy sees rows and key-row pairs: eight times the pairs for one long prompt.
    asked = Asked(True)
    for seqs, queries in (many, one):
        balanced_prefill_row_shard(seqs, queries, 1, 4, policy=asked)
    assert asked.calls == [
        {"rows": 8192, "pairs": 8 * 1024 * 1025 // 2, "tp_size": 4},
        {"rows": 8192, "pairs": 8192 * 8193 // 2, "tp_size": 4},
    ]


def test_plan_depends_on_arguments_alone(monkeypatch: pytest.MonkeyPatch) -> None:  # P10
    """Whatever a rank knows about its own memory, device or environment, it finds the same plan."""
    seqs, queries = [70_000, 300, 9_000], [8_000, 300, 1_000]
    wanted = balanced_prefill_row_shard(seqs, queries, 4, 4)
    for name in ("is_available", "mem_get_info", "current_device", "device_count"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("a plan asks for the device"))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("PORTABLE_INDEXER_LOGITS_MB", "1")
    torch.set_default_dtype(torch.float64)
    try:
        assert balanced_prefill_row_shard(seqs, queries, 4, 4) == wanted
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"seq_lens": torch.tensor([4.0, 5.0])}, TypeError, r"seq_lens .*integer dtype.*float32"),
        ({"query_lens": torch.tensor([True, False])}, TypeError, r"query_lens .*integer dtype.*bool"),
        ({"query_lens": [2.0, 1.0]}, TypeError, r"query_lens\[0\] must be an integer, got float"),
        ({"query_lens": [1, True]}, TypeError, r"query_lens\[1\] must be an integer, got bool"),
        ({"seq_lens": "45"}, TypeError, "seq_lens must be .*sequence of integers, got str"),
        ({"seq_lens": 4}, TypeError, "seq_lens must be .*sequence of integers, got int"),
        ({"seq_lens": torch.tensor([[4, 5]])}, ValueError, r"seq_lens must have 1 dimension.*\[1, 2\]"),
        ({"seq_lens": torch.tensor([4, 5], device="meta")}, ValueError, "seq_lens must be on the CPU.*meta"),
        ({"seq_lens": [4, 5, 6]}, ValueError, "one entry a request, got 3 and 2"),
        ({"seq_lens": [4, -5]}, ValueError, "seq_lens must be at least 0, got -5"),
        ({"query_lens": torch.tensor([-1, 2])}, ValueError, "query_lens must be at least 0, got -1"),
        ({"compress_ratio": 0}, ValueError, "compress_ratio must be at least 1, got 0"),
        ({"compress_ratio": 1.0}, TypeError, "compress_ratio must be an integer, got float"),
        ({"tp_size": 0}, ValueError, "tp_size must be at least 1, got 0"),
        ({"min_rows": -1}, ValueError, "min_rows must be None or at least 0, got -1"),
    ],
)
def test_bad_input(change: dict[str, object], error: type[Exception], message: str) -> None:
    arguments: dict[str, object] = {
        "seq_lens": [4, 5],
        "query_lens": [2, 1],
        "compress_ratio": 1,
        "tp_size": 2,
    }
    with pytest.raises(error, match=message):
        balanced_prefill_row_shard(**{**arguments, **change})  # type: ignore[arg-type]


def test_bad_input_on_the_array_path() -> None:
    lengths = torch.full((MANY,), 4)
    broken = lengths.clone()
    broken[-1] = -3
    with pytest.raises(ValueError, match="query_lens must be at least 0, got -3"):
        balanced_prefill_row_shard(lengths, broken, 1, 2)
    with pytest.raises(ValueError, match="seq_lens must be at least 0, got -3"):
        balanced_prefill_row_shard(broken, lengths, 1, 2)
