"""Times of the exchange among the ranks of a process group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from portable_indexer.tuning.measure import hold

if TYPE_CHECKING:
    import torch

GPU_ROWS = (64, 1_024, 8_192, 32_768)
CPU_ROWS = (4, 64)

# By algorithm: one entry for each exchange timed (see `exchange_samples`).
Timings = dict[str, list[dict[str, float]]]


def uneven(rows: int, ranks: int) -> list[int]:
    """Shard sizes as a causal prompt's rows get them: earlier ranks own more rows, at equal cost."""
    ends = [round(rows * (rank / ranks) ** 0.5) for rank in range(ranks + 1)]
    return [stop - start for start, stop in pairwise(ends)]


def exchange_samples(where: torch.device, rows: Sequence[int], width: int, rounds: int = 5) -> Timings:
    """Times of `all_gatherv` in the default group, for each algorithm: even and uneven shards of each size.

    Every rank of the group calls it. Each entry has `rows`, `uneven` (0 or 1), `bytes` that a rank receives
    from the others, `seconds` of the device and `host_s` to launch it: medians over rounds of the slowest rank.
    """
    import torch
    import torch.distributed as dist

    from portable_indexer.exchange import ALGORITHMS, all_gatherv, staging_bytes

    ranks, rank = dist.get_world_size(), dist.get_rank()
    found: Timings = {}
    for algorithm in ALGORITHMS:
        found[algorithm] = []
        for count in rows:
            for kind, sizes in enumerate(([len(range(r, count, ranks)) for r in range(ranks)], uneven(count, ranks))):
                buffer = torch.zeros(count, width, dtype=torch.int32, device=where)
                need = staging_bytes(count, width, ranks, algorithm) // 4
                staging = torch.empty(max(need, 1), dtype=torch.int32, device=where)
                call = partial(all_gatherv, buffer, sizes, staging=staging, algorithm=algorithm, rank=rank)
                seconds, host_s = _slowest(call, where, rounds)
                received = count * width * 4 * (ranks - 1) / ranks
                found[algorithm].append(
                    {"rows": count, "uneven": kind, "bytes": received, "seconds": seconds, "host_s": host_s}
                )
    return found


def _slowest(call: Callable[[], None], where: torch.device, rounds: int) -> tuple[float, float]:
    """(device, host) seconds of one call, of the slowest rank in each round, then the median.

    As in a stream whose host is ahead: every rank's device waits until its host has launched a batch of calls. On a
    CPU both are the time of a call.
    """
    import torch
    import torch.distributed as dist

    on_gpu = where.type == "cuda"

    def launched(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls

    def batch(calls: int, wait_s: float) -> tuple[float, float]:
        dist.barrier()
        if not on_gpu:
            host = launched(calls)
            return host, host
        torch.cuda.synchronize(where)
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        hold(where, wait_s)
        first.record()
        host = launched(calls)
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3 / calls, host

    for _ in range(3):
        batch(1, 0.0)
    calls = 10 if on_gpu else 1
    wait_s = _largest([batch(calls, 0.0)[1]], where)[0] * calls * 1.5
    measured = [batch(calls, wait_s) for _ in range(rounds)]
    return median(_largest([m[0] for m in measured], where)), median(_largest([m[1] for m in measured], where))


def _largest(values: list[float], where: torch.device) -> list[float]:
    """The largest of all ranks' values, one by one."""
    import torch
    import torch.distributed as dist

    box = torch.tensor(values, dtype=torch.float64, device=where)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return [float(value) for value in box.tolist()]


def faster_algorithm(measured: Iterable[Timings]) -> str:
    """The algorithm whose uneven exchanges, as real plans are, took the least; each size counts alike."""
    totals: dict[str, float] = {}
    for timings in measured:
        uneven_ones = {name: [e for e in entries if e["uneven"]] for name, entries in timings.items()}
        for same_size in zip(*uneven_ones.values(), strict=True):
            least = min(entry["seconds"] for entry in same_size)
            for name, entry in zip(uneven_ones, same_size, strict=True):
                totals[name] = totals.get(name, 0.0) + entry["seconds"] / least
    return min(totals, key=lambda name: totals[name])
