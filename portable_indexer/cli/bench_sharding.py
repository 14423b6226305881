"""`portable-indexer bench sharding`: one layer's indexer, replicated against sharded, on several GPUs.

Where fewer GPUs are visible than a tensor-parallel size asks for, the shards of that size are computed one after the
other on the first GPU: that gives the compute of the slowest rank, and no exchange time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from portable_indexer.api import index_topk
from portable_indexer.backend import KV
from portable_indexer.cli._bar import Bar
from portable_indexer.cli._processes import Meeting, RanksFailed, run_ranks
from portable_indexer.policy import ShardPolicy
from portable_indexer.sharding import PrefillRowShard, balanced_prefill_row_shard
from portable_indexer.workspace import Workspace, workspace_bytes

HEAD_DIM = 128

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
        return self.context // self.pool

    @property
    def width(self) -> int:
        return self.topk // self.pool

    def sizes(self, tp_size: int) -> list[int]:
        plan = balanced_prefill_row_shard([self.context], [self.rows], self.pool, tp_size)
        return [self.rows] if plan is None else plan

    @property
    def pairs(self) -> int:
        first = self.context - self.rows + 1
        return sum((first + row) // self.pool for row in range(self.rows))


@dataclass(frozen=True)
class Times:
    """Milliseconds, medians; None where it was not measured."""

    replicated: float
    compute: float  # the slowest rank's
    exchange: float | None
    sharded: float | None
    equal: bool | None
    spread: float  # (largest - smallest) / median of the replicated times


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="tensor-parallel sizes")
    parser.add_argument("--rows", type=int, nargs="+", default=[8192])
    parser.add_argument("--contexts", type=int, nargs="+", default=[16384, 65536, 131072, 524288, 1048576])
    parser.add_argument("--heads", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--pools", type=int, nargs="+", default=[1, 4], help="tokens a key")
    parser.add_argument("--topk", type=int, default=2048, help="tokens a row")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("bench sharding needs a GPU that torch can see", file=sys.stderr)
        return 1
    shapes = [
        Shape(rows, context, heads, pool, args.topk)
        for heads, pool, rows, context in itertools.product(args.heads, args.pools, args.rows, args.contexts)
        if rows <= context
    ]
    rows: list[dict[str, Any]] = []
    try:
        there = torch.cuda.device_count()
        for tp_size in (size for size in args.ranks if size <= there):
            rows += _measure(tp_size, [(tp_size, shape) for shape in shapes], args.repeats)
        absent = [(size, shape) for size in args.ranks if size > there for shape in shapes]
        if absent:
            rows += _measure(1, absent, args.repeats)
    except RanksFailed as error:
        print(f"bench sharding: {error}", file=sys.stderr)
        return 1
    _print(rows, as_json=args.json)
    return int(any(row["equal"] is False for row in rows))


def _measure(ranks: int, jobs: list[tuple[int, Shape]], repeats: int) -> Iterator[dict[str, Any]]:
    """Rows of the table, from ``ranks`` processes with a GPU each; one process plays larger sizes by turns."""
    told = run_ranks(_rank, ranks, (jobs, repeats), group="cpu:gloo,cuda:nccl" if ranks > 1 else "gloo")
    policy = ShardPolicy(mode="auto", environment=False)
    with Bar(len(jobs), f"{ranks} GPUs") as bar:
        for _, (tp_size, shape, times) in told:
            yield _row(tp_size, shape, times, policy)
            bar.advance(f"TP {tp_size}, {shape.rows} x {shape.context}")


def _row(tp_size: int, shape: Shape, times: Times, policy: ShardPolicy) -> dict[str, Any]:
    wanted = {"num_heads": shape.heads, "topk": shape.width, "head_dim": HEAD_DIM}
    guess = policy.estimate(rows=shape.rows, pairs=shape.pairs, tp_size=tp_size, **wanted)
    return {
        "tp": tp_size,
        **asdict(shape),
        **asdict(times),
        "predicted_replicated": guess.replicated_s * 1e3,
        "predicted_sharded": None if guess.sharded_s is None else guess.sharded_s * 1e3,
    }


def _rank(meeting: Meeting, tell: Callable[[Any], None], job: tuple[list[tuple[int, Shape]], int]) -> None:
    jobs, repeats = job
    device = torch.device("cuda", meeting.rank)
    torch.cuda.set_device(device)
    if meeting.ranks > 1:
        meeting.init(device_id=device)
    measure = _sharded if meeting.ranks > 1 else _one_by_one
    for tp_size, shape in jobs:
        operands = _operands(shape, device)
        nbytes = workspace_bytes(shape.rows, shape.keys, shape.width, shape.heads, HEAD_DIM, tp_size)
        times = measure(meeting.rank, tp_size, shape, operands, Workspace(device, nbytes), repeats)
        if meeting.rank == 0:
            tell((tp_size, shape, times))
        del operands
        torch.cuda.empty_cache()
    if meeting.ranks > 1:
        dist.destroy_process_group()


def _operands(shape: Shape, device: torch.device) -> Operands:
    generator = torch.Generator(device).manual_seed(17)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device)

    q = torch.empty((shape.rows, shape.heads, HEAD_DIM), dtype=torch.float8_e4m3fn, device=device)
    for part in torch.arange(shape.rows, device=device).split(4096):
        q[part[0] : part[-1] + 1] = draw(len(part), shape.heads, HEAD_DIM).to(q.dtype)
    k = draw(shape.keys, HEAD_DIM).to(torch.float8_e4m3fn)
    ke = (torch.arange(shape.context - shape.rows + 1, shape.context + 1, device=device) // shape.pool).int()
    return q, (k, draw(shape.keys).abs() + 0.5), draw(shape.rows, shape.heads), torch.zeros_like(ke), ke


def _timed(work: Callable[[], None]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _sharded(rank: int, tp_size: int, shape: Shape, operands: Operands, space: Workspace, repeats: int) -> Times:
    """Every rank on a GPU of its own: replicated, own rows, exchange, and both together, interleaved."""
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
            torch.cuda.synchronize()
            dist.barrier()
            row.append(_timed(work))
        samples.append(row)
    slowest = torch.tensor(samples, dtype=torch.float64, device=q.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    columns = slowest.T.tolist()
    middle = [statistics.median(column) for column in columns]
    spread = (max(columns[0]) - min(columns[0])) / middle[0]
    return Times(middle[0], middle[1], middle[2], middle[3], bool(equal.item()), spread)


def _one_by_one(rank: int, tp_size: int, shape: Shape, operands: Operands, space: Workspace, repeats: int) -> Times:
    """All shards on one GPU in turn: the slowest one's compute."""
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

    samples: list[list[float]] = []
    for _ in range(max(2, repeats // 2) + 1):
        alone = _timed(replicated)
        samples.append([alone, max(_timed(partial(compute, own)) for own in cuts)])
    samples = samples[1:]
    columns = list(zip(*samples, strict=True))
    middle = [statistics.median(column) for column in columns]
    spread = (max(columns[0]) - min(columns[0])) / middle[0]
    return Times(middle[0], middle[1], None, None, torch.equal(whole, pieces), spread)


def _print(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
        print(json.dumps({"versions": versions, "rows": rows}))
        return
    print("| TP | rows | context | H | pool | replicated ms | slowest rank's compute | exchange | sharded | speed-up |")
    print("|" + " ---: |" * 10)
    for row in rows:
        real = row["sharded"] is not None
        speed = row["replicated"] / (row["sharded"] if real else row["compute"])
        cells = [row["tp"], row["rows"], row["context"], row["heads"], row["pool"], f"{row['replicated']:.3f}"]
        cells += [f"{row['compute']:.3f}"]
        cells += [f"{row['exchange']:.3f}", f"{row['sharded']:.3f}"] if real else ["not measured", "not measured"]
        cells += [f"{speed:.2f}x" + ("" if real else " of compute alone")]
        print("| " + " | ".join(map(str, cells)) + " |")
