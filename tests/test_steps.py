"""The scheduler: every prompt token once, every decode token once, never above the budget."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portable_indexer.steps import DEFAULT_MAX_BATCHED_TOKENS, Step, schedule
from portable_indexer.traces import Request

requests_strategy = st.lists(
    st.builds(
        Request,
        arrival_s=st.floats(0, 100),
        input_tokens=st.integers(20, 200),
        output_tokens=st.integers(0, 12),
        hash_ids=st.lists(st.integers(0, 2), max_size=14).map(tuple),
        block_tokens=st.just(16),
        cached_tokens=st.integers(0, 19),
    ),
    max_size=12,
)


def _decode(step):
    return zip(step.decode_requests, step.decode_seq_lens, strict=True)


def _prefill(step):
    return zip(step.prefill_requests, step.prefill_seq_lens, step.prefill_query_lens, strict=True)


def _computed(requests, steps):
    """Token positions that each request computed, in order, from the lengths of the steps alone."""
    rows = defaultdict(list)
    for step in steps:
        for i, seq_len in _decode(step):
            rows[i].append(seq_len - 1)
        for i, seq_len, query_len in _prefill(step):
            rows[i].extend(range(seq_len - query_len, seq_len))
    return rows


@settings(max_examples=300, deadline=None)
@given(
    requests_strategy,
    st.integers(1, 300),
    st.one_of(st.none(), st.integers(1, 5)),
    st.one_of(st.none(), st.floats(0, 30)),
)
def test_every_token_once_and_no_step_above_the_budget(requests, budget, max_running, seconds):
    step_seconds = None if seconds is None else lambda step: seconds
    steps = list(schedule(requests, budget, max_running=max_running, step_seconds=step_seconds))
    rows = _computed(requests, steps)
    assert len(steps) <= sum(r.input_tokens + r.output_tokens for r in requests)
    assert [s.index for s in steps] == list(range(len(steps)))
    for i, request in enumerate(requests):
        end = request.input_tokens + max(request.output_tokens - 1, 0)
        assert rows[i] == list(range(request.cached_tokens, end))
    for step in steps:
        assert 1 <= step.num_rows <= budget
        assert step.num_rows == step.num_decode_rows + step.num_prefill_rows
        assert min(step.prefill_query_lens, default=1) >= 1
        members = step.decode_requests + step.prefill_requests
        assert len(set(members)) == len(members)
        assert len(step.prefill_requests) == len(step.prefill_query_lens) == len(step.prefill_seq_lens)
        assert len(step.decode_requests) == len(step.decode_seq_lens)
        # Decode rows are single rows past the prompt; a chunk never reaches past it.
        assert all(n > requests[i].input_tokens for i, n in _decode(step))
        assert all(n <= requests[i].input_tokens for i, n, _ in _prefill(step))
    assert sum(s.num_decode_rows for s in steps) == sum(max(r.output_tokens - 1, 0) for r in requests)


@settings(max_examples=150, deadline=None)
@given(requests_strategy, st.integers(1, 120), st.integers(1, 5))
def test_concurrency_stays_within_the_limit(requests, budget, max_running):
    steps = list(schedule(requests, budget, max_running=max_running))
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for step in steps:
        for i in step.decode_requests + step.prefill_requests:
            first.setdefault(i, step.index)
            last[i] = step.index
    for step in steps:
        assert sum(first[i] <= step.index <= last[i] for i in first) <= max_running


@settings(max_examples=150, deadline=None)
@given(requests_strategy, st.integers(1, 120), st.floats(0, 30))
def test_nothing_starts_before_it_arrives(requests, budget, seconds):
    clock = max(0.0, min((r.arrival_s for r in requests), default=0.0))
    started: set[int] = set()
    finished: dict[int, int] = {}
    for step in schedule(requests, budget, step_seconds=lambda step: seconds):
        members = set(step.decode_requests + step.prefill_requests)
        idle = all(
            finished.get(i) == r.input_tokens + max(r.output_tokens - 1, 0)
            for i, r in enumerate(requests)
            if i in started
        )
        if idle:  # the server sleeps until the next arrival
            clock = max(clock, min(requests[i].arrival_s for i in members))
        assert all(requests[i].arrival_s <= clock for i in members)
        started |= members
        for i, n in zip(step.decode_requests + step.prefill_requests, step.seq_lens, strict=True):
            finished[i] = n
        clock += seconds


@settings(max_examples=200, deadline=None)
@given(requests_strategy, st.integers(1, 300))
def test_prefix_cache_drops_whole_leading_blocks_only(requests, budget):
    steps = list(schedule(requests, budget, prefix_cache=True))
    rows = _computed(requests, steps)
    for i, request in enumerate(requests):
        end = request.input_tokens + max(request.output_tokens - 1, 0)
        start = rows[i][0]
        assert rows[i] == list(range(start, end))
        assert start < request.input_tokens
        assert start == request.cached_tokens or start % request.block_tokens == 0
        reused = start // request.block_tokens if start > request.cached_tokens else 0
        for block in request.hash_ids[:reused]:
            assert any(block in other.hash_ids for j, other in enumerate(requests) if j != i) or (
                request.hash_ids.count(block) > 1
            )


def test_prefix_cache_reuses_what_an_earlier_step_stored():
    first = Request(0, 40, 1, hash_ids=(7, 8, 9), block_tokens=16)
    same = Request(1, 40, 1, hash_ids=(7, 8, 9), block_tokens=16)
    fork = Request(2, 64, 1, hash_ids=(7, 5, 9, 6), block_tokens=16)
    whole = Request(3, 32, 1, hash_ids=(7, 8), block_tokens=16)
    steps = list(schedule([first, same, fork, whole], 40, prefix_cache=True))
    starts = {i: n - q for step in reversed(steps) for i, n, q in _prefill(step)}
    # The last block of a prompt is never taken whole: one token must be computed. Block 9 is not full.
    assert starts == {0: 0, 1: 32, 2: 16, 3: 16}
    assert sum(s.num_prefill_rows for s in schedule([first, same, fork, whole], 40)) == 176


def test_blocks_of_a_prompt_still_running_are_not_yet_stored():
    pair = [Request(0, 40, 1, hash_ids=(7, 8, 9), block_tokens=16)] * 2
    (step,) = schedule(pair, 100, prefix_cache=True)
    assert step.prefill_query_lens == (40, 40)


def test_chunks_decode_and_several_requests_in_a_step():
    requests = [Request(0, 10, 3), Request(1, 30, 2), Request(2, 5, 1)]
    assert list(schedule(requests, 16)) == [
        Step(0, (), (10, 6), (10, 6), (), (0, 1)),
        Step(1, (11,), (21,), (15,), (0,), (1,)),
        Step(2, (12,), (30, 5), (9, 5), (0,), (1, 2)),
        Step(3, (31,), (), (), (1,), ()),
    ]


def test_order_of_arrival_not_of_the_file():
    steps = list(schedule([Request(5, 10, 1), Request(1, 10, 1)], 10))
    assert [s.prefill_requests for s in steps] == [(1,), (0,)]


def test_default_budget_and_one_long_prompt():
    steps = list(schedule([Request(0, 20_000, 1)]))
    assert DEFAULT_MAX_BATCHED_TOKENS == 8192
    assert [s.prefill_query_lens for s in steps] == [(8192,), (8192,), (3616,)]
    assert [s.prefill_seq_lens for s in steps] == [(8192,), (16384,), (20000,)]
    assert sum(s.key_row_pairs() for s in steps) == 20_000 * 20_001 // 2


def test_more_decoding_requests_than_the_budget():
    steps = list(schedule([Request(0, 1, 3) for _ in range(5)], 2))
    assert max(s.num_rows for s in steps) == 2
    assert sum(s.num_decode_rows for s in steps) == 10


def test_no_requests():
    assert list(schedule([])) == []


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(1, 500), max_size=4),
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 100)), max_size=4),
    st.integers(1, 130),
)
def test_pairs_against_a_count_row_by_row(decode, prefill, ratio):
    step = Step(0, tuple(decode), tuple(c + q for c, q in prefill), tuple(q for _, q in prefill))
    decode_pairs = sum(n // ratio for n in decode)
    prefill_pairs = sum((c + 1 + j) // ratio for c, q in prefill for j in range(q))
    assert step.decode_pairs(ratio) == decode_pairs
    assert step.prefill_pairs(ratio) == prefill_pairs
    assert step.key_row_pairs(ratio) == decode_pairs + prefill_pairs
    assert step.query_lens == (1,) * len(decode) + tuple(q for _, q in prefill)
    assert step.seq_lens == step.decode_seq_lens + step.prefill_seq_lens


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), max_size=5),
    st.integers(1, 9),
    st.data(),
)
def test_pairs_of_shards_against_a_count_row_by_row(prefill, ratio, data):
    step = Step(0, (9,), tuple(c + q for c, q in prefill), tuple(q for _, q in prefill))
    costs = [(c + 1 + j) // ratio for c, q in prefill for j in range(q)]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(costs)), max_size=6)))
    edges = [0, *cuts, len(costs)]
    sizes = [b - a for a, b in pairwise(edges)]
    assert step.shard_pairs(sizes, ratio) == [sum(costs[a:b]) for a, b in pairwise(edges)]
    with pytest.raises(ValueError, match="prefill rows"):
        step.shard_pairs([*sizes, 1], ratio)
    with pytest.raises(ValueError, match="prefill rows"):
        step.shard_pairs([len(costs) + 1, -1], ratio)


def test_pairs_stay_exact_beyond_float():
    step = Step(0, (), (2**31 - 1,), (2**31 - 1,))
    assert step.key_row_pairs() == (2**31 - 1) * 2**31 // 2


@pytest.mark.parametrize(
    ("arguments", "name"),
    [({"max_batched_tokens": 0}, "max_batched_tokens"), ({"max_running": 0}, "max_running")],
)
def test_bad_limits_are_refused_at_the_call(arguments, name):
    with pytest.raises(ValueError, match=name):
        schedule([], **arguments)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_bad_duration(seconds):
    with pytest.raises(ValueError, match="step_seconds"):
        list(schedule([Request(0, 10, 2)], step_seconds=lambda step: seconds))
