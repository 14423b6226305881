"""``bench selection``: top-k per row, and score-and-select, beside vLLM's top-k and DeepGEMM where they are found.

Causal rows of one request (``ke = N - M + 1 + row``). Every way's ids are compared with the reference's choice
first, those of peers as sets. All ways of a shape then take turns, each as a replayed graph, and the figure is the
median of the ratios of neighbouring times. A read is one pass over the valid logits at the device's own rate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from portable_indexer.api import index_topk, top_k_per_row
from portable_indexer.cli import _scoring_peers, _selection_peers
from portable_indexer.cli._bar import Bar
from portable_indexer.cli.bench_scoring import operands
from portable_indexer.device import detect
from portable_indexer.registry import get_backend
from portable_indexer.workspace import Workspace

# Rows, keys.
TOPK_SHAPES = (
    *((4096, 131072), (1024, 1 << 20), (128, 1 << 20), (64, 131072), (4096, 65536), (4096, 32768)),
    *((4096, 16384), (8192, 8192)),
)
# Rows, keys, heads, MiB of logits.
INDEX_SHAPES = (
    *((4096, 131072, 32, 512), (4096, 131072, 64, 512), (1024, 1 << 20, 32, 512), (128, 1 << 20, 32, 512)),
    *((128, 1 << 20, 64, 512), (128, 1 << 20, 32, 64), (128, 1 << 20, 64, 64)),
)
CPU_TOPK_SHAPES = ((8, 3000),)
CPU_INDEX_SHAPES = ((8, 512, 4, 1),)
DATA = ("normal", "levels", "ascending", "clusters")
CACHE_BYTES = 256 << 20  # calls rotate among logits of so many bytes, so that no cache holds them
CHECKED_ROWS = 8
Call = Callable[[], Any]


def scores(rows: int, keys: int, data: str, device: torch.device) -> torch.Tensor:
    """Logits [rows, keys]: normal; rounded to few levels; sorted; or with a stretch of higher scores."""
    logits = torch.randn((rows, keys), device=device)
    if data == "levels":
        return logits.round_()
    if data == "ascending":
        for part in logits.split(64):
            part.copy_(part.sort(dim=1).values)
    if data == "clusters":
        logits[:, keys // 3 : keys // 3 + keys // 50] += 2
    return logits


def wrong_rows(ids: torch.Tensor, logits: torch.Tensor, ke: torch.Tensor, ordered: bool) -> int:
    """Rows, of a few, that differ from the reference's; as sets where the order is free."""
    rows, topk = ids.shape
    at = torch.linspace(0, rows - 1, min(CHECKED_ROWS, rows)).long()
    right = torch.empty((len(at), topk), dtype=torch.int32, device=logits.device)
    ends = ke[at.to(ke.device)].contiguous()
    get_backend("reference").top_k_per_row(logits[at.to(logits.device)], torch.zeros_like(ends), ends, topk, right)
    got = ids[at.to(ids.device)]
    if not ordered:
        got, right = got.sort(dim=1).values, right.sort(dim=1).values
    return int((got != right).any(dim=1).sum())


def _graph(call: Call, device: torch.device, calls: int) -> Call:
    """The call, several times, as one replayable graph; the call itself where there are no graphs."""
    if device.type != "cuda":
        return call
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    return graph.replay


def take_turns(calls: dict[str, Call], device: torch.device, rounds: int, each: int = 1) -> dict[str, dict[str, float]]:
    """Median microseconds of each call, and the median over rounds of its time divided by that of the first."""
    graphs = {name: _graph(call, device, each) for name, call in calls.items()}
    each = each if device.type == "cuda" else 1
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, graph in graphs.items():
            if device.type == "cuda":
                first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                first.record()
                graph()
                last.record()
                last.synchronize()
                spent = first.elapsed_time(last) * 1e3
            else:
                begin = time.perf_counter()
                graph()
                spent = (time.perf_counter() - begin) * 1e6
            if turn:
                times[name].append(spent / each)
    own = times[next(iter(times))]
    return {
        name: {
            "us": statistics.median(spent),
            "spread": (max(spent) - min(spent)) / statistics.median(spent),
            "times_ours": statistics.median(a / b for a, b in zip(spent, own, strict=True)),
        }
        for name, spent in times.items()
    }


