"""What the plugin makes of a step: which rows the original computes on which rank, and what it never touches."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import fake_vllm
import pytest
import torch
from fake_vllm import CUDAGraphMode, chunk

from portable_indexer.sharding import PrefillRowShard
from portable_indexer.vllm_plugin import hooks, register, scratch, step


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_vllm.World]:
    made = fake_vllm.install(monkeypatch)
    register()
    yield made
    hooks.states.clear()


def on_ranks(world: fake_vllm.World, monkeypatch: pytest.MonkeyPatch, ranks: int, name: str, make: Any) -> Any:
    """Run the op as each rank in turn, with an exchange that is done afterwards, as one process can."""
    buffers, plans, calls = [], [], []

    def exchange(shard: PrefillRowShard, compute: Any, buffer: torch.Tensor, width: int, **more: Any) -> None:
        compute()
        plans.append((shard, width, more["group"]))

    monkeypatch.setattr(PrefillRowShard, "run", exchange)
    for rank in range(ranks):
        world.tp = SimpleNamespace(world_size=ranks, rank_in_group=rank, device_group="tp", cpu_group=None)
        world.calls.clear()
        metadata, call = make()
        before = copy.deepcopy(metadata)
        function = getattr(world.modules[fake_vllm.KPOOL if name == "kpool" else fake_vllm.ROCM], OPS[name])
        buffer = function(**call)
        assert buffer is call["topk_indices_buffer"]
        assert repr(metadata) == repr(before), "shared metadata was changed"
        buffers.append(buffer.clone())
        calls.append(list(world.calls))
    final = [buffer.clone() for buffer in buffers]
    for shard, width, group in plans:
        assert group == "tp"
        rows = slice(shard.start, shard.stop)
        for buffer in final:
            buffer[rows, :width] = buffers[shard.rank][rows, :width]
    return final, plans, calls


OPS = {"rocm": fake_vllm.OP, "kpool": "sparse_attn_indexer_kpool"}


def test_prefill_rows_are_shared_and_decode_rows_are_not(
    world: fake_vllm.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # P02, and the order: decode first, though the stand-in writes padded decode ids behind its rows, as vLLM does
    def make() -> Any:
        metadata = fake_vllm.step(3, [chunk(3, 9), chunk(9, 12, skip=True)], [4, 5])
        return metadata, world.call(metadata, rows=14)

    final, plans, calls = on_ranks(world, monkeypatch, 2, "rocm", make)
    assert len(plans) == 2
    for buffer in final:
        assert (buffer[:3] == 7).all()
        assert buffer[3:9, 0].tolist() == [row + 100 * (row - 2) for row in range(3, 9)]
        assert buffer[9:12, 0].tolist() == [row + 100 * (row - 8) for row in range(9, 12)]
        assert (buffer[12:14] == -1).all() and (buffer[14:] == 555).all()
    for decode, prefill in calls:
        assert decode["metadata"].num_prefills == 0 and decode["metadata"].prefill is None
        assert decode["metadata"].num_decodes == 3 and not decode["skip_k_cache_insert"]
        assert len(decode["metadata"].slot_mapping) == 12, "all keys are inserted"
        assert prefill["skip_k_cache_insert"] and prefill["k"] is None
        assert prefill["metadata"].num_decodes == 0
    assert [(c.token_start, c.token_end) for c in calls[0][1]["metadata"].prefill.chunks] == [(0, 4)]
    narrowed = calls[1][1]["metadata"].prefill.chunks
    assert [(c.token_start, c.token_end, c.skip_kv_gather) for c in narrowed] == [(4, 6, False), (6, 9, True)]


def test_without_decode_rows_one_call_does(world: fake_vllm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        metadata = fake_vllm.step(0, [chunk(0, 10)], [10, 0], padded=6)
        return metadata, world.call(metadata, rows=16)

    final, plans, calls = on_ranks(world, monkeypatch, 2, "rocm", make)
    assert len(plans) == 2, "a rank without rows takes part"
    assert [len(rank) for rank in calls] == [1, 1]
    assert calls[1][0]["metadata"].prefill.chunks == [] and not calls[1][0]["skip_k_cache_insert"]
    for buffer in final:  # P01
        assert buffer[:10, 0].tolist() == [row + 100 * (row + 1) for row in range(10)]
        assert (buffer[10:16] == -1).all() and (buffer[16:] == 555).all()


def test_a_decode_request_without_rows_is_run_once(world: fake_vllm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        metadata = fake_vllm.step(1, [chunk(0, 4)], [2, 2])
        metadata.num_decode_tokens = 0
        return metadata, world.call(metadata, rows=4)

    _, _, calls = on_ranks(world, monkeypatch, 2, "rocm", make)
    for decode, prefill in calls:
        assert decode["metadata"].num_decodes == 1 and prefill["metadata"].num_decodes == 0


def test_the_pooled_op(world: fake_vllm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(longest: int = 1000, **more: Any) -> Any:
        metadata = fake_vllm.step(2, [chunk(2, 10)], [4, 4])
        metadata.prefill.max_prefill_seq_len = longest
        call = world.call(metadata, rows=12)
        for name in ("head_dim", "total_seq_lens", "compress_ratio"):
            del call[name]
        call |= {"q_quant": call.pop("q_fp8"), "q_scale": None, "positions": torch.arange(12), "index_kpool": 4}
        call["topk_indices_buffer"] = torch.full((18, 9), 555, dtype=torch.int32)
        return metadata, call | more

    final, plans, calls = on_ranks(world, monkeypatch, 2, "kpool", make)
    assert [plan[1] for plan in plans] == [7, 7], "the tail's tokens travel too: 4 + 4 - 1 columns"
    for buffer in final:
        assert (buffer[:2] == 7).all()
        assert buffer[2:10, 0].tolist() == [row + 100 * (row - 1) for row in range(2, 10)]
    prefill = calls[1][1]
    assert prefill["positions"].tolist() == list(range(2, 12)) and len(prefill["metadata"].slot_mapping) == 8
    # Prompts that fit into the top-k, and what the split cannot read: the original, once.
    for more in ({"longest": 4}, {"longest": -1}, {"positions": None}, {"use_fp4_cache": True}):
        _, plans, calls = on_ranks(world, monkeypatch, 2, "kpool", lambda more=more: make(**more))
        assert not plans and [len(rank) for rank in calls] == [1, 1], more


UNTOUCHED: dict[str, Any] = {
    "no plan": lambda world, metadata, call: setattr(metadata.prefill, "row_shard_sizes", None),
    "no prefill": lambda world, metadata, call: (
        setattr(metadata, "num_prefills", 0),
        setattr(metadata, "prefill", None),
    ),
    "candidate blocks": lambda world, metadata, call: call.update(candidate_blocks=torch.zeros(12, 2)),
    "an unknown kind of graph": lambda world, metadata, call: setattr(world.context, "cudagraph_runtime_mode", None),
    "full graph": lambda world, metadata, call: setattr(world.context, "cudagraph_runtime_mode", CUDAGraphMode.FULL),
    "context parallel": lambda world, metadata, call: setattr(metadata.prefill.chunks[0], "local_total_seq_lens", 32),
    "prefill context parallel": lambda world, metadata, call: setattr(
        metadata.prefill.chunks[0], "pcp_deinterleave_idx", torch.zeros(1)
    ),
    "another group": lambda world, metadata, call: setattr(metadata.prefill, "row_shard_sizes", [4, 3, 2]),
    "more rows than the buffer": lambda world, metadata, call: setattr(metadata.prefill, "row_shard_sizes", [40, 5]),
    "more rows than prefill": lambda world, metadata, call: setattr(metadata.prefill, "row_shard_sizes", [5, 5]),
}


@pytest.mark.parametrize("case", list(UNTOUCHED))
def test_the_original_is_called_as_it_was(world: fake_vllm.World, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    # X09 V11 and X13
    world.tp = SimpleNamespace(world_size=2, rank_in_group=0, device_group="tp", cpu_group=None)
    monkeypatch.setattr(PrefillRowShard, "run", lambda *args, **more: pytest.fail("an exchange"))
    metadata = fake_vllm.step(3, [chunk(3, 12)], [4, 5])
    call = world.call(metadata, rows=12)
    UNTOUCHED[case](world, metadata, call)
    getattr(world.modules[fake_vllm.ROCM], fake_vllm.OP)(**call)
    assert len(world.calls) == 1 and world.calls[0]["metadata"] is metadata
    assert all(world.calls[0][name] is value for name, value in call.items())


def test_a_capture_gets_the_original(world: fake_vllm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    # X09
    monkeypatch.setattr("portable_indexer.vllm_plugin.step.capturing", lambda: True)
    monkeypatch.setattr(PrefillRowShard, "run", lambda *args, **more: pytest.fail("an exchange"))
    metadata = fake_vllm.step(0, [chunk(0, 12)], [6, 6])
    getattr(world.modules[fake_vllm.ROCM], fake_vllm.OP)(**world.call(metadata, rows=12))
    assert len(world.calls) == 1 and world.calls[0]["metadata"] is metadata


def test_a_capture_without_metadata_reserves_nothing(world: fake_vllm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    # V13: memory that is made inside a graph belongs to the graph
    monkeypatch.setattr(scratch, "_held", {})
    monkeypatch.setenv("PORTABLE_INDEXER_EXCHANGE", "padded")
    world.tp = SimpleNamespace(world_size=2, rank_in_group=0, device_group=None, cpu_group=None)
    for recording in (True, False):
        monkeypatch.setattr("portable_indexer.vllm_plugin.indexer_op.capturing", lambda recording=recording: recording)
        getattr(world.modules[fake_vllm.ROCM], fake_vllm.OP)(**world.call(None, rows=12))
        assert bool(scratch._held) is not recording
    assert len(world.calls) == 2


def test_prefill_requests_without_a_single_row(world: fake_vllm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing to score and no chunk; every rank still comes to the exchange that the plan names."""

    def make() -> Any:
        metadata = fake_vllm.step(2, [], None)
        metadata.num_prefills, metadata.prefill = 1, fake_vllm.Prefill([], 1000, [0, 0])
        return metadata, world.call(metadata, rows=3)

    final, plans, _ = on_ranks(world, monkeypatch, 2, "rocm", make)
    assert [(plan[0].sizes, plan[0].rank) for plan in plans] == [((0, 0), 0), ((0, 0), 1)]
    for buffer in final:
        assert (buffer[:2] == 7).all() and (buffer[4:] == 555).all()


