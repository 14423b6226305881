"""What each rank of `bench sharding` does: operands, the four timed pieces of a step, and what comes back."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from portable_indexer.api import index_topk
from portable_indexer.backend import KV
from portable_indexer.cli._processes import Meeting
from portable_indexer.sharding import PrefillRowShard, balanced_prefill_row_shard
from portable_indexer.tuning.measure import hold
from portable_indexer.workspace import Workspace, workspace_bytes

HEAD_DIM = 128
# A clock read while a shorter step runs would say little.
_CLOCK_FROM_MS = 5.0
_AHEAD_S = 5e-3

# q, (k, k_scale), weights, ks, ke
Operands = tuple[torch.Tensor, KV, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """The last ``rows`` positions of a prompt of ``context`` tokens; ``pool`` tokens share a key."""

    rows: int
    context: int
    heads: int
    pool: int
    topk: int

    @property
    def keys(self) -> int:
        """Keys of the whole prompt."""
        return self.context // self.pool

    @property
    def width(self) -> int:
        """Ids a row."""
        return max(1, self.topk // self.pool)

    def sizes(self, tp_size: int) -> list[int]:
        """Rows of each rank."""
        plan = balanced_prefill_row_shard([self.context], [self.rows], self.pool, tp_size)
        return [self.rows] if plan is None else plan

    @property
    def pairs(self) -> int:
        """Key-row pairs."""
        first = self.context - self.rows + 1
        return sum((first + row) // self.pool for row in range(self.rows))


@dataclass(frozen=True)
class Times:
    """Milliseconds, medians over repeats; None where it was not measured."""

    replicated: float
    compute: float  # the slowest shard's, in each repeat
    computes: tuple[float, ...]  # each shard's
    exchange: float | None  # the slowest rank's
    sharded: float | None
    equal: bool
    spread: float  # (largest - smallest) / median of the replicated times
    clock_mhz: int | None  # of the compute units while replicated steps ran


@dataclass(frozen=True)
class Job:
    """What the ranks measure, shape by shape; a size above the number of ranks is played shard by shard."""

    items: tuple[tuple[int, Shape], ...]  # (tensor-parallel size, shape)
    repeats: int
    on_gpu: bool


def run_rank(meeting: Meeting, tell: Callable[[Any], None], job: Job) -> None:
    """The body of one rank; rank 0 tells (tensor-parallel size, shape, Times)."""
    device = torch.device("cuda", meeting.rank) if job.on_gpu else torch.device("cpu")
    if job.on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if meeting.ranks > 1:
        meeting.init(device_id=device if job.on_gpu else None)
    measure = _sharded if meeting.ranks > 1 else _one_by_one
    for tp_size, shape in job.items:
        operands = _operands(shape, device)
        nbytes = workspace_bytes(shape.rows, shape.keys, shape.width, shape.heads, HEAD_DIM, tp_size)
        times = measure(meeting.rank, tp_size, shape, operands, Workspace(device, nbytes), job.repeats)
        if meeting.rank == 0:
            tell((tp_size, shape, times))
        del operands
        if job.on_gpu:
            torch.cuda.empty_cache()
    if meeting.ranks > 1:
        dist.destroy_process_group()


def _operands(shape: Shape, device: torch.device) -> Operands:
    """Random ones, the same on every rank, in the encoding that the device multiplies."""
    from portable_indexer.device import detect

    dtype = torch.float8_e4m3fnuz if detect(device).fp8 == "fnuz" else torch.float8_e4m3fn
    generator = torch.Generator(device).manual_seed(17)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device)

    q = torch.empty((shape.rows, shape.heads, HEAD_DIM), dtype=dtype, device=device)
    for first in range(0, shape.rows, 4096):
        part = q[first : first + 4096]
        part.copy_(draw(*part.shape).to(dtype))
    k = draw(shape.keys, HEAD_DIM).to(dtype)
    ke = (torch.arange(shape.context - shape.rows + 1, shape.context + 1, device=device) // shape.pool).int()
    return q, (k, draw(shape.keys).abs() + 0.5), draw(shape.rows, shape.heads), torch.zeros_like(ke), ke


def _milliseconds(work: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    hold(device, _AHEAD_S)  # as in a server, whose host is some kernels ahead
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _clock(work: Callable[[], None], device: torch.device, milliseconds: float) -> int | None:
    """The compute clock while `work` runs, in MHz, None where nobody says (it needs the vendor's library)."""
    if device.type != "cuda" or milliseconds < _CLOCK_FROM_MS:
        return None
    work()
    work()
    try:
        return int(torch.cuda.clock_rate(device))
    except Exception:
        return None
    finally:
        torch.cuda.synchronize(device)


def _sharded(rank: int, tp_size: int, shape: Shape, operands: Operands, space: Workspace, repeats: int) -> Times:
    """Every rank on a device of its own: replicated, own rows, exchange, and both together, interleaved."""
    q, kv, weights, ks, ke = operands
    shard = PrefillRowShard(0, tuple(shape.sizes(tp_size)), rank)
    own = slice(shard.start, shard.stop)
    whole = torch.empty((shape.rows, shape.width), dtype=torch.int32, device=q.device)
    shared = torch.full_like(whole, 2**31 - 1)

    def replicated() -> None:
        index_topk(*operands, shape.width, out=whole, workspace=space)

    def compute() -> None:
        if shard.stop > shard.start:
            index_topk(q[own], kv, weights[own], ks[own], ke[own], shape.width, out=shared[own], workspace=space)

    def exchange() -> None:
        shard.exchange_topk(shared, staging=space)

    def both() -> None:
        index_topk(*operands, shape.width, out=shared, shard=shard, workspace=space)

    both()  # compiles, too
    replicated()
    equal = torch.tensor([int(torch.equal(whole, shared))], device=q.device)
    dist.all_reduce(equal, op=dist.ReduceOp.MIN)
    samples = []
    for _ in range(repeats):
        row = []
        for work in (replicated, compute, exchange, both):
            _synchronize(q.device)
            dist.barrier()
            row.append(_milliseconds(work, q.device))
        samples.append(row)
    mine = torch.tensor(samples, dtype=torch.float64, device=q.device)
    everyones = [torch.empty_like(mine) for _ in range(tp_size)]
    dist.all_gather(everyones, mine)
    each = torch.stack(everyones).cpu()  # [ranks, repeats, kinds]
    slowest = each.amax(dim=0)
    computes = tuple(statistics.median(column) for column in each[:, :, 1].tolist())
    columns = slowest.T.tolist()
    alone, own_rows, exchanged, together = (statistics.median(column) for column in columns)
    clock = _clock(replicated, q.device, alone)
    return Times(
        alone, own_rows, computes, exchanged, together, bool(equal.item()), _spread(columns[0]), clock
    )  # fmt: skip


def _one_by_one(rank: int, tp_size: int, shape: Shape, operands: Operands, space: Workspace, repeats: int) -> Times:
    """All shards on one device in turn: no exchange."""
    q, kv, weights, ks, ke = operands
    whole = torch.empty((shape.rows, shape.width), dtype=torch.int32, device=q.device)
    pieces = torch.full_like(whole, 2**31 - 1)
    sizes = shape.sizes(tp_size)
    cuts = [slice(end - size, end) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]

    def compute(own: slice) -> None:
        if own.stop > own.start:
            index_topk(q[own], kv, weights[own], ks[own], ke[own], shape.width, out=pieces[own], workspace=space)

    def replicated() -> None:
        index_topk(*operands, shape.width, out=whole, workspace=space)

    def turn() -> tuple[float, list[float]]:
        _synchronize(q.device)
        alone = _milliseconds(replicated, q.device)
        return alone, [_milliseconds(partial(compute, own), q.device) for own in cuts]

    turn()  # compiles
    turns = [turn() for _ in range(max(2, repeats // 2))]
    alone = [t[0] for t in turns]
    slowest = statistics.median(max(t[1]) for t in turns)
    computes = tuple(statistics.median(t[1][i] for t in turns) for i in range(len(cuts)))
    middle = statistics.median(alone)
    clock = _clock(replicated, q.device, middle)
    return Times(middle, slowest, computes, None, None, torch.equal(whole, pieces), _spread(alone), clock)


def _spread(values: list[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)
