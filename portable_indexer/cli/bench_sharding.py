"""`portable-indexer bench sharding`: one layer's indexer, replicated against sharded, on several GPUs.

Where fewer GPUs are visible than a tensor-parallel size asks for, the shards of that size are computed one after the
other on the first GPU: that gives the compute of each rank and no exchange; the sharded time is then an estimate, and
marked as one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from portable_indexer.cli._bar import Bar
from portable_indexer.cli._processes import RanksFailed, run_ranks
from portable_indexer.cli._sharding_ranks import HEAD_DIM, Job, Shape, Times, run_rank
from portable_indexer.cli._sharding_table import derived, table
from portable_indexer.device import CPU, detect
from portable_indexer.policy import ShardPolicy
from portable_indexer.tuning import tuning_for

# On a CPU, larger sizes are played shard by shard, as where GPUs are missing.
_CPU_RANKS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the benchmark."""
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="tensor-parallel sizes")
    parser.add_argument("--rows", type=int, nargs="+", default=[8192], help="prefill rows of a step")
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[16384, 65536, 131072, 524288, 1048576], help="tokens of the prompt"
    )
    parser.add_argument("--heads", type=int, nargs="+", default=[32, 64], help="index heads")
    parser.add_argument("--pools", type=int, nargs="+", default=[1, 4], help="tokens a key")
    parser.add_argument("--topk", type=int, default=2048, help="tokens a row")
    parser.add_argument("--repeats", type=int, default=7, help="times that each piece is timed")
    parser.add_argument(
        "--device",
        choices=("gpu", "cpu"),
        default="gpu",
        help="cpu: over gloo, to see that it works; times mean nothing",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    """Measure and print; exit code 0 only where sharded and replicated ids were equal everywhere."""
    on_gpu = args.device == "gpu"
    wrong = _problem(args, on_gpu)
    if wrong is not None:
        print(f"portable-indexer bench sharding: {wrong}", file=sys.stderr)
        return 1
    shapes = [
        Shape(rows, context, heads, pool, args.topk)
        for heads, pool, rows, context in itertools.product(args.heads, args.pools, args.rows, args.contexts)
        if rows <= context
    ]
    there = torch.cuda.device_count() if on_gpu else _CPU_RANKS
    rows: list[dict[str, Any]] = []
    try:
        for tp_size in (size for size in args.ranks if size <= there):
            rows += _measure(tp_size, [(tp_size, shape) for shape in shapes], args.repeats, on_gpu)
        absent = [(size, shape) for size in args.ranks if size > there for shape in shapes]
        if absent:
            rows += _measure(1, absent, args.repeats, on_gpu)
    except (RanksFailed, OSError) as error:
        print(f"portable-indexer bench sharding: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps({**_machine(args, there), "rows": rows}))
    else:
        print(table(rows))
    return int(any(row["equal"] is False for row in rows))


def _problem(args: argparse.Namespace, on_gpu: bool) -> str | None:
    """What makes this run impossible."""
    if on_gpu and not torch.cuda.is_available():
        return "needs a GPU that torch can see (--device cpu shows that it works, without times)"
    least = {"ranks": 2, "rows": 1, "contexts": 1, "heads": 1, "pools": 1, "topk": 1, "repeats": 1}
    for name, bound in least.items():
        value = getattr(args, name)
        if any(each < bound for each in (value if isinstance(value, list) else [value])):
            return f"--{name} must be at least {bound}, got {value}"
    if min(args.rows) > max(args.contexts):
        return f"--rows {args.rows}: no context of {args.contexts} has so many"
    return None


def _measure(ranks: int, items: list[tuple[int, Shape]], repeats: int, on_gpu: bool) -> Iterator[dict[str, Any]]:
    """Rows of the table, from ``ranks`` processes with a device each; one process plays larger sizes by turns."""
    group = "cpu:gloo,cuda:nccl" if ranks > 1 and on_gpu else "gloo"
    told = run_ranks(run_rank, ranks, Job(tuple(items), repeats, on_gpu), group=group)
    policy = ShardPolicy(costs=tuning_for(detect() if on_gpu else CPU).costs, environment=False)
    with Bar(len(items), f"{ranks} {'GPUs' if on_gpu else 'processes'}") as bar:
        for _, (tp_size, shape, times) in told:
            yield _row(tp_size, shape, times, policy)
            bar.advance(f"TP {tp_size}, {shape.rows} x {shape.context}")


def predictions(policy: ShardPolicy, shape: Shape, tp_size: int) -> dict[str, float | None]:
    """What the policy predicts for a shape, in milliseconds; None where it knows no exchange."""
    guess = policy.estimate(
        rows=shape.rows,
        pairs=shape.pairs,
        tp_size=tp_size,
        num_heads=shape.heads,
        head_dim=HEAD_DIM,
        topk=shape.width,
        compress_ratio=shape.pool,
    )
    return {
        "predicted_replicated": guess.replicated_s * 1e3,
        "predicted_exchange": None if guess.exchange_s is None else guess.exchange_s * 1e3,
        "predicted_sharded": None if guess.sharded_s is None else guess.sharded_s * 1e3,
    }


def _row(tp_size: int, shape: Shape, times: Times, policy: ShardPolicy) -> dict[str, Any]:
    row = {
        "tp": tp_size,
        **asdict(shape),
        "sizes": shape.sizes(tp_size),
        "pairs": shape.pairs,
        **asdict(times),
        **predictions(policy, shape, tp_size),
    }
    found = derived(row)
    row |= {name: found[name] for name in ("balance", "exchange_share", "speed_up")}
    row["estimated"] = None if found["measured"] else found["sharded"]
    return row


def _machine(args: argparse.Namespace, there: int) -> dict[str, Any]:
    """Where the numbers come from."""
    from portable_indexer.cli import _node

    device = detect() if args.device == "gpu" else CPU
    options = ("ranks", "rows", "contexts", "heads", "pools", "topk", "repeats", "device")
    given = {name: getattr(args, name) for name in options}
    words = [f"--{name} " + " ".join(map(str, v if isinstance(v, list) else [v])) for name, v in given.items()]
    return {
        "command": " ".join(["portable-indexer bench sharding", *words]),
        "product": device.product or device.arch,
        "name": device.name,
        "devices": there,
        "versions": {
            **_node.versions(),
            "collectives": _node.collectives() if args.device == "gpu" else "gloo",
            "driver": device.driver,
            "runtime": device.runtime,
        },
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")},
        "tuning": tuning_for(device).origin,
    }
