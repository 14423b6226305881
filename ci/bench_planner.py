"""Time of ``balanced_prefill_row_shard`` against the row-by-row method, and what each target asks for.

    python ci/bench_planner.py [--json FILE] [--repeats N]

The row-by-row method expands every row (repeat_interleave), sums the costs (cumsum) and searches the cuts
(searchsorted), in int64 with torch on one thread. Both are run in turn, and the medians compared. Exit code
1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch

from portable_indexer.sharding import balanced_prefill_row_shard

# (requests, rows, least speed-up or None, most microseconds or None)
CASES = [
    (1, 65_536, None, None),
    (8, 65_536, 10.0, None),
    (64, 65_536, None, None),
    (1_024, 65_536, 5.0, None),
    (1_024, 1_000_000, None, 1_000.0),
]


def row_by_row(seqs: torch.Tensor, queries: torch.Tensor, ratio: int, ranks: int) -> list[int]:
    """The plain method: one entry for each row."""
    first = torch.repeat_interleave(seqs - queries + 1, queries)
    begin = torch.repeat_interleave(torch.cumsum(queries, 0) - queries, queries)
    keys = (first + torch.arange(len(first)) - begin).clamp_(min=0)
    total = torch.cumsum(torch.div(keys, ratio, rounding_mode="floor"), 0)
    shares = torch.arange(1, ranks) * total[-1] // ranks
    cuts = [0, *torch.searchsorted(total, shares).tolist(), len(total)]
    return [stop - start for start, stop in pairwise(cuts)]


def requests_of(count: int, rows: int, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Unequal requests with contexts of up to 131,072 tokens before the step: seq_lens, query_lens int32."""
    cuts = sorted(rng.sample(range(1, rows), count - 1))
    queries = [stop - start for start, stop in zip([0, *cuts], [*cuts, rows], strict=True)]
    seqs = [query + rng.randrange(131_072) for query in queries]
    return torch.tensor(seqs, dtype=torch.int32), torch.tensor(queries, dtype=torch.int32)


def once(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) * 1e6


def measure(count: int, rows: int, ratio: int, ranks: int, repeats: int) -> dict[str, float]:
    """Medians and quartiles of both methods in microseconds, run in turn on the same requests."""
    seqs, queries = requests_of(count, rows, random.Random(count * rows))
    wide = seqs.to(torch.int64), queries.to(torch.int64)
    ours = [0.0] * repeats
    plain = [0.0] * repeats
    for warm_up in (True, False):
        for i in range(5 if warm_up else repeats):
            plain[i] = once(lambda: row_by_row(*wide, ratio, ranks))
            ours[i] = once(lambda: balanced_prefill_row_shard(seqs, queries, ratio, ranks))
    spread = statistics.quantiles(ours, n=4)
    return {
        "requests": count,
        "rows": rows,
        "compress_ratio": ratio,
        "ranks": ranks,
        "us": statistics.median(ours),
        "us_quartile_1": spread[0],
        "us_quartile_3": spread[2],
        "row_by_row_us": statistics.median(plain),
        "speedup": statistics.median(plain) / statistics.median(ours),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--repeats", type=int, default=200)
    arguments = parser.parse_args()
    if arguments.repeats < 5:
        parser.error("--repeats must be at least 5")
    torch.set_num_threads(1)
    results, missed = [], []
    print(f"torch {torch.__version__}, Python {platform.python_version()}, one thread, {platform.machine()}")
    print(
        f"{'requests':>9}{'rows':>10}{'ratio':>6}{'ranks':>6}{'us':>9}{'quartiles':>18}{'row by row':>12}{'faster':>8}"
    )
    for count, rows, speedup, limit in CASES:
        for ratio in (1, 4):
            for ranks in (4, 8):
                result = measure(count, rows, ratio, ranks, arguments.repeats)
                results.append(result)
                quartiles = f"{result['us_quartile_1']:.0f} to {result['us_quartile_3']:.0f}"
                print(
                    f"{count:>9}{rows:>10}{ratio:>6}{ranks:>6}{result['us']:>9.1f}{quartiles:>18}"
                    f"{result['row_by_row_us']:>12.0f}{result['speedup']:>7.1f}x",
                    flush=True,
                )
                if speedup is not None and result["speedup"] < speedup:
                    missed.append(f"{count} requests, ratio {ratio}, {ranks} ranks: below {speedup:g}x")
                if limit is not None and result["us"] > limit:
                    missed.append(f"{count} requests, {rows} rows: above {limit:g} us")
    if arguments.json:
        report = {"torch": torch.__version__, "python": platform.python_version(), "results": results}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
