"""``bench scoring``: the logits kernel, beside DeepGEMM's and aiter's where they are found.

Causal rows of one request (``ke = N - M + 1 + row``), random operands. Every kernel's answer is checked against
float64 first. Then all kernels of a shape take turns, and the figure is the median of the ratios of
neighbouring times: a card that is limited by its power drifts by several percent within a minute.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from portable_indexer.api import fp8_mqa_logits
from portable_indexer.cli import _scoring_peers as peers
from portable_indexer.cli._bar import Bar
from portable_indexer.device import detect
from portable_indexer.registry import get_backend

# Rows, keys, heads.
GPU_SHAPES = (
    *((8192, 8192, 64), (8192, 8192, 32), (4096, 65536, 64), (4096, 65536, 32), (4096, 131072, 64)),
    *((4096, 131072, 32), (1024, 1 << 20, 32), (128, 1 << 20, 32), (128, 1 << 20, 64), (32, 1 << 20, 32)),
)
CPU_SHAPES = ((16, 512, 32),)
# Relative error in norm of a checked row; fp8 products are accumulated in fewer bits on Hopper.
TOLERANCE = 2e-4
CHECKED_ROWS = 3
# Clock cycles that the device idles before a timed call, about half a millisecond.
HEAD_START = 1_000_000


def operands(rows: int, keys: int, heads: int, dim: int, device: torch.device) -> peers.Operands:
    """Random operands in the encoding that the device multiplies natively."""
    dtype = torch.float8_e4m3fnuz if detect(device).fp8 == "fnuz" else torch.float8_e4m3fn
    q = torch.randn((rows, heads, dim), device=device).to(dtype)
    k = torch.randn((keys, dim), device=device).to(dtype)
    scale = torch.rand(keys, device=device) + 0.5
    weights = torch.randn((rows, heads), device=device)
    ke = torch.arange(keys - rows + 1, keys + 1, dtype=torch.int32, device=device)
    return q, (k, scale), weights, torch.zeros_like(ke), ke


def error_of(logits: torch.Tensor, given: peers.Operands) -> float:
    """Largest relative error in norm of a few rows, the last ones of them, against float64."""
    q, (k, scale), weights, _, ke = given
    rows = q.shape[0]
    worst = 0.0
    for row in sorted({rows // 2, max(rows - 2, 0), rows - 1})[:CHECKED_ROWS]:
        end = int(ke[row])
        heads = torch.relu(q[row].double() @ k[:end].double().T)
        right = (heads * weights[row].double()[:, None]).sum(0) * scale[:end].double()
        worst = max(worst, float((logits[row, :end].double() - right).norm() / right.norm()))
    return worst


def timed(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Milliseconds of one call: on the device, behind work that hides how late the host was; and on the host."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        spent = (time.perf_counter() - start) * 1e3
        return spent, spent
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(HEAD_START)
    first.record()
    start = time.perf_counter()
    call()
    host = (time.perf_counter() - start) * 1e3
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)), host


def measure(
    shape: tuple[int, int, int], dim: int, repeats: int, calls: dict[str, peers.Peer], device: torch.device
) -> dict[str, Any]:
    """Errors and times of all kernels on one shape."""
    rows, keys, heads = shape
    given = operands(rows, keys, heads, dim, device)
    out = torch.empty((rows, keys), device=device)
    errors, broken = {}, {}
    for name, call in calls.items():
        try:
            out.fill_(torch.nan)
            errors[name] = error_of(call(given, out), given)
        except Exception as error:  # a peer may refuse a shape; ours may not
            if name == "ours":
                raise
            broken[name] = f"{type(error).__name__}: {error}"
    running = {name: call for name, call in calls.items() if name in errors}
    times: dict[str, list[float]] = {name: [] for name in running}
    hosts: dict[str, list[float]] = {name: [] for name in running}
    for turn in range(repeats + 1):
        for name, call in running.items():
            elapsed, host = timed(partial(call, given, out), device)
            if turn:
                times[name].append(elapsed)
                hosts[name].append(host)
    pairs = sum(range(keys - rows + 1, keys + 1))
    result: dict[str, Any] = {"rows": rows, "keys": keys, "heads": heads, "dim": dim, "broken": broken}
    for name, spent in times.items():
        median = statistics.median(spent)
        ratios = [theirs / own for theirs, own in zip(spent, times["ours"], strict=True)]
        result[name] = {
            "ms": median,
            "host_ms": statistics.median(hosts[name]),
            "spread": (max(spent) - min(spent)) / median,
            "tflops": 2 * heads * dim * pairs / median / 1e9,
            "times_ours": statistics.median(ratios),
            "error": errors[name],
        }
    return result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--shapes", nargs="+", metavar="MxNxH", help="rows x keys x heads, such as 4096x65536x64")
    parser.add_argument("--dim", type=int, default=128, help="head dimension (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="timed turns of every kernel (default %(default)s)")
    parser.add_argument("--backend", help="backend to measure; default: the device's own")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Measure, print; 0 only where every answer of ours was right."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = get_backend(args.backend)
    shapes: tuple[tuple[int, int, int], ...] = GPU_SHAPES if device.type == "cuda" else CPU_SHAPES
    if args.shapes:
        shapes = tuple(_shape(text) for text in args.shapes)
    theirs, missing = peers.found() if device.type == "cuda" else ({}, {})

    def ours(given: peers.Operands, out: torch.Tensor) -> torch.Tensor:
        return fp8_mqa_logits(*given, out=out, backend=backend.name)

    calls: dict[str, peers.Peer] = {"ours": ours, **theirs}
    results = []
    with Bar(len(shapes), "scoring", quiet=args.quiet or args.json) as bar:
        for shape in shapes:
            results.append(measure(shape, args.dim, args.repeats, calls, device))
            bar.advance("x".join(map(str, shape)))
    report = {
        "device": detect(device).to_dict(),
        "backend": backend.name,
        "torch": torch.__version__,
        "triton": _triton_version(),
        "not_found": missing,
        "results": results,
    }
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        _print(report)
    return 0 if all(result["ours"]["error"] <= TOLERANCE for result in results) else 1


def _shape(text: str) -> tuple[int, int, int]:
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise SystemExit(f"--shapes takes rows x keys x heads such as 4096x65536x64, got {text!r}")
    rows, keys, heads = (int(part) for part in parts)
    if rows > keys:
        raise SystemExit(f"--shapes: causal rows need at least as many keys, got {text!r}")
    return rows, keys, heads


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def _print(report: dict[str, Any]) -> None:
    device = report["device"]
    print(
        f"{device['name'] or device['arch']}, torch {report['torch']}, Triton {report['triton']}, {report['backend']}"
    )
    names = list(peers.PEERS)
    head = ["M x N, H", "ours ms", "host ms", "spread", "TFLOP/s", "error"]
    for name in names:
        head += [f"{name} ms", "TFLOP/s", "ours is"]
    print("| " + " | ".join(head) + " |\n|" + " --- |" * len(head))
    for result in report["results"]:
        own = result["ours"]
        line = [
            f"{result['rows']} x {result['keys']}, {result['heads']}",
            f"{own['ms']:.3f}",
            f"{own['host_ms']:.3f}",
            f"{own['spread']:.0%}",
        ]
        line += [f"{own['tflops']:.0f}", f"{own['error']:.1e}"]
        for name in names:
            peer = result.get(name)
            line += (
                ["", "", ""]
                if peer is None
                else [
                    f"{peer['ms']:.3f}",
                    f"{peer['tflops']:.0f}",
                    f"{peer['times_ours']:.2f}x",
                ]
            )
        print("| " + " | ".join(line) + " |")
    for name, reason in report["not_found"].items():
        print(f"{name} not found: {reason}")
    for result in report["results"]:
        for name, reason in result["broken"].items():
            print(f"{name} on {result['rows']} x {result['keys']}, {result['heads']}: {reason}")