def bench_topk(
    shape: tuple[int, int], data: str, topk: int, backend: str, theirs: Any, device: torch.device, rounds: int
) -> dict[str, Any]:
    """One shape of ``top_k_per_row``."""
    rows, keys = shape
    copies = max(1, min(4, CACHE_BYTES // (4 * rows * keys))) if device.type == "cuda" else 1
    tables = [scores(rows, keys, data, device) for _ in range(copies)]
    turn = itertools.cycle(tables)
    ke = torch.arange(keys - rows + 1, keys + 1, dtype=torch.int32, device=device).clamp_(min=1)
    ks = torch.zeros_like(ke)
    ids = torch.full((rows, topk), -7, dtype=torch.int32, device=device)
    calls: dict[str, Call] = {"ours": lambda: top_k_per_row(next(turn), ks, ke, topk, out=ids, backend=backend)}
    wrong = {}
    top_k_per_row(tables[0], ks, ke, topk, out=ids, backend=backend)
    wrong["ours"] = wrong_rows(ids, tables[0], ke, True)
    if theirs is not None:
        other = torch.full_like(ids, -7)
        calls["vllm"] = lambda: theirs(next(turn), ks, ke, topk, other)
        theirs(tables[0], ks, ke, topk, other)
        wrong["vllm"] = wrong_rows(other, tables[0], ke, False)
    if device.type == "cuda":
        total = torch.empty(rows, device=device)
        calls["read"] = lambda: torch.amax(next(turn), dim=1, out=total)
    result = {"op": "top_k_per_row", "rows": rows, "keys": keys, "data": data, "wrong": wrong}
    result["ways"] = take_turns(calls, device, rounds, 4 if 4 * rows * keys < CACHE_BYTES else 1)
    return result


def bench_index(
    shape: tuple[int, int, int, int], dim: int, topk: int, backend: str, theirs: Any, device: torch.device, rounds: int
) -> dict[str, Any]:
    """One shape of ``index_topk`` within a logits budget."""
    rows, keys, heads, megabytes = shape
    given = operands(rows, keys, heads, dim, device)
    _, _, _, ks, ke = given
    from portable_indexer.backend import Problem

    problem = Problem.of_scores("index_topk", *given, topk)[0]
    workspace = Workspace(device, get_backend(backend).workspace_bytes(problem, megabytes << 20))
    ids = torch.full((rows, topk), -7, dtype=torch.int32, device=device)

    def ours() -> torch.Tensor:
        return index_topk(*given, topk, out=ids, backend=backend, workspace=workspace)

    calls: dict[str, Call] = {"ours": ours}
    if theirs is not None:
        score, select = theirs
        other = torch.full_like(ids, -7)

        def peer() -> None:
            logits = score(given, None)
            select(logits, torch.zeros_like(ks), ke - ks, topk, other)

        calls["deep_gemm + vllm"] = peer
    ours()
    few = torch.linspace(0, rows - 1, min(CHECKED_ROWS, rows)).long().to(device)
    q, kv, weights, _, _ = given
    logits = torch.empty((len(few), keys), device=device)
    k, k_scale = kv
    get_backend(backend).fp8_mqa_logits(
        q[few], k, k_scale, weights[few], ks[few].contiguous(), ke[few].contiguous(), logits, False
    )
    wrong = {"ours": wrong_rows(ids[few], logits, ke[few], True)}
    del logits
    result = {"op": "index_topk", "rows": rows, "keys": keys, "heads": heads, "budget_mib": megabytes, "wrong": wrong}
    result["workspace_mib"] = workspace.nbytes / (1 << 20)
    result["ways"] = take_turns(calls, device, rounds)
    return result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--only", choices=("topk", "index"), help="one of the two operations")
    parser.add_argument("--topk", type=int, default=2048, help="ids a row (default %(default)s)")
    parser.add_argument("--data", nargs="+", choices=DATA, default=["normal"], help="scores of the top-k shapes")
    parser.add_argument("--rounds", type=int, default=9, help="timed turns of every way (default %(default)s)")
    parser.add_argument("--backend", help="backend to measure; default: the device's own")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _peers() -> tuple[Any, Any, dict[str, str]]:
    """vLLM's top-k, DeepGEMM's scoring with it, and why one is missing."""
    missing: dict[str, str] = {}
    select = score = None
    try:
        select = _selection_peers.vllm_topk()
    except Exception as error:  # a peer that fails to load is reported, whatever it raises
        missing["vllm"] = f"{type(error).__name__}: {error}"
    try:
        score = _scoring_peers.deep_gemm()
    except Exception as error:
        missing["deep_gemm"] = f"{type(error).__name__}: {error}"
    return select, (score, select) if score and select else None, missing


def run(args: argparse.Namespace) -> int:
    """Measure, print; 0 only where every answer of ours was right."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    backend = get_backend(args.backend).name
    gpu = device.type == "cuda"
    select, both, missing = _peers() if gpu else (None, None, {})
    tables = [(shape, data) for data in args.data for shape in (TOPK_SHAPES if gpu else CPU_TOPK_SHAPES)]
    whole: Sequence[tuple[int, int, int, int]] = INDEX_SHAPES if gpu else CPU_INDEX_SHAPES
    if args.only:
        tables, whole = (tables, ()) if args.only == "topk" else ([], whole)
    results = []
    with Bar(len(tables) + len(whole), "selection", quiet=args.quiet or args.json) as bar:
        for shape, data in tables:
            results.append(bench_topk(shape, data, args.topk, backend, select, device, args.rounds))
            bar.advance("x".join(map(str, shape)))
        for wide in whole:
            results.append(bench_index(wide, 128, args.topk, backend, both, device, args.rounds))
            bar.advance("x".join(map(str, wide)))
    if args.json:
        found = detect(device).to_dict()
        print(json.dumps({"device": found, "backend": backend, "not_found": missing, "results": results}, indent=1))
    else:
        _print(results, missing)
    return 0 if all(result["wrong"]["ours"] == 0 for result in results) else 1


def _print(results: list[dict[str, Any]], missing: dict[str, str]) -> None:
    for result in results:
        size = f"{result['rows']} x {result['keys']}"
        size += f", H {result['heads']}, {result['budget_mib']} MiB" if "heads" in result else f", {result['data']}"
        ways = result["ways"]
        line = f"{result['op']} {size}: {ways['ours']['us']:.1f} us (spread {ways['ours']['spread']:.0%})"
        for name, way in ways.items():
            if name != "ours":
                line += f"; {name} {way['us']:.1f} us, ours is {way['times_ours']:.2f}x"
        print(line + "".join(f"; WRONG ROWS of {n}: {c}" for n, c in result["wrong"].items() if c))
    for name, reason in missing.items():
        print(f"{name} not found: {reason}")
