"""``bench metadata``: the map and a step's whole metadata, beside other ways to build them.

Wall is from the call until the device has finished, host the call alone, graph the device's time inside a
captured graph of many calls. Medians over interleaved blocks of calls, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from portable_indexer.cli import _metadata_peers as peers
from portable_indexer.metadata import IndexerMetadataBuilder, token_to_req_indices

SIZES = (
    *((32, 1), (256, 1), (512, 1), (32, 16), (64, 128), (1, 8192), (8, 8192), (16, 16384)),
    (1, 262144),
)
MOST_DECODE_ROWS = 16
CONTEXT = 4096
GRAPH_CALLS = 20
BLOCK = 10
Call = Callable[[], Any]


@dataclass
class Case:
    """One size: every request has the same rows; an eighth more rows are padding."""

    reqs: int
    rows: int
    device: torch.device

    def __post_init__(self) -> None:
        self.tokens = self.reqs * self.rows
        self.padded = self.tokens + max(1, self.tokens // 8)
        self.num_decodes = self.reqs if self.rows <= MOST_DECODE_ROWS else 0
        length = max(self.rows, CONTEXT)
        self.starts_cpu = torch.arange(0, self.tokens + 1, self.rows, dtype=torch.int32)
        self.lens_cpu = torch.full((self.reqs,), length, dtype=torch.int32)
        self.starts = self.starts_cpu.to(self.device)
        self.lens = self.lens_cpu.to(self.device)
        self.out = torch.full((self.padded,), -77, dtype=torch.int32, device=self.device)
        self.builder = IndexerMetadataBuilder(
            self.padded, self.reqs, self.reqs * length, next_n=min(self.rows, MOST_DECODE_ROWS), device=self.device
        )
        self.groups = self.build()._layout.groups

    def build(self) -> Any:
        return self.builder.build(
            self.starts,
            self.lens,
            query_start_loc_cpu=self.starts_cpu,
            seq_lens_cpu=self.lens_cpu,
            num_decodes=self.num_decodes,
            num_tokens=self.padded,
        )

    def map(self) -> torch.Tensor:
        return token_to_req_indices(self.starts, self.padded, out=self.out)

    def check(self, vllm: Callable[..., Any] | str) -> bool:
        """Whether all ways give the same answers, from poisoned buffers."""
        want = torch.repeat_interleave(torch.arange(self.reqs, dtype=torch.int32), self.rows).to(self.device)
        want = torch.cat([want, want.new_zeros(self.padded - self.tokens)])
        right = torch.equal(self.map(), want)
        if callable(vllm):
            got: Any = vllm(self.starts, torch.full_like(self.out, -77), self.tokens, self.padded)
            right = right and torch.equal(got, want)
        for buffer in self.builder._buffers.written:
            buffer.fill_(-77)
        built = self.build()
        chain = peers.torch_step(self.starts, self.lens, self.num_decodes, self.tokens, self.groups)
        right = right and torch.equal(built.token_to_req, want)
        right = right and torch.equal(built.row_keys[: self.tokens], chain[1])
        for chunk in built.chunks:
            number = [group.request_start for group in self.groups].index(chunk.request_start)
            group, first = 3 + 4 * number, chunk.token_start - self.groups[number].token_start
            rows = slice(first, first + chunk.token_end - chunk.token_start)
            right = right and torch.equal(chunk.key_starts, chain[group])
            right = right and torch.equal(chunk.key_to_req, chain[group + 1])
            right = right and torch.equal(chunk.cu_seqlen_ks, chain[group + 2][rows])
            right = right and torch.equal(chunk.cu_seqlen_ke, chain[group + 3][rows])
        return bool(right)


def timed_calls(calls: dict[str, Call], rounds: int) -> dict[str, dict[str, float]]:
    """Median wall and host microseconds of each call: blocks of calls, interleaved, the first of each left out."""
    wall: dict[str, list[float]] = {name: [] for name in calls}
    host: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(max(1, rounds // BLOCK)):
        for name, call in calls.items():
            for number in range(BLOCK + 1):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                kept = call()
                launched = time.perf_counter()
                torch.cuda.synchronize()
                ended = time.perf_counter()
                if number:
                    wall[name].append(ended - begin)
                    host[name].append(launched - begin)
                del kept
    return {
        name: {"wall": 1e6 * statistics.median(wall[name]), "host": 1e6 * statistics.median(host[name])}
        for name in calls
    }


def graph_times(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Median device microseconds of each call inside a graph of GRAPH_CALLS, interleaved."""
    graphs = {}
    for name, call in calls.items():
        call()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(GRAPH_CALLS):
                call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / GRAPH_CALLS)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(case: Case, vllm: Callable[..., Any] | str, rounds: int) -> dict[str, Any]:
    """All figures of one size."""
    spare = torch.empty_like(case.out)
    calls: dict[str, Call] = {
        "map": case.map,
        "build": case.build,
        "build and first chunk": lambda: case.build().chunks[:1],
        "build and all chunks": lambda: list(case.build().chunks),
        "numpy and pinned copy": lambda: peers.host_map(case.starts_cpu, spare),
        "repeat_interleave": lambda: peers.repeat_map(case.starts, case.tokens),
        "torch chain": lambda: peers.torch_step(case.starts, case.lens, case.num_decodes, case.tokens, case.groups),
        "arange": lambda: torch.arange(case.padded + 1, dtype=torch.int32, device=case.device),
        "arange slice": lambda: case.builder._buffers.arange[: case.padded + 1],
        "kept slice": lambda: case.builder._buffers.first("arange", case.padded + 1),
    }
    in_graph: dict[str, Call] = {"map": case.map, "fill": lambda: spare.fill_(7)}
    if len(case.groups) <= 16:
        in_graph["build"] = case.build
    if callable(vllm):
        calls["vllm map"] = in_graph["vllm map"] = lambda: vllm(case.starts, spare, case.tokens, case.padded)
    for call in calls.values():
        call()
    return {
        "reqs": case.reqs,
        "rows": case.rows,
        "chunks": len(case.build().chunks),
        "calls": timed_calls(calls, rounds),
        "graph": graph_times(in_graph, rounds),
    }