def test_a_failing_op_leaves_the_forward_context(world: fake_vllm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.tp = SimpleNamespace(world_size=2, rank_in_group=0, device_group="tp", cpu_group=None)
    monkeypatch.setattr(PrefillRowShard, "run", lambda shard, compute, *args, **more: compute())
    metadata = fake_vllm.step(3, [chunk(3, 12)], [4, 5])
    call = world.call(metadata, rows=12)
    context, calls = world.context, []

    def fail(name: str, given: Any) -> Any:
        calls.append(name)
        if len(calls) == 2:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(world, "run_op", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        getattr(world.modules[fake_vllm.ROCM], fake_vllm.OP)(**call)
    assert len(calls) == 2 and world.context is context and context.attn_metadata == {fake_vllm.LAYER: metadata}


def test_metadata_of_another_kind_is_left_alone() -> None:
    context = fake_vllm.Context({"layer": SimpleNamespace(num_prefills=3)})
    assert step.step_metadata(context, "layer", None) is None
    assert step.step_metadata(context, "another layer", None) is None


def test_the_exchange_asks_nothing_of_vllms_communicator(world: fake_vllm.World, monkeypatch: Any) -> None:
    # X01: pynccl may be missing; only the process group is used.
    class Group:
        world_size, rank_in_group, device_group, cpu_group = 2, 1, "tp", None

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"the group's {name} was used")

    groups = []
    monkeypatch.setattr(PrefillRowShard, "run", lambda shard, compute, buffer, width, **more: groups.append(more))
    world.tp = Group()  # type: ignore[assignment]
    metadata = fake_vllm.step(0, [chunk(0, 12)], [6, 6])
    getattr(world.modules[fake_vllm.ROCM], fake_vllm.OP)(**world.call(metadata, rows=12))
    assert [more["group"] for more in groups] == ["tp"]


def test_narrowed_chunks_cover_each_row_once_and_gather_where_they_must() -> None:
    # P03: on any rank, each run of chunks that share keys begins with one that gathers them
    generator = random.Random()
    seed = generator.randrange(1 << 30)
    print("seed", seed)
    generator.seed(seed)
    for _ in range(300):
        decode, ranks = generator.randrange(5), generator.randrange(1, 6)
        chunks, row, owner = [], decode, []
        for request in range(generator.randrange(1, 5)):
            for part in range(generator.randrange(1, 5)):
                size = generator.randrange(1, 7)
                chunks.append(chunk(row, row + size, skip=part > 0))
                owner.append(request)
                row += size
        cuts = sorted(generator.randrange(row - decode + 1) for _ in range(ranks - 1))
        sizes = tuple(b - a for a, b in zip([0, *cuts], [*cuts, row - decode], strict=True))
        offset = generator.choice([0, decode])
        seen: list[int] = []
        for rank in range(ranks):
            shard = PrefillRowShard(decode, sizes, rank)
            kept = step.narrowed_chunks(chunks, shard, offset)
            current = None
            for part in kept:
                rows = list(range(part.token_start + offset, part.token_end + offset))
                source = next(i for i, c in enumerate(chunks) if c.token_start <= rows[0] < c.token_end)
                first = rows[0] - chunks[source].token_start
                assert part.cu_seqlen_ke.tolist() == [first + 1 + i for i in range(len(rows))]
                assert part.skip_kv_gather == (current == owner[source])
                current = owner[source]
                seen += rows
        assert seen == list(range(decode, row))


def test_scratch_is_made_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    # M07 V13
    monkeypatch.setattr(scratch, "_held", {})
    device = torch.device("cpu")
    assert scratch.scratch(device, 0) is None
    first = scratch.scratch(device, 1000)
    assert first is not None and first.nbytes >= 1000
    assert scratch.scratch(device, 500) is first
    larger = scratch.scratch(device, 5000)
    assert larger is not first and scratch.scratch(device, 1000) is larger


class Stream:
    """A stream that notes whom it waited for."""

    def __init__(self) -> None:
        self.cuda_stream, self.waited = id(self), []

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other)


