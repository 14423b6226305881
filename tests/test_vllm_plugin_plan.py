"""The plugin's gate and planner, and its request map, beside stand-ins of vLLM's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import fake_vllm
import pytest
import torch

from portable_indexer.exchange import ExchangeError
from portable_indexer.policy import ShardPolicy
from portable_indexer.vllm_plugin import alike, hooks, plan, register
from portable_indexer.vllm_plugin.token_map import TokenMap


@dataclasses.dataclass
class AttentionConfig:
    indexer_tp_shard_min_rows: int = 65536


def config(mode: Any = fake_vllm.CUDAGraphMode.NONE, **attention: int) -> Any:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        attention_config=AttentionConfig(**attention),
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(index_n_heads=32, index_head_dim=128, index_topk=1024)
        ),
    )


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_vllm.World]:
    made = fake_vllm.install(monkeypatch)
    made.tp = SimpleNamespace(
        world_size=4, rank_in_group=0, device_group="device", cpu_group="cpu", device=torch.device("cpu")
    )
    monkeypatch.setattr("portable_indexer.exchange.agree", lambda policy, group: policy)
    monkeypatch.setattr("portable_indexer.exchange.self_test", lambda device, group: None)
    monkeypatch.setattr("portable_indexer.vllm_plugin.alike.unlike_ranks", lambda tp: None)
    yield made
    hooks.states.clear()


def planned(world: fake_vllm.World) -> tuple[Any, Any]:
    register()
    module = world.modules[fake_vllm.INDEXER]
    assert hooks.states["row plan"].startswith("active"), hooks.states
    return module.tp_prefill_row_sharding_supported, module.balanced_prefill_row_shard


SEQS, QUERIES = torch.tensor([90000, 50]), torch.tensor([8000, 50])


def cuda(world: fake_vllm.World) -> None:
    world.platform.is_rocm, world.platform.is_cuda = (lambda: False), (lambda: True)


@pytest.mark.parametrize(
    ("arguments", "mode", "allowed"),
    [
        ((1, False, 4), "NONE", True),
        ((1, False, 4), "PIECEWISE", True),
        ((1, False, 4), "FULL", False),
        ((2, False, 4), "NONE", False),
        ((1, True, 4), "NONE", False),
        ((1, False, 1), "NONE", False),
    ],
)
def test_the_gate_on_rocm(world: fake_vllm.World, arguments: Any, mode: str, allowed: bool) -> None:
    gate, _ = planned(world)
    assert gate(config(fake_vllm.CUDAGraphMode[mode]), *arguments) is allowed
    world.modules["vllm.envs"].VLLM_BATCH_INVARIANT = True  # type: ignore[attr-defined]
    assert gate(config(), 1, False, 4) is False


def test_the_policy_decides_with_the_models_shape(world: fake_vllm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def decide(policy: ShardPolicy, *, rows: int, pairs: int, tp_size: int, **more: int) -> bool:
        seen.append((policy.num_heads, policy.head_dim, policy.topk, policy.min_rows, rows, pairs, tp_size))
        return len(seen) == 1

    monkeypatch.setattr(ShardPolicy, "decide", decide)
    gate, shard = planned(world)
    assert gate(config(), 1, False, 4)
    sizes = shard(SEQS, QUERIES, 1, 4, 65536)
    assert len(sizes) == 4 and sum(sizes) == 8050
    assert shard(seq_lens_cpu=SEQS, query_lens_cpu=QUERIES, compress_ratio=1, tp_size=4) is None
    pairs = sum(range(82001, 90001)) + sum(range(1, 51))
    assert seen == [(32, 128, 1024, None, 8050, pairs, 4)] * 2


def test_the_policy_hears_how_many_tokens_share_a_key(world: fake_vllm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(ShardPolicy, "decide", lambda policy, **step: bool(seen.append(policy.compress_ratio)))
    gate, shard = planned(world)
    assert gate(config(), 1, False, 4)
    for ratio in (4, 1, 4):
        assert shard(SEQS, QUERIES, ratio, 4) is None
    assert seen == [4, 1, 4]


@pytest.mark.parametrize(("least", "sharded"), [(8050, True), (8051, False)])
def test_the_users_threshold_counts_only_where_it_was_set(world: fake_vllm.World, least: int, sharded: bool) -> None:
    gate, shard = planned(world)
    assert gate(config(indexer_tp_shard_min_rows=least), 1, False, 4)
    assert (shard(SEQS, QUERIES, 1, 4, least) is not None) is sharded


def test_host_lengths_only_balance(world: fake_vllm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    # P08: an upper bound of 105 for a request of 103 tokens still covers each row once
    monkeypatch.setenv("PORTABLE_INDEXER_SHARD", "on")
    gate, shard = planned(world)
    assert gate(config(), 1, False, 4)
    assert sum(shard(torch.tensor([105, 40]), torch.tensor([4, 17]), 1, 4, 65536)) == 21


def test_a_step_that_cannot_be_planned_is_replicated(
    world: fake_vllm.World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Lengths that are missing or make no sense are so on every rank: none shards, and no step fails."""
    monkeypatch.setenv("PORTABLE_INDEXER_SHARD", "on")
    plan._refuse.cache_clear()
    gate, shard = planned(world)
    assert gate(config(), 1, False, 4)
    for lengths in (None, torch.tensor([1.5, 2.5]), torch.tensor([-3, 40]), torch.tensor([40])):
        for _ in range(2):
            assert shard(lengths if lengths is None else lengths.clone(), QUERIES, 1, 4, 65536) is None
    assert caplog.text.count("a step is not sharded") == 4
    assert sum(shard(SEQS, QUERIES, 1, 4, 65536)) == 8050


