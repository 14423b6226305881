"""`portable-indexer tune`: measure this node and write the numbers that the sharding policy uses here."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from portable_indexer.cli._bar import Bar

if TYPE_CHECKING:
    from portable_indexer.cli._processes import Meeting
    from portable_indexer.tuning.costs import Costs, Exchange
    from portable_indexer.tuning.fit import Sample
    from portable_indexer.tuning.measure import Shape
    from portable_indexer.tuning.ranks import Timings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the subcommand."""
    parser.add_argument("--heads", type=int, nargs="+", default=[32, 64], help="index heads (default: 32 64)")
    parser.add_argument("--topk", type=int, default=2048, help="ids a row (default: 2048)")
    parser.add_argument(
        "--tp",
        type=int,
        nargs="*",
        default=None,
        help="numbers of ranks whose exchange is measured, each rank a process with its own GPU "
        "(default: 2, 4, 8 as far as there are GPUs; none: leave the exchange out)",
    )
    parser.add_argument("--budget", type=float, default=0.2, help="seconds for each timed call (default: 0.2)")
    parser.add_argument("--shapes", help="ROWSxKEYS,... instead of the usual shapes")
    parser.add_argument("--out", type=Path, help="file to write (default: the user's tuning file)")
    parser.add_argument("--dry-run", action="store_true", help="measure and print, write nothing")
    parser.add_argument(
        "--json", action="store_true", help="print the file's content and the errors of the fit as JSON"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Measure, fit, write; exit code 0 when the file was written (or --dry-run measured)."""
    import torch

    from portable_indexer.device import detect
    from portable_indexer.tuning import TuningError, store
    from portable_indexer.tuning.fit import error_of, fit
    from portable_indexer.tuning.measure import CPU_SHAPES, CPU_UNSEEN, GPU_SHAPES, GPU_UNSEEN, compute_samples

    device = detect()
    where = torch.device("cuda", device.index or 0) if device.is_gpu else torch.device("cpu")
    try:
        shapes = _shapes(args.shapes) if args.shapes else GPU_SHAPES if device.is_gpu else CPU_SHAPES
    except ValueError as error:
        print(f"portable-indexer tune: {error}", file=sys.stderr)
        return 2
    path = args.out or store.user_file(device.product or device.arch)
    if path is None and not args.dry_run:
        print("portable-indexer tune: no home folder to write to; give --out FILE", file=sys.stderr)
        return 1
    ranks = _ranks(args.tp, device.is_gpu)
    samples: list[Sample] = []
    unseen: list[Sample] = []
    checks = GPU_UNSEEN if device.is_gpu else CPU_UNSEEN
    total = 3 * len(shapes) * len(args.heads) + len(checks) + len(ranks)
    with Bar(total, "measuring", quiet=args.quiet) as bar:
        topk = args.topk if device.is_gpu else min(args.topk, 16)
        for sample in compute_samples(where, shapes, args.heads, topk, budget_s=args.budget):
            samples.append(sample)
            bar.advance(f"{sample.kind} {sample.rows} rows, H {sample.num_heads}")
        for shape, heads in checks:
            unseen += compute_samples(where, [shape], [heads], topk, budget_s=args.budget, steps_only=True)
            bar.advance(f"check {shape.rows} rows, {shape.keys} keys, H {heads}")
        exchange, algorithm = _exchange(ranks, device.is_gpu, topk, bar)
    try:
        costs = fit(samples)
    except ValueError as error:
        print(f"portable-indexer tune: {error}", file=sys.stderr)
        return 1
    off = error_of(costs, unseen or samples)
    content = _content(device, costs, exchange, algorithm, off, seen=not unseen)
    report: dict[str, Any] = {
        "content": content,
        "path": None if args.dry_run else str(path),
        "columns": ["kind", "rows", "pairs", "heads", "k", "requests", "host_s", "measured_s", "predicted_s"],
        "samples": [_line(sample, costs) for sample in samples],
        "unseen": [_line(sample, costs) for sample in unseen],
    }
    if not args.dry_run and path is not None:
        try:
            store.write(path, content)
        except (OSError, TuningError) as problem:
            print(f"portable-indexer tune: {path} was not written: {problem}", file=sys.stderr)
            return 1
    if args.json:
        print(json.dumps(report))
    else:
        _print(device, samples, unseen, costs, content, report["path"])
    return 0


def _line(sample: Sample, costs: Costs) -> list[Any]:
    times = (sample.host_s, sample.seconds, sample.predicted(costs))
    of = [sample.kind, sample.rows, sample.pairs, sample.num_heads, sample.topk, sample.requests]
    return [*of, *(float(f"{s:.5g}") for s in times)]


def _shapes(text: str) -> list[Shape]:
    from portable_indexer.tuning.measure import Shape

    shapes = []
    for part in text.split(","):
        rows, _, keys = part.partition("x")
        if not (rows.isdigit() and keys.isdigit() and 1 <= int(rows) <= int(keys)):
            raise ValueError(f"--shapes must be ROWSxKEYS,... with 1 <= ROWS <= KEYS, got {part!r}")
        shapes.append(Shape(int(rows), int(keys)))
    return shapes


def _ranks(asked: list[int] | None, on_gpu: bool) -> list[int]:
    import torch

    if asked is not None:
        return sorted({ranks for ranks in asked if ranks >= 2})
    return [ranks for ranks in (2, 4, 8) if on_gpu and ranks <= torch.cuda.device_count()]


def _exchange(ranks: list[int], on_gpu: bool, width: int, bar: Bar) -> tuple[dict[int, Exchange], str | None]:
    """The costs by number of ranks for the faster algorithm, and that algorithm."""
    from portable_indexer.tuning.costs import Exchange
    from portable_indexer.tuning.fit import fit_exchange
    from portable_indexer.tuning.ranks import (
        CPU_ROWS,
        GPU_ROWS,
        faster_algorithm,
    )

    found: dict[int, Timings] = {}
    for count in ranks:
        try:
            found[count] = _among(count, on_gpu, GPU_ROWS if on_gpu else CPU_ROWS, width)
        except (OSError, RuntimeError) as error:
            print(f"portable-indexer tune: exchange among {count} ranks: {error}", file=sys.stderr)
        bar.advance(f"exchange among {count}")
    if not found:
        return {}, None
    algorithm = faster_algorithm(found.values())
    fitted = {}
    for count, by_algorithm in found.items():
        seen = [entry for entry in by_algorithm[algorithm] if entry["uneven"]]
        latency, bandwidth = fit_exchange([(entry["bytes"], entry["seconds"]) for entry in seen])
        # On a CPU the ranks' hosts do the exchange themselves.
        launch = median(entry["host_s"] for entry in seen) if on_gpu else None
        fitted[count] = Exchange(count, latency, bandwidth, launch)
    return fitted, algorithm


def _among(ranks: int, on_gpu: bool, rows: Sequence[int], width: int) -> Timings:
    """Times of the exchange among processes of this node, each with its own GPU (or gloo on a CPU).

    Raises OSError or RuntimeError, with the rank that failed and why; no process is left then.
    """
    from portable_indexer.cli._processes import run_ranks

    group = "cuda:nccl" if on_gpu else "gloo"
    for _, timings in run_ranks(_one_rank, ranks, (on_gpu, tuple(rows), width), group=group, timeout_s=120.0):
        found: Timings = timings
        return found
    raise RuntimeError("no rank reported")


def _one_rank(meeting: Meeting, tell: Callable[[Any], None], argument: tuple[bool, tuple[int, ...], int]) -> None:
    import torch
    import torch.distributed as dist

    from portable_indexer.tuning.ranks import exchange_samples

    on_gpu, rows, width = argument
    where = torch.device("cuda", meeting.rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(where)
        meeting.init(where)
    else:
        torch.set_num_threads(1)
        meeting.init()
    found = exchange_samples(where, rows, width)
    if meeting.rank == 0:
        tell(found)
    dist.destroy_process_group()


def _content(
    device: Any, costs: Any, exchange: dict[int, Exchange], algorithm: str | None, error: Any, seen: bool
) -> dict[str, Any]:
    """The tuning file."""
    from portable_indexer.tuning import packaged_content, store

    # What was not measured here stays as the package has it, with its own source, unless it is a partition's.
    whole = device.partition is None or device.partition.startswith("SPX")
    known = packaged_content(device.product) if device.product and whole else None
    known = known or {"runs": {}, "numbers": {}, "choices": {}}
    kept = {name: entry for name, entry in known["numbers"].items() if name.startswith("exchange.")}
    runs = {name: run for name, run in known["runs"].items() if any(e.get("run") == name for e in kept.values())}
    today = date.today().isoformat()
    run = today
    while run in runs:
        run += "+"

    def measured(value: float) -> dict[str, Any]:
        return {"value": float(f"{value:.4g}"), "source": "measured", "run": run}

    numbers = {name: measured(getattr(costs, name)) for name in (*store.REQUIRED, *store.OPTIONAL)}
    for ranks, entry in sorted(exchange.items()):
        kept[f"exchange.{ranks}.latency_s"] = measured(entry.latency_s)
        kept[f"exchange.{ranks}.bandwidth"] = measured(entry.bandwidth)
        kept.pop(f"exchange.{ranks}.launch_s", None)
        if entry.launch_s is not None:
            kept[f"exchange.{ranks}.launch_s"] = measured(entry.launch_s)
    numbers |= kept
    choice: dict[str, Any] = {"value": "grouped", "source": "reported", "note": "no exchange was measured"}
    if algorithm is not None:
        choice = {"value": algorithm, "source": "measured", "run": run}
    elif known["choices"]:
        choice = known["choices"]["exchange_algorithm"]
    return {
        "schema": 1,
        "product": device.product or device.arch,
        "arch": device.arch,
        "about": f"Measured by `portable-indexer tune` on {device.name or device.arch}"
        + (f" in partition {device.partition}." if device.partition else "."),
        "runs": {
            **runs,
            run: {
                "date": today,
                "versions": _versions(device),
                "error": {
                    "shapes": error.shapes,
                    "seen_by_the_fit": seen,
                    "median": round(error.median, 4),
                    "worst": round(error.worst, 4),
                },
            },
        },
        "numbers": numbers,
        "choices": {"exchange_algorithm": choice},
    }


def _versions(device: Any) -> dict[str, str | None]:
    from portable_indexer.cli._node import versions

    seen = versions()
    found = {
        "python": platform.python_version(),
        **{name: seen[name] for name in ("portable-indexer", "torch", "triton")},
    }
    return {**found, "driver": device.driver, "runtime": device.runtime}


def _print(
    device: Any,
    samples: list[Sample],
    unseen: list[Sample],
    costs: Costs,
    content: dict[str, Any],
    path: str | None,
) -> None:
    print(f"{device.name or device.arch} ({device.arch}, {device.units or '?'} units)")
    for title, group in (("fitted", samples), ("predicted for shapes that the fit did not see", unseen)):
        print(f"{'what':>7} {'rows':>7} {'pairs':>15} {'H':>4} {'k':>5} {'measured':>12}   {title}")
        for s in group:
            line = f"{s.kind:>7} {s.rows:7,} {s.pairs:15,} {s.num_heads:4} {s.topk:5}"
            share = s.predicted(costs) / s.seconds - 1
            more = f"  {s.requests} requests" if s.requests > 1 else ""
            print(f"{line} {s.seconds * 1e3:9.3f} ms {s.predicted(costs) * 1e3:9.3f} ms {share:+7.1%}{more}")
    for name, number in content["numbers"].items():
        print(f"  {name} = {number['value']:.4g}")
    off = list(content["runs"].values())[-1]["error"]
    print(f"predicted step times are off by {off['median']:.1%} in the median, {off['worst']:.1%} at worst")
    print(f"written: {path}" if path else "nothing was written (--dry-run)")
