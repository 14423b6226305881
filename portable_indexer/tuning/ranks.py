"""Times of the exchange among the ranks of a process group."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

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


def exchange_samples(where: torch.device, rows: Sequence[int], width: int, rounds: int = 20) -> Timings:
    """Times of `all_gatherv` in the default group, for each algorithm: even and uneven shards of each size.

    Every rank of the group calls it. Each entry has `rows`, `uneven` (0 or 1), `bytes` that a rank receives
    from the others, and `seconds`: the median over rounds of the slowest rank.
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
                times = []
                for turn in range(rounds + 3):
                    dist.barrier()
                    start = time.perf_counter()
                    all_gatherv(buffer, sizes, staging=staging, algorithm=algorithm, rank=rank)
                    if where.type == "cuda":
                        torch.cuda.synchronize(where)
                    if turn >= 3:
                        times.append(time.perf_counter() - start)
                slowest = torch.tensor(times, dtype=torch.float64, device=where)
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                received = count * width * 4 * (ranks - 1) / ranks
                found[algorithm].append(
                    {"rows": count, "uneven": kind, "bytes": received, "seconds": median(slowest.tolist())}
                )
    return found


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