def ratios(results: list[dict[str, Any]]) -> dict[str, float]:
    """Geometric means over the sizes of other / ours, and ours / the reference where it should be small."""

    def mean(values: list[float]) -> float:
        return math.exp(sum(map(math.log, values)) / len(values))

    def of(kind: str, above: str, below: str) -> float | None:
        pairs = []
        for result in results:
            if kind == "graph":
                table = result["graph"]
            else:
                table = {name: figures[kind] for name, figures in result["calls"].items()}
            if above in table and below in table:
                pairs.append(table[above] / table[below])
        return mean(pairs) if pairs else None

    wanted = {
        "graph: map / fill": of("graph", "map", "fill"),
        "graph: vLLM's map / map": of("graph", "vllm map", "map"),
        "wall: vLLM's map / map": of("wall", "vllm map", "map"),
        "wall: numpy and pinned copy / map": of("wall", "numpy and pinned copy", "map"),
        "wall: build / map": of("wall", "build", "map"),
        "wall: torch chain / build": of("wall", "torch chain", "build"),
        "host: build / map": of("host", "build", "map"),
        "wall: arange / slice": of("wall", "arange", "arange slice"),
    }
    return {name: value for name, value in wanted.items() if value is not None}


def print_table(results: list[dict[str, Any]], means: dict[str, float]) -> None:
    names = list(results[0]["calls"])
    for kind in ("wall", "host"):
        print(f"\n{kind}, us" + "".join(f" | {name}" for name in names))
        for result in results:
            row = "".join(f" | {result['calls'][name][kind]:.1f}" for name in names)
            print(f"{result['reqs']}x{result['rows']}{row}")
    print("\ngraph, us" + "".join(f" | {name}" for name in results[0]["graph"]))
    for result in results:
        row = "".join(f" | {value:.2f}" for value in result["graph"].values())
        print(f"{result['reqs']}x{result['rows']} ({result['chunks']} chunks){row}")
    print()
    for name, value in means.items():
        print(f"{name}: {value:.2f} (geometric mean)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=100, help="measurements of each figure (default 100)")
    parser.add_argument("--peers", help="folder with peers' files; default PORTABLE_INDEXER_PEERS")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Measure all sizes; 1 where there is no GPU or an answer is wrong."""
    if not torch.cuda.is_available():
        print("bench metadata: needs a GPU that torch can see")
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    vllm = peers.vllm_map(arguments.peers)
    results = []
    for reqs, rows in SIZES:
        case = Case(reqs, rows, device)
        if not case.check(vllm):
            print(f"bench metadata: wrong answers at {reqs} requests of {rows} rows")
            return 1
        results.append(measure(case, vllm, arguments.rounds))
    means = ratios(results)
    missing = None if callable(vllm) else vllm
    if arguments.json:
        name = torch.cuda.get_device_name(device)
        print(json.dumps({"device": name, "sizes": results, "means": means, "missing peer": missing}))
    else:
        print_table(results, means)
        if missing is not None:
            print(f"not compared: {missing}")
    return 0
