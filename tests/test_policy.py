"""The sharding policy: what it decides, from what, and that ranks cannot differ."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from portable_indexer import policy as policy_module
from portable_indexer.device import device_of
from portable_indexer.policy import ShardPolicy
from portable_indexer.sharding import balanced_prefill_row_shard
from portable_indexer.tuning import Costs, Exchange, packaged
from portable_indexer.tuning.costs import CHUNK_BYTES, chunks_of, largest_shard, register_columns, width_of

DEVICES = ("h200", "h100", "mi325x", "mi300x", "mi355x")
EASY = Costs(
    0.0, 10e-6, 0.0, 1e-12, 1e15, 10e-6, 2e-12, 0.0, 0.0, 2e-12, (Exchange(2, 40e-6, 1e11), Exchange(4, 50e-6, 2e11))
)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(policy_module.ENVIRONMENT, raising=False)
    monkeypatch.delenv("PORTABLE_INDEXER_TUNING", raising=False)
    monkeypatch.delenv("PORTABLE_INDEXER_LOGITS_MB", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def of(device: str, **values: object) -> ShardPolicy:
    tuned = packaged(device)
    assert tuned is not None
    return ShardPolicy(costs=tuned.costs, **values)  # type: ignore[arg-type]


def causal(rows: int, context: int) -> int:
    """Pairs of the last `rows` rows of `context` keys."""
    return rows * (2 * context - rows + 1) // 2


def test_times_follow_from_the_costs() -> None:
    rows, pairs = 4096, causal(4096, 65536)
    times = ShardPolicy(costs=EASY, imbalance=0.0).estimate(rows=rows, pairs=pairs, tp_size=4)
    per_pair = 1e-12 + 2 * 64 * 128 / 1e15 + 2e-12  # rows of more than 16,384 columns
    exchange = 50e-6 + rows * 2048 * 4 * 0.75 / 2e11
    # 2,048 rows of 65,536 columns fill 512 MiB: two chunks of rows, one of a rank's own.
    assert times.replicated_s == pytest.approx(2 * 20e-6 + pairs * per_pair)
    assert times.exchange_s == pytest.approx(exchange)
    assert times.sharded_s == pytest.approx(20e-6 + pairs / 4 * per_pair + exchange)


def test_rows_chosen_in_registers_cost_the_columns_that_they_take() -> None:
    costs = replace(EASY, select_short_s=7e-12, select_long_s=3e-5, select_row_s=1e-9)
    assert costs.select_s(100, 100 * 5_000, 5_000, 2048) == pytest.approx(10e-6 + 100 * 8_192 * 7e-12)
    # Lengths up to 6,000: those above 2,048 take 4,096 columns, and those above that as many more.
    columns = 4_096 * (6_000 - 2_048) / 6_000 + 4_096 * (6_000 - 4_096) / 6_000
    assert costs.select_s(100, 100 * 3_000, 8_000, 2048) == pytest.approx(10e-6 + 100 * columns * 7e-12)
    assert register_columns(4096, causal(4096, 4096), 4096, 2048) == pytest.approx(2048 * 4096, rel=1e-3)
    assert register_columns(4096, causal(4096, 4096), 4096, 0) == pytest.approx(2048 * (2048 + 4096), rel=1e-3)
    assert register_columns(7, 7 * 100, 100, 512) == 0 == register_columns(0, 0, 0, 512)
    # Rows of up to 8,192 keys in a wider step are chosen in registers, too.
    columns = 4_096 * (16_384 - 1) / 16_384 + 4_096 * (16_384 - 4_096) / 16_384
    assert costs.select_s(1, 8_192, 40_000, 1) == pytest.approx(40e-6 + columns * 7e-12)
    long = 40e-6 + 100 * 1e-9 + 900_000 * 2e-12
    assert costs.select_s(100, 100 * 9_000, 16_385) == pytest.approx(long)
    assert replace(costs, select_id_s=1e-12).select_s(100, 900_000, 16_385, 512) == pytest.approx(long + 51_200e-12)


def test_chunks_are_those_that_index_topk_cuts() -> None:
    from portable_indexer.workspace import DEFAULT_LOGITS_MB

    selection_index = pytest.importorskip("portable_indexer.backends.triton_common.selection_index", reason="no Triton")
    choice = selection_index.SelectionChoice()
    assert DEFAULT_LOGITS_MB << 20 == CHUNK_BYTES
    for budget in (CHUNK_BYTES, 64 << 20):
        for rows, keys, topk in ((8192, 16384, 2048), (8192, 1 << 20, 2048), (65536, 1 << 18, 512), (1000, 70_001, 1)):
            plan = selection_index.index_plan(rows, keys, topk, budget, choice)
            assert not plan.staged and chunks_of(rows, keys, budget) == -(-rows // plan.rows)
    assert chunks_of(3, 1 << 30) == 3 and chunks_of(0.5, 10) == 1


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("rows", "context", "ratio"), [(8192, 8192, 1), (8192, 100_000, 1), (65_536, 80_000, 4)])
def test_the_largest_shard_is_the_planners(rows: int, context: int, ratio: int, ranks: int) -> None:
    pairs = sum(n // ratio for n in range(context - rows + 1, context + 1))
    sizes = balanced_prefill_row_shard([context], [rows], ratio, ranks)
    assert sizes is not None and max(sizes) == sizes[0]
    assert largest_shard(rows, pairs, ranks, ratio) == pytest.approx(sizes[0], rel=0.01)


def test_the_largest_of_many_short_requests_has_an_even_share_or_more() -> None:
    assert 8192 / 4 <= largest_shard(8192, 8192 * 500, 4) <= 8192
    assert largest_shard(10, 55, 1) == 10 and largest_shard(3, 0, 2) == 1.5


def test_pools_share_columns_and_fewer_ids_cost_less() -> None:
    """Keys of four tokens: the last of 8,192 rows of 131,072 tokens sees 32,768, and k is 512."""
    rows, context = 8192, 131_072
    pairs = sum(position // 4 for position in range(context - rows + 1, context + 1))
    assert width_of(rows, pairs, 4) == pytest.approx(context / 4, abs=1)
    costs = replace(EASY, select_long_s=3e-5, select_id_s=1e-12)
    whole = ShardPolicy(costs=costs, compress_ratio=4, topk=512).estimate(rows=rows, pairs=pairs, tp_size=1)
    per_pair = 1e-12 + 2 * 64 * 128 / 1e15 + 2e-12
    assert whole.replicated_s == pytest.approx(2 * 50e-6 + rows * 512 * 1e-12 + pairs * per_pair)
    told = ShardPolicy(costs=costs).estimate(rows=rows, pairs=pairs, tp_size=1, topk=512, compress_ratio=4)
    assert told == whole


def test_the_budget_of_logits_is_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTABLE_INDEXER_LOGITS_MB", "64")
    sent = ShardPolicy(costs=EASY)
    monkeypatch.setenv("PORTABLE_INDEXER_LOGITS_MB", "128")
    assert ShardPolicy.from_json(sent.to_json()).chunk_bytes == sent.chunk_bytes == 64 << 20
    rows, pairs = 4096, causal(4096, 65536)
    times = [
        ShardPolicy(costs=EASY, chunk_bytes=size << 20).estimate(rows=rows, pairs=pairs, tp_size=4)
        for size in (64, 512)
    ]
    assert times[0].replicated_s - times[1].replicated_s == pytest.approx((16 - 2) * 20e-6)


def test_a_step_that_waits_for_its_launches_is_not_shared() -> None:
    rows, pairs = 512, causal(512, 16_384)
    assert ShardPolicy(costs=EASY).decide(rows=rows, pairs=pairs, tp_size=4)
    slow_host = replace(EASY, launch_s=300e-6)
    times = ShardPolicy(costs=slow_host).estimate(rows=rows, pairs=pairs, tp_size=4)
    assert times.replicated_s < 300e-6 and times.saving_s == pytest.approx(-(times.exchange_s or 0.0))
    assert not ShardPolicy(costs=slow_host).decide(rows=rows, pairs=pairs, tp_size=4)
    quick = replace(times, exchange_launch_s=1e-6)
    assert quick.saving_s == pytest.approx(-1e-6), "the device's exchange hides behind the host's launches"
    longer = causal(512, 1 << 20)
    assert ShardPolicy(costs=slow_host).decide(rows=rows, pairs=longer, tp_size=4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tp_size", [2, 4, 8])
def test_long_contexts_shard_whatever_the_rows(device: str, tp_size: int) -> None:
    """What two row thresholds miss: 8,192 rows at 1M keys cost hundreds of times their exchange."""
    rows = 8192
    shard = of(device)
    times = shard.estimate(rows=rows, pairs=causal(rows, 1 << 20), tp_size=tp_size)
    assert times.exchange_s is not None and times.replicated_s > 100 * times.exchange_s
    assert shard.decide(rows=rows, pairs=causal(rows, 1 << 20), tp_size=tp_size)
    assert not of(device, min_rows=65_536).decide(rows=rows, pairs=causal(rows, 1 << 20), tp_size=tp_size)


# P07
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tp_size", [2, 4, 8])
@pytest.mark.parametrize("rows", [256, 4096, 8192, 16384])
def test_sharding_is_chosen_exactly_where_the_saving_beats_the_margin(device: str, tp_size: int, rows: int) -> None:
    shard = of(device)
    pairs = causal(rows, rows)
    times = shard.estimate(rows=rows, pairs=pairs, tp_size=tp_size)
    assert times.sharded_s is not None and times.exchange_s is not None
    own = times.sharded_s - times.exchange_s
    saving = max(times.replicated_s, times.launch_s) - max(own, times.launch_s) - times.exchange_s
    assert shard.decide(rows=rows, pairs=pairs, tp_size=tp_size) == (saving > 20e-6 + 0.05 * times.replicated_s)
    if rows == 256:
        assert not shard.decide(rows=rows, pairs=pairs, tp_size=tp_size)
    assert not replace(shard, mode="off").decide(rows=rows, pairs=pairs, tp_size=tp_size)


# P07
def test_break_even_depends_on_device_and_ranks() -> None:
    def first(device: str, tp_size: int) -> int:
        shard = of(device)
        return next(r for r in range(64, 1 << 17, 64) if shard.decide(rows=r, pairs=causal(r, r), tp_size=tp_size))

    found = {(device, tp): first(device, tp) for device in ("h200", "mi325x") for tp in (2, 8)}
    assert found["mi325x", 2] > found["mi325x", 8] > found["h200", 2], found
    assert found["h200", 8] != found["h200", 2], found


# P09
@pytest.mark.parametrize("tp_size", [3, 5, 6, 7, 16])
def test_numbers_of_ranks_without_numbers_stay_replicated(tp_size: int) -> None:
    shard = of("h200")
    rows, pairs = 8192, causal(8192, 1 << 20)
    assert not shard.decide(rows=rows, pairs=pairs, tp_size=tp_size)
    assert shard.estimate(rows=rows, pairs=pairs, tp_size=tp_size).sharded_s is None
    assert replace(shard, mode="on").decide(rows=rows, pairs=pairs, tp_size=tp_size)
    costs = shard.costs
    assert costs is not None
    known = replace(shard, costs=replace(costs, exchange=(*costs.exchange, Exchange(tp_size, 1e-4, 1e11))))
    assert known.decide(rows=rows, pairs=pairs, tp_size=tp_size)


# P12
def test_key_work_decides_and_rows_are_counted_over_the_step() -> None:
    rows = 8192
    many, one = 8 * causal(1024, 1024), causal(rows, rows)
    shard = ShardPolicy(costs=EASY)
    spans = [shard.estimate(rows=rows, pairs=pairs, tp_size=4).replicated_s for pairs in (many, one)]
    assert spans[1] > 3 * spans[0]
    assert not shard.decide(rows=rows, pairs=many, tp_size=4)
    assert shard.decide(rows=rows, pairs=one, tp_size=4)
    # An explicit minimum counts all rows of the step, however they are spread over requests or ranks.
    for pairs in (many, one):
        assert ShardPolicy(costs=EASY, min_rows=8192).decide(rows=rows, pairs=pairs, tp_size=4)
        assert not ShardPolicy(costs=EASY, min_rows=8193).decide(rows=rows, pairs=pairs, tp_size=4)


# P10
def test_nothing_of_a_ranks_own_enters_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = ShardPolicy.from_json(of("mi325x").to_json())

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a decision asked this rank's device")

    for name in (
        "mem_get_info",
        "memory_allocated",
        "get_device_properties",
        "current_device",
        "is_available",
    ):
        monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr("portable_indexer.device.detect", refuse)
    monkeypatch.setenv(policy_module.ENVIRONMENT, "off")  # this rank's environment, after the policy was agreed
    assert shard.decide(rows=8192, pairs=causal(8192, 1 << 17), tp_size=8)
    names = set(inspect.signature(ShardPolicy.decide).parameters) - {"self"}
    assert names == {"rows", "pairs", "tp_size", "num_heads", "head_dim", "topk", "compress_ratio"}


def test_an_agreed_policy_is_the_senders_whatever_this_ranks_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(policy_module.ENVIRONMENT, "on")
    sent = ShardPolicy(costs=EASY)
    assert sent.mode == "on"
    monkeypatch.setenv(policy_module.ENVIRONMENT, "off")
    received = ShardPolicy.from_json(sent.to_json())
    assert received == sent and received.fingerprint() == sent.fingerprint()
    assert ShardPolicy(costs=EASY).mode == "off"


numbers = st.floats(min_value=0, max_value=1e6, allow_nan=False)
positive = st.floats(min_value=1e-12, max_value=1e18)


@given(
    st.sampled_from(["auto", "on", "off"]),
    st.none() | st.integers(0, 1 << 20),
    st.tuples(numbers, numbers, numbers, numbers, positive, *[numbers] * 5),
    st.lists(st.tuples(st.integers(2, 64), numbers, positive), max_size=4),
    numbers,
)
def test_json_carries_every_bit(mode, min_rows, costs, exchange, per_id) -> None:  # type: ignore[no-untyped-def]
    whole = Costs(*costs, exchange=tuple(Exchange(*entry) for entry in exchange), select_id_s=per_id)
    shard = ShardPolicy(mode, min_rows, whole)
    again = ShardPolicy.from_json(shard.to_json())
    assert again == shard and hash(again) == hash(shard)
    assert again.to_json() == shard.to_json() and again.fingerprint() == shard.fingerprint()


@pytest.mark.parametrize(
    "change",
    [
        {"mode": "on"},
        {"min_rows": 1},
        {"margin": 0.06},
        {"topk": 512},
        {"costs": replace(EASY, score_flops=1.0000001e15)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_fingerprint_sees_every_field(change: dict[str, object]) -> None:
    shard = ShardPolicy(costs=EASY)
    assert replace(shard, **change).fingerprint() != shard.fingerprint()  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["{}", "[]", "not json", '{"mode": "auto"}', json.dumps({"costs": {"exchange": []}})])
def test_what_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        ShardPolicy.from_json(text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "always"}, "mode must be one of auto, on, off, got 'always'"),
        ({"min_rows": -1}, "min_rows must be None or at least 0"),
        ({"margin": -0.1}, "margin must be at least 0"),
        ({"margin": float("nan")}, "margin must be at least 0"),
        ({"topk": 0}, "topk must be at least 1"),
    ],
)
def test_bad_fields_are_refused_by_name(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardPolicy(costs=EASY, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["auto", "ON", " off "])
def test_the_environment_overrides_the_mode(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(policy_module.ENVIRONMENT, text)
    assert ShardPolicy("on", costs=EASY).mode == text.strip().lower()
    monkeypatch.setenv(policy_module.ENVIRONMENT, "sometimes")
    with pytest.raises(ValueError, match=r"environment variable PORTABLE_INDEXER_SHARD .* got 'sometimes'"):
        ShardPolicy(costs=EASY)


def test_without_costs_the_devices_own_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("portable_indexer.device.detect", lambda: device_of("mi355x"))
    shard, tuned = ShardPolicy(), packaged("mi355x")
    assert tuned is not None and shard.costs == tuned.costs


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_nothing_to_share_is_never_shared(mode: str) -> None:
    shard = ShardPolicy(mode, min_rows=0, costs=EASY)  # type: ignore[arg-type]
    assert not shard.decide(rows=0, pairs=0, tp_size=8)
    assert not shard.decide(rows=1 << 16, pairs=causal(1 << 16, 1 << 16), tp_size=1)
