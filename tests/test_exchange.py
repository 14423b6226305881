"""``all_gatherv`` and ``PrefillRowShard.exchange_topk`` on real processes over gloo, 1 to 4 ranks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, succeeded
from torch.utils._python_dispatch import TorchDispatchMode

from portable_indexer.exchange import all_gatherv, self_test, staging_bytes
from portable_indexer.sharding import PrefillRowShard, balanced_prefill_row_shard
from portable_indexer.workspace import Workspace

SENTINEL = -7
# Torch 2.13 renamed it.
EVEN = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def wanted_ids(seed: int, rows: int, width: int) -> torch.Tensor:
    """The ids that all ranks must end up with, the same on each: int32 [rows, width]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31 - 1, (rows, width), dtype=torch.int32, generator=generator)


def exchange_once(
    rank: int, sizes: list[int], case: dict[str, Any], seed: int, group: dist.ProcessGroup | None = None
) -> None:
    """Fill this rank's rows, poison the rest, exchange, and compare every id and every sentinel."""
    start, tail, width, pitch = case["start"], case["tail"], case["width"], case["pitch"]
    total = sum(sizes)
    wanted = wanted_ids(seed, total, width)
    storage = torch.full((start + total + tail, pitch), SENTINEL, dtype=torch.int32)
    buffer = storage[:, : case["columns"]]
    first = sum(sizes[:rank])
    buffer[start + first : start + first + sizes[rank], :width] = wanted[first : first + sizes[rank]]
    staging: Any = None
    if case["staging"]:
        need = staging_bytes(total, width, len(sizes), case["algorithm"])
        if case["staging"] == "workspace":
            staging = Workspace("cpu", need)
            staging.views(((staging.nbytes // 4,), torch.int32))[0].fill_(SENTINEL)
        else:
            staging = torch.full((need // 4,), SENTINEL, dtype=torch.int32)
    all_gatherv(
        buffer,
        sizes,
        group=group,
        start=start,
        width=None if width == case["columns"] else width,
        staging=staging,
        algorithm=case["algorithm"],
    )
    expected = torch.full_like(storage, SENTINEL)
    expected[start : start + total, :width] = wanted
    assert torch.equal(storage, expected), (sizes, case)


def case(
    *,
    start: int = 0,
    tail: int = 0,
    width: int = 6,
    columns: int = 6,
    pitch: int = 6,
    algorithm: str = "grouped",
    staging: str | None = None,
) -> dict[str, Any]:
    return {
        "start": start, "tail": tail, "width": width, "columns": columns, "pitch": pitch, "algorithm": algorithm,
        "staging": staging,
    }  # fmt: skip


def size_lists(world: int) -> list[list[int]]:
    """Uneven, equal, with empty ranks first, last and between, all on one rank, and none at all."""
    lists = [
        [3 + 2 * r for r in range(world)],
        [5] * world,
        [0] * world,
        [4 if r % 2 else 0 for r in range(world)],
        [0 if r % 2 else 4 for r in range(world)],
        [1] + [0] * (world - 1),
        [0] * (world - 1) + [9],
        [40] + [1] * (world - 1),
    ]
    return [list(sizes) for sizes in dict.fromkeys(map(tuple, lists))]


LAYOUTS = [
    {},
    {"start": 3, "tail": 2},
    {"width": 6, "columns": 9, "pitch": 9},
    {"width": 6, "columns": 6, "pitch": 8, "start": 2, "tail": 1},
    {"width": 2048, "columns": 2176, "pitch": 2176, "start": 1},  # X03
]


def matrix(rank: int, world: int, seed: int) -> int:
    """Every size list x layout x algorithm x kind of staging."""
    done = 0
    for sizes, layout, algorithm, staging in itertools.product(
        size_lists(world), LAYOUTS, ("grouped", "padded"), (None, "tensor", "workspace")
    ):
        exchange_once(rank, sizes, case(**layout, algorithm=algorithm, staging=staging), seed + done)
        done += 1
    return done


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_layout_and_size_list(world: int) -> None:  # X01 X02 X03 X04 X08 P09
    seed = int(torch.randint(2**31, ()).item())
    counts = {answer.value for answer in succeeded(run_ranks(matrix, world, seed))}
    assert counts == {len(size_lists(world)) * len(LAYOUTS) * 6}


@pytest.mark.parametrize("world", [2, 4])
def test_plan_check_lets_right_exchanges_pass(world: int) -> None:  # X14
    succeeded(run_ranks(matrix, world, 11, env={"PORTABLE_INDEXER_CHECK": "1"}))


def uneven_many(rank: int, world: int) -> None:
    sizes = [1, 0, 3, 1, 2, 1, 0, 5]
    for algorithm in ("grouped", "padded"):
        exchange_once(rank, sizes, case(width=48, columns=48, pitch=48, algorithm=algorithm), 3)


def test_eight_ranks_with_tiny_uneven_sizes() -> None:  # X07
    succeeded(run_ranks(uneven_many, 8))


def self_tested(rank: int, world: int) -> None:
    self_test(torch.device("cpu"))


def self_test_of_a_wrong_library(rank: int, world: int) -> str:
    """One rank's library loses a row: all ranks must be told, with the rank and the algorithm."""
    real = getattr(dist, EVEN)

    def loses_a_row(output: torch.Tensor, own: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        work = real(output, own, *arguments, **options)
        if output.dtype == torch.int32:
            output[-1] = 5
        return work

    if rank == 1:
        setattr(dist, EVEN, loses_a_row)
    with pytest.raises(RuntimeError) as caught:
        self_test(torch.device("cpu"))
    return str(caught.value)


def test_self_test() -> None:  # X07
    succeeded(run_ranks(self_tested, 3))
    for answer in succeeded(run_ranks(self_test_of_a_wrong_library, 2)):
        assert "rank 1 failed: padded exchange of" in answer.value and "grouped" not in answer.value


def subgroups(rank: int, world: int) -> list[int]:
    """Two replicas of two ranks, and one group in another order than the world's; all exchange at once."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    for algorithm in ("grouped", "padded"):
        # Another seed for each replica: ids of the other one would show.
        layout = case(width=3, columns=5, pitch=5, algorithm=algorithm)
        exchange_once(rank % 2, [2, 5], layout, 100 + rank // 2, mine)
        exchange_once(rank % 2, [4, 4], case(algorithm=algorithm), 200 + rank // 2, mine)
    late = dist.new_group([1, 3])
    if rank in (1, 3):
        exchange_once(rank // 2, [3, 1], case(), 300, late)
    else:
        with pytest.raises(ValueError, match="group must be a process group that this process belongs to"):
            all_gatherv(torch.zeros(4, 2, dtype=torch.int32), [3, 1], group=late)
    with pytest.raises(ValueError, match=r"the default group.*each of the 2 sizes, got 4 ranks"):
        all_gatherv(torch.zeros(4, 2, dtype=torch.int32), [3, 1])
    with pytest.raises(ValueError, match="group must have one rank for each of the 4 sizes, got 2 ranks"):
        all_gatherv(torch.zeros(4, 2, dtype=torch.int32), [1, 1, 1, 1], group=mine)
    shard = PrefillRowShard(0, (3, 1), 1 - rank % 2)
    with pytest.raises(ValueError, match=f"shard.rank must be {rank % 2}"):
        shard.check(4, mine)
    with pytest.raises(ValueError, match=f"rank must be {rank % 2}"):
        shard.exchange_topk(torch.zeros(4, 2, dtype=torch.int32), group=mine)
    return [rank]


def test_groups_of_a_larger_world() -> None:  # X13
    succeeded(run_ranks(subgroups, 4))


def sharded_step(rank: int, world: int) -> None:
    # P01: 1,000 real rows in a step padded to 1,024. P02: 3 decode rows before 4,098 prefill rows.
    for decode, rows, padding in ((0, 1000, 24), (3, 4098, 0), (5, 7, 4)):
        sizes = balanced_prefill_row_shard([rows], [rows], 1, world)
        assert sizes is not None
        shard = PrefillRowShard(decode, tuple(sizes), rank)
        wanted = wanted_ids(rows, decode + rows + padding, 16)
        buffer = wanted.clone()
        buffer[decode : decode + rows] = SENTINEL
        buffer[:decode] = buffer[decode + rows :] = SENTINEL - 1
        shard.check(len(buffer))

        def compute(shard: PrefillRowShard = shard, buffer: Any = buffer, wanted: Any = wanted) -> None:
            buffer[shard.start : shard.stop] = wanted[shard.start : shard.stop]

        shard.run(compute, buffer)
        assert torch.equal(buffer[decode : decode + rows], wanted[decode : decode + rows])
        assert (buffer[:decode] == SENTINEL - 1).all() and (buffer[decode + rows :] == SENTINEL - 1).all()


@pytest.mark.parametrize("world", [2, 4])
def test_decode_and_padded_rows_stay(world: int) -> None:  # P01 P02
    succeeded(run_ranks(sharded_step, world))


class Allocations(TorchDispatchMode):
    """Names of the operations that made new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        if any(t.untyped_storage().data_ptr() not in known for t in tensors_in(result) if t.numel()):
            self.names.append(str(function))
        return result


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors_in(entry)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


@contextmanager
def no_allocation() -> Iterator[None]:
    with Allocations() as seen:
        yield
    assert not seen.names, seen.names


def allocation_free(rank: int, world: int) -> None:
    rows, width = 23, 40
    sizes = balanced_prefill_row_shard([rows], [rows], 1, world)
    assert sizes is not None
    staging = torch.empty(staging_bytes(rows, width, world, "padded") // 4, dtype=torch.int32)
    for columns, algorithm in itertools.product((width, width + 8), ("grouped", "padded")):
        buffer = torch.full((rows, columns), rank, dtype=torch.int32)
        with no_allocation():
            all_gatherv(buffer, sizes, width=width, staging=staging, algorithm=algorithm)
        owners = torch.repeat_interleave(torch.arange(world), torch.tensor(sizes))
        assert torch.equal(buffer[:, :width], owners[:, None].expand(-1, width).to(torch.int32))
    with Allocations() as seen:  # the guard itself must see one
        all_gatherv(torch.zeros(rows, width + 8, dtype=torch.int32), sizes, width=width)
    if not any("empty" in name for name in seen.names):
        raise AssertionError("the guard sees no allocation")


def test_no_allocation_with_staging() -> None:  # X05 M11
    succeeded(run_ranks(allocation_free, 2))


def test_staging_bytes() -> None:  # M11
    assert staging_bytes(65_536, 2048, 8, "grouped") == 512 << 20
    assert staging_bytes(65_536, 2048, 8, "padded") == 1024 << 20
    assert staging_bytes(65_536, 2048, 1, "padded") == 0
    # What the largest step needs is enough for every smaller one.
    needs = [staging_bytes(rows, 3, 4, "padded") for rows in range(200)]
    assert needs == sorted(needs)


def slow_rank(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(3)
    exchange_once(rank, [3, 4], case(), 9)


def test_a_slow_rank_is_waited_for() -> None:  # X05
    answers = succeeded(run_ranks(slow_rank, 2))
    assert answers[0].seconds > 2


def interleaved_groups(rank: int, world: int) -> None:
    """Collectives on two groups in turn, as two layers of two kinds of parallelism: no rank waits for good."""
    pair = [dist.new_group([0, 1], timeout=timedelta(seconds=20)), dist.new_group([2, 3])][rank // 2]
    for layer in range(20):
        exchange_once(rank % 2, [layer % 3, 2], case(), layer, pair)
        exchange_once(rank, [1, 0, layer, 2], case(algorithm="padded"), layer)


def test_two_groups_in_turn() -> None:  # X06
    succeeded(run_ranks(interleaved_groups, 4))


def layers(rank: int, world: int) -> None:
    """Layer after layer through one scratch on one stream: nothing of an earlier layer may show."""
    scratch = Workspace("cpu", staging_bytes(40, 8, world, "padded"))
    wanted = [wanted_ids(layer, 40, 8) for layer in range(6)]
    buffers = [torch.full((40, 11), SENTINEL, dtype=torch.int32) for _ in wanted]
    plans = [[20 + layer, 20 - layer] for layer in range(6)]
    for layer, (ids, buffer, sizes) in enumerate(zip(wanted, buffers, plans, strict=True)):
        first = sum(sizes[:rank])
        buffer[first : first + sizes[rank], :8] = ids[first : first + sizes[rank]]
        all_gatherv(buffer, sizes, width=8, staging=scratch, algorithm=("grouped", "padded")[layer % 2])
    for ids, buffer in zip(wanted, buffers, strict=True):
        assert torch.equal(buffer[:, :8], ids) and (buffer[:, 8:] == SENTINEL).all()


def test_one_scratch_for_layer_after_layer() -> None:  # X11
    succeeded(run_ranks(layers, 2))


def plain_ints(rank: int, world: int) -> list[tuple[str, int]]:
    """What goes over the wire, and no library looked up by name for it."""
    import ctypes.util

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError(f"a library is looked up: {arguments}")

    ctypes.CDLL = ctypes.util.find_library = refuse  # type: ignore[assignment, misc]
    sent = []
    real = dist.broadcast

    def spy(view: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        sent.append((str(view.dtype), view.numel()))
        return real(view, *arguments, **options)

    dist.broadcast = spy
    exchange_once(rank, [3, 0, 4], case(width=5, columns=5, pitch=8), 1)
    return sent


def test_ids_travel_as_plain_int32() -> None:  # X15 X16
    for answer in succeeded(run_ranks(plain_ints, 3)):
        assert answer.value == [("torch.int32", 15), ("torch.int32", 20)]
