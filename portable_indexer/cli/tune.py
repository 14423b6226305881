"""`portable-indexer tune`: measure this node and write the numbers that the sharding policy uses here."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from portable_indexer.cli._bar import Bar


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
    parser.add_argument(
        "--budget", type=float, default=0.2, help="seconds for each timed call (default: 0.2)"
    )
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
    from portable_indexer.tuning.measure import CPU_SHAPES, GPU_SHAPES, compute_samples

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
    samples = []
    with Bar(3 * len(shapes) * len(args.heads) + len(ranks), "measuring", quiet=args.quiet) as bar:
        topk = args.topk if device.is_gpu else min(args.topk, 16)
        for sample in compute_samples(where, shapes, args.heads, topk, budget_s=args.budget):
            samples.append(sample)
            bar.advance(f"{sample.kind} {sample.rows} rows, H {sample.num_heads}")
        exchange, algorithm = _exchange(ranks, device.is_gpu, topk, bar)
    try:
        costs = fit(samples)
    except ValueError as error:
        print(f"portable-indexer tune: {error}", file=sys.stderr)
        return 1
    steps = [sample for sample in samples if sample.kind == "step"]
    off = error_of(costs, steps)
    content = _content(device, costs, exchange, algorithm, off)
    report: dict[str, Any] = {
        "content": content,
        "path": None if args.dry_run else str(path),
        "samples": [[s.kind, s.rows, s.pairs, s.num_heads, s.seconds, s.predicted(costs)] for s in samples],
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
        _print(device, samples, costs, content, report["path"])
    return 0


def _shapes(text: str) -> list[tuple[int, int]]:
    shapes = []
    for part in text.split(","):
        rows, _, keys = part.partition("x")
        if not (rows.isdigit() and keys.isdigit() and 1 <= int(rows) <= int(keys)):
            raise ValueError(f"--shapes must be ROWSxKEYS,... with 1 <= ROWS <= KEYS, got {part!r}")
        shapes.append((int(rows), int(keys)))
    return shapes


def _ranks(asked: list[int] | None, on_gpu: bool) -> list[int]:
    import torch

    if asked is not None:
        return sorted({ranks for ranks in asked if ranks >= 2})
    return [ranks for ranks in (2, 4, 8) if on_gpu and ranks <= torch.cuda.device_count()]


def _exchange(
    ranks: list[int], on_gpu: bool, width: int, bar: Bar
) -> tuple[dict[int, tuple[float, float]], str | None]:
    """(latency, bandwidth) by number of ranks for the faster algorithm, and that algorithm."""
    from portable_indexer.tuning.fit import fit_exchange
    from portable_indexer.tuning.ranks import (
        CPU_ROWS,
        GPU_ROWS,
        Timings,
        faster_algorithm,
        measure_in_processes,
    )

    found: dict[int, Timings] = {}
    for count in ranks:
        try:
            found[count] = measure_in_processes(count, on_gpu, GPU_ROWS if on_gpu else CPU_ROWS, width)
        except RuntimeError as error:
            print(f"portable-indexer tune: {error}", file=sys.stderr)
        bar.advance(f"exchange among {count}")
    if not found:
        return {}, None
    algorithm = faster_algorithm(found.values())
    fitted = {
        count: fit_exchange([(e["bytes"], e["seconds"]) for e in by_algorithm[algorithm] if e["uneven"]])
        for count, by_algorithm in found.items()
    }
    return fitted, algorithm


def _content(
    device: Any, costs: Any, exchange: dict[int, tuple[float, float]], algorithm: str | None, error: Any
) -> dict[str, Any]:
    """The tuning file."""
    today = date.today().isoformat()
    numbers = {
        name: {"value": getattr(costs, name), "source": "measured", "run": today}
        for name in (
            "score_launch_s",
            "score_row_s",
            "score_pair_s",
            "score_flops",
            "select_launch_s",
            "select_row_s",
            "select_pair_s",
        )
    }
    for ranks, (latency, bandwidth) in sorted(exchange.items()):
        numbers[f"exchange.{ranks}.latency_s"] = {"value": latency, "source": "measured", "run": today}
        numbers[f"exchange.{ranks}.bandwidth"] = {"value": bandwidth, "source": "measured", "run": today}
    if algorithm is None:
        choice = {"value": "grouped", "source": "reported", "note": "no exchange was measured"}
    else:
        choice = {"value": algorithm, "source": "measured", "run": today}
    return {
        "schema": 1,
        "product": device.product or device.arch,
        "arch": device.arch,
        "about": f"Measured by `portable-indexer tune` on {device.name or device.arch}"
        + (f" in partition {device.partition}." if device.partition else "."),
        "runs": {
            today: {
                "date": today,
                "versions": _versions(device),
                "error": {
                    "shapes": error.shapes,
                    "seen_by_the_fit": True,
                    "median": round(error.median, 4),
                    "worst": round(error.worst, 4),
                },
            }
        },
        "numbers": numbers,
        "choices": {"exchange_algorithm": choice},
    }


def _versions(device: Any) -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("portable-indexer", "torch", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return {**found, "driver": device.driver, "runtime": device.runtime}


def _print(device: Any, samples: list[Any], costs: Any, content: dict[str, Any], path: str | None) -> None:
    print(f"{device.name or device.arch} ({device.arch}, {device.units or '?'} units)")
    print(f"{'what':>7} {'rows':>7} {'pairs':>15} {'H':>4} {'measured':>12} {'fitted':>12}")
    for s in samples:
        line = f"{s.kind:>7} {s.rows:7,} {s.pairs:15,} {s.num_heads:4}"
        print(f"{line} {s.seconds * 1e3:9.3f} ms {s.predicted(costs) * 1e3:9.3f} ms")
    for name, number in content["numbers"].items():
        print(f"  {name} = {number['value']:.4g}")
    run = next(iter(content["runs"].values()))
    off = run["error"]
    print(f"fitted step times are off by {off['median']:.1%} in the median, {off['worst']:.1%} at worst")
    print(f"written: {path}" if path else "nothing was written (--dry-run)")