def test_streams_share_one_scratch_and_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    # M12 V13: graphs are recorded and steps served on other streams than vLLM profiles on
    monkeypatch.setattr(scratch, "_held", {})
    monkeypatch.setattr(scratch, "Workspace", lambda device, nbytes: SimpleNamespace(nbytes=nbytes))
    profiling, serving = Stream(), Stream()
    current = [profiling]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    device = torch.device("cuda", 0)
    made = scratch.scratch(device, 1000)
    assert scratch.scratch(device, 900) is made and not profiling.waited
    current[0] = serving
    assert scratch.scratch(device, 1000) is made and serving.waited == [profiling]
    assert scratch.scratch(device, 1000) is made and serving.waited == [profiling], "once"
    larger = scratch.scratch(device, 2000)
    assert larger is not made and profiling.waited == [serving], "the smaller one's memory goes back to its stream"
    current[0] = profiling
    assert scratch.scratch(device, 2000) is larger and profiling.waited == [serving, serving]


@pytest.mark.parametrize(
    ("columns", "algorithm", "least"), [(4, "grouped", 0), (6, "grouped", 18 * 4 * 4), (4, "padded", 18 * 4 * 4)]
)
def test_the_profiling_run_reserves_what_the_exchange_needs(
    world: fake_vllm.World, monkeypatch: pytest.MonkeyPatch, columns: int, algorithm: str, least: int
) -> None:
    # M11: in place where rows are contiguous, else staging for the largest step
    monkeypatch.setattr(scratch, "_held", {})
    monkeypatch.setenv("PORTABLE_INDEXER_EXCHANGE", algorithm)
    world.tp = SimpleNamespace(world_size=2, rank_in_group=0, device_group=None, cpu_group=None)
    call = world.call(None, rows=12, topk_indices_buffer=torch.full((18, columns), 555, dtype=torch.int32))
    answer = getattr(world.modules[fake_vllm.ROCM], fake_vllm.OP)(**call)
    assert answer is call["topk_indices_buffer"] and (answer == 555).all()
    assert len(world.calls) == 1 and world.calls[0]["metadata"] is None, "the original reserves its own"
    held = sum(entry.workspace.nbytes for entry in scratch._held.values())
    assert held >= least and (held == 0) == (least == 0)