def test_a_threshold_that_is_no_field_is_none_of_the_users(world: fake_vllm.World) -> None:
    @dataclasses.dataclass
    class Attention:
        backend: str = ""
        indexer_tp_shard_min_rows = 5  # not annotated, so not a field

    settings = config()
    settings.attention_config = Attention()
    assert plan._chosen_min_rows(settings) is None


def test_ranks_that_differ_do_not_shard(
    world: fake_vllm.World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def differ(policy: ShardPolicy, group: Any) -> ShardPolicy:
        asked.append(group)
        raise ExchangeError("the ranks must be set up alike")

    monkeypatch.setattr("portable_indexer.exchange.agree", differ)
    gate, _ = planned(world)
    assert gate(config(), 1, False, 4) is False and gate(config(), 1, False, 4) is False
    assert asked == ["cpu"], "once, over the tensor-parallel group's CPU side"
    assert "the ranks must be set up alike" in caplog.text


@pytest.mark.parametrize(("kernels", "vllms"), [("vllm", True), ("ours", False)])
def test_on_cuda_vllms_plan_stays_where_vllm_exchanges(
    world: fake_vllm.World, monkeypatch: pytest.MonkeyPatch, kernels: str, vllms: bool
) -> None:
    """Without an agreement ranks may differ in how this package exchanges: it must not carry out vLLM's plan."""
    cuda(world)
    monkeypatch.setenv("PORTABLE_INDEXER_VLLM_KERNELS", kernels)

    def differ(policy: ShardPolicy, group: Any) -> ShardPolicy:
        raise ExchangeError("exchange algorithm is padded on rank 1, grouped on rank 0")

    monkeypatch.setattr("portable_indexer.exchange.agree", differ)
    gate, shard = planned(world)
    assert gate(config(), 1, False, 4) is vllms
    assert shard(SEQS, QUERIES, 1, 4, 65536) == ["vLLM's", 65536]


@pytest.mark.parametrize("platform", ["rocm", "cuda"])
def test_ranks_that_are_hooked_otherwise_do_not_shard(
    world: fake_vllm.World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, platform: str
) -> None:
    """Not even by vLLM's own plan: with other kernels on one rank, its exchange is another."""
    if platform == "cuda":
        cuda(world)
    asked = []
    monkeypatch.setattr("portable_indexer.vllm_plugin.alike.unlike_ranks", lambda tp: asked.append(tp) or "rank 3 ...")
    monkeypatch.setattr("portable_indexer.exchange.agree", lambda policy, group: pytest.fail("an agreement"))
    gate, _ = planned(world)
    assert gate(config(), 1, False, 4) is False and gate(config(), 1, False, 4) is False
    assert asked == [world.tp] and "set up alike: rank 3 ..." in caplog.text


def test_what_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {"row plan": "active: x", "op": "active: ours", "request map": "active"}
    others = [{"row plan": "active: x", "op": "active: ours"}, {"row plan": "active: x"}, {"row plan": "inactive: y"}]

    def gather(answers: list[Any], mine: Any, group: Any) -> None:
        assert mine == {"row plan": "active: x", "op": "active: ours"} and group == "cpu"
        answers[:] = [mine, *others[: len(answers) - 1]]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(alike, "states", ours)
    assert alike.unlike_ranks(SimpleNamespace(world_size=2, cpu_group="cpu")) is None
    assert alike.unlike_ranks(SimpleNamespace(world_size=4, cpu_group="cpu")) == (
        "row plan is 'inactive: y' on rank 3, 'active: x' on rank 0; "
        "op is 'missing' on ranks 2, 3, 'active: ours' on rank 0"
    )


def test_a_rank_without_a_policy_still_comes_to_the_agreement(
    world: fake_vllm.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # X04
    monkeypatch.setenv("PORTABLE_INDEXER_SHARD", "sideways")
    brought = []
    monkeypatch.setattr("portable_indexer.exchange.agree", lambda policy, group: brought.append(policy) or policy)
    gate, shard = planned(world)
    assert gate(config(), 1, False, 4)
    assert [policy.mode for policy in brought] == ["off"]
    assert shard(SEQS, QUERIES, 1, 4, 65536) is None


def test_cuda_listens_to_its_gate_and_falls_back_to_its_plan(
    world: fake_vllm.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda(world)
    gate, shard = planned(world)
    assert shard(SEQS, QUERIES, 1, 4, 65536) == ["vLLM's", 65536], "nobody has asked the gate yet"
    assert gate(config(), 1, False, 1) is False
    assert gate(config(), 1, False, 4) is True
    monkeypatch.setattr(ShardPolicy, "decide", lambda *args, **more: True)
    assert sum(shard(SEQS, QUERIES, 1, 4, 65536)) == 8050


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [([3, 0, 5], [3, 1, 4]), ([8, 0, 0], [6, 1, 1]), ([0, 0, 8], [1, 1, 6]), ([0, 3, 0], [1, 1, 1]), ([1, 1], [1, 1])],
)
def test_on_cuda_no_shard_is_empty(sizes: list[int], wanted: list[int]) -> None:
    assert plan._none_empty(sizes) == wanted


def test_fewer_rows_than_ranks_stay_whole_on_cuda() -> None:
    assert plan._none_empty([1, 0, 1]) is None


# The request map


def boundaries(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def theirs(query_start_loc: torch.Tensor, out: torch.Tensor, mapped: int, tokens: int) -> torch.Tensor:
    out[:tokens] = -5
    return out[:tokens]


def test_tokens_behind_the_last_request() -> None:
    # R12: mapped ones belong to the last request, unmapped ones to request 0, and what lies behind is not touched
    out = torch.full((12,), -77, dtype=torch.int32)
    answer = TokenMap(theirs)(boundaries(2, 0, 3), out, 7, 9)
    assert answer.tolist() == [0, 0, 2, 2, 2, 2, 2, 0, 0] and out[9:].tolist() == [-77] * 3


@pytest.mark.parametrize(
    ("starts", "out"),
    [
        (boundaries(2, 3).long(), torch.zeros(8, dtype=torch.int32)),
        (boundaries(2, 3), torch.zeros(8, dtype=torch.int64)),
        (boundaries(2, 9, 3)[::2], torch.zeros(8, dtype=torch.int32)),
        (boundaries(), torch.zeros(8, dtype=torch.int32)),
    ],
)
def test_what_does_not_fit_goes_to_vllms(starts: torch.Tensor, out: torch.Tensor) -> None:
    assert TokenMap(theirs)(starts, out, 5, 5).tolist() == [-5] * 5


def test_a_capture_before_the_first_launch_gets_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    # V09
    token_map, out = TokenMap(theirs), torch.zeros(8, dtype=torch.int32)
    monkeypatch.setattr("portable_indexer.vllm_plugin.token_map.capturing", lambda: True)
    assert token_map(boundaries(2, 3), out, 5, 5).tolist() == [-5] * 5
    monkeypatch.setattr("portable_indexer.vllm_plugin.token_map.capturing", lambda: False)
    assert token_map(boundaries(2, 3), out, 5, 5).tolist() == [0, 0, 1, 1, 1]
    monkeypatch.setattr("portable_indexer.vllm_plugin.token_map.capturing", lambda: True)
    assert token_map(boundaries(1, 4), out, 5, 5).tolist() == [0, 1, 1, 1, 1]


def test_a_failing_kernel_leaves_vllms(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    # V07
    tried = []

    def fail(*args: Any, **kwargs: Any) -> None:
        tried.append(1)
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("portable_indexer.metadata.token_to_req_indices", fail)
    token_map, out = TokenMap(theirs), torch.zeros(8, dtype=torch.int32)
    for _ in range(3):
        assert token_map(boundaries(2, 3), out, 5, 5).tolist() == [-5] * 5
    assert len(tried) == 1 and caplog.text.count("no such kernel") == 1


def test_an_error_in_a_capture_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    # V12: the graph may be broken without a word from the driver, so nobody may go on with it
    token_map, out = TokenMap(theirs), torch.zeros(8, dtype=torch.int32)
    assert token_map(boundaries(2, 3), out, 5, 5).tolist() == [0, 0, 1, 1, 1]

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("portable_indexer.metadata.token_to_req_indices", fail)
    monkeypatch.setattr("portable_indexer.vllm_plugin.token_map.capturing", lambda: True)
    with pytest.raises(RuntimeError, match="not permitted"):
        token_map(boundaries(2, 3), out, 5, 5)
    monkeypatch.undo()
    assert token_map(boundaries(1, 4), out, 5, 5).tolist() == [0, 1, 1, 1, 1], "and it is used again afterwards"
