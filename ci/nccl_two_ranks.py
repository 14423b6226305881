"""The exchange on real GPUs over NCCL or RCCL: every kind of size list checked, then timed.

    python ci/nccl_two_ranks.py [--ranks N] [--json FILE] [--check-only] [--graph]

With two or more GPUs each rank has its own. With one, two ranks share it: the library then takes them for two
hosts and talks over the loopback interface, which tests function, not speed. ``--device cpu`` runs the same
over gloo. Exit code 0 only where every rank passed every check.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from portable_indexer.device import detect
from portable_indexer.exchange import ALGORITHMS, ExchangeError, all_gatherv, self_test, staging_bytes
from portable_indexer.sharding import PrefillRowShard, balanced_prefill_row_shard
from portable_indexer.tuning.measure import hold

WIDTH = 2048
TIMED_ROWS = (32, 128, 512, 2048, 8192, 16_384, 32_768, 65_536)
SHARED_ROWS = (32, 128, 512, 2048)


def share_one_gpu(rank: int) -> None:
    """Make the library take this process for a host of its own: it refuses two ranks of a host on one device."""
    os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")


def ids(rows: int, width: int, seed: int, device: torch.device) -> torch.Tensor:
    """The same int32 ids on every rank, no two alike within 2**31."""
    numbers = torch.arange(rows * width, dtype=torch.int64, device=device)
    return ((numbers * 2_654_435_761 + seed) % (2**31)).to(torch.int32).view(rows, width)


@contextlib.contextmanager
def no_sync_no_allocation(device: torch.device) -> Iterator[None]:
    """Raise where the host waits for the device, or where memory is allocated."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    if after != before:
        raise AssertionError(f"{after - before} allocations in an exchange with staging")


def check_once(sizes: list[int], layout: dict[str, int], algorithm: str, group: Any, device: torch.device) -> None:
    """One exchange into a poisoned buffer, every id and every sentinel compared."""
    rank, start, width = dist.get_rank(group), layout["start"], layout["width"]
    total = sum(sizes)
    wanted = ids(total, width, len(sizes) + total, device)
    storage = torch.full((start + total + layout["tail"], layout["pitch"]), -7, dtype=torch.int32, device=device)
    expected = storage.clone()
    expected[start : start + total, :width] = wanted
    first = start + sum(sizes[:rank])
    storage[first : first + sizes[rank]] = expected[first : first + sizes[rank]]
    need = staging_bytes(total, width, len(sizes), algorithm) // 4
    staging = torch.full((need,), -9, dtype=torch.int32, device=device)
    shard = PrefillRowShard(start, tuple(sizes), rank)
    shard.check(len(storage), group)
    with no_sync_no_allocation(device):
        shard.exchange_topk(storage, width, group=group, staging=staging, algorithm=algorithm)
    if not torch.equal(storage, expected):
        wrong = (storage != expected).any(dim=1).nonzero().flatten().tolist()
        raise AssertionError(f"rank {rank}: {algorithm} {sizes} {layout}: wrong rows {wrong[:8]}")


def size_lists(world: int) -> list[list[int]]:
    lists = [
        [3 + 2 * r for r in range(world)],
        [5] * world,
        [4 * (r % 2) for r in range(world)],
        [4 * (1 - r % 2) for r in range(world)],
        [0] * (world - 1) + [9],
        [300] + [1] * (world - 1),
        [0] * world,
        balanced_prefill_row_shard([4098], [4098], 1, world) or [4098],
    ]
    return [list(sizes) for sizes in dict.fromkeys(map(tuple, lists))]


def check_all(world: int, group: Any, device: torch.device) -> int:
    """Contiguous and pitched layouts, with decode and padded rows; returns the number of exchanges."""
    done = 0
    for sizes in size_lists(world):
        for width, pitch, start, tail in ((64, 64, 0, 0), (48, 48, 3, 2), (WIDTH, WIDTH + 128, 1, 1)):
            layout = {"width": width, "pitch": pitch, "start": start, "tail": tail}
            for algorithm in ALGORITHMS:
                check_once(sizes, layout, algorithm, group, device)
                done += 1
    return done


def check_mismatch(rank: int, world: int, device: torch.device) -> None:
    """PORTABLE_INDEXER_CHECK=1: a right plan passes; one that differs on the last rank raises on all."""
    os.environ["PORTABLE_INDEXER_CHECK"] = "1"
    buffer = torch.full((2 * world, 8), rank, dtype=torch.int32, device=device)
    all_gatherv(buffer, [2] * world)
    try:
        all_gatherv(buffer, [2] * (world - 1) + [1 if rank == world - 1 else 2])
    except ExchangeError as error:
        if f"rank {world - 1}: sizes" not in str(error):
            raise
    else:
        raise AssertionError("a plan that differs between ranks went through")
    finally:
        del os.environ["PORTABLE_INDEXER_CHECK"]


def check_graph(rank: int, world: int, device: torch.device) -> None:
    """CUDA only: captured exchanges replay to the same ids. On HIP the capture must be refused."""
    for sizes in ([5] * world, [3 + 2 * r for r in range(world)]):
        wanted = ids(sum(sizes), 64, 1, device)
        own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        buffer = torch.full_like(wanted, -1)
        all_gatherv(buffer, sizes)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            if torch.version.hip is not None:
                try:
                    all_gatherv(buffer, sizes)
                except RuntimeError:
                    continue
                raise AssertionError("an exchange was captured in a HIP graph")
            all_gatherv(buffer, sizes)
        for _ in range(3):
            buffer.fill_(-1)
            buffer[own] = wanted[own]
            graph.replay()
            if not torch.equal(buffer, wanted):
                raise AssertionError(f"rank {rank}: a replayed exchange of {sizes} is wrong")


def largest(value: float, device: torch.device) -> float:
    """The largest of all ranks' values."""
    box = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return float(box.item())


def seconds_of(work: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """(device, host) seconds of one call in a batch of calls, each the median over batches, slowest rank.

    Every rank's device waits until its host has launched the batch, so that no gap between launches counts.
    """

    def batch(calls: int, wait_s: float) -> tuple[float, float]:
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            hold(device, wait_s)
            start.record()
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        host = (time.perf_counter() - begin) / calls
        if device.type != "cuda":
            return host, host
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / 1e3 / calls, host

    batch(2, 0.0)
    device_s, host_s = (largest(seconds, device) for seconds in batch(1, 0.0))
    calls = max(1, min(20, int(0.02 / device_s)))
    batches = [batch(calls, 1.5 * host_s * calls) for _ in range(7)]
    device_s, host_s = (statistics.median(column) for column in zip(*batches, strict=True))
    return largest(device_s, device), largest(host_s, device)


def measure(rank: int, world: int, device: torch.device, all_rows: tuple[int, ...]) -> list[dict[str, Any]]:
    """Both algorithms over rows x size lists x layouts."""
    results = []
    pool = torch.zeros(max(all_rows) * (WIDTH + 128), dtype=torch.int32, device=device)
    staging = torch.zeros(staging_bytes(max(all_rows), WIDTH, world, "padded") // 4, dtype=torch.int32, device=device)
    for rows in all_rows:
        plans = {
            "even": [rows // world] * world,
            "causal": balanced_prefill_row_shard([rows], [rows], 1, world),
            "at 128K": balanced_prefill_row_shard([131_072 + rows], [rows], 1, world),
        }
        for plan, sizes in plans.items():
            for pitch in (WIDTH, WIDTH + 128):
                for algorithm in ALGORITHMS:
                    buffer = pool[: rows * pitch].view(rows, pitch)

                    def work(buffer: Any = buffer, sizes: Any = sizes, algorithm: str = algorithm) -> None:
                        all_gatherv(buffer, sizes, width=WIDTH, staging=staging, algorithm=algorithm)

                    device_s, host_s = seconds_of(work, device)
                    received = sum(sizes) * WIDTH * 4 * (world - 1) / world
                    results.append(
                        {
                            "rows": rows, "plan": plan, "sizes": sizes, "pitched": pitch != WIDTH,
                            "algorithm": algorithm, "us": device_s * 1e6, "host_us": host_s * 1e6,
                            "received_gb_s": received / device_s / 1e9,
                        }
                    )  # fmt: skip
    return results


def body(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    world, shared = arguments.ranks, arguments.shared
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if shared:
        share_one_gpu(rank)
    if arguments.device == "cpu":
        torch.set_num_threads(1)
        device, backend = torch.device("cpu"), "gloo"
    else:
        device, backend = torch.device("cuda", 0 if shared else rank), "nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=(Path(folder) / "store").as_uri(),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )

    def note(text: str) -> None:
        if rank == 0:
            print(f"[{time.perf_counter() - begin:6.1f} s] {text}", flush=True)

    begin = time.perf_counter()
    report: dict[str, Any] = {}
    report["checked"] = check_all(world, None, device)
    note(f"{report['checked']} exchanges of {world} ranks are right, without a sync or an allocation")
    self_test(device)
    check_mismatch(rank, world, device)
    note("self test and plan check")
    half = max(1, world // 2)
    groups = [dist.new_group(list(range(half))), dist.new_group(list(range(half, world)))]
    mine = groups[rank >= half]
    report["checked_in_groups"] = check_all(dist.get_world_size(mine), mine, device)
    note(f"{report['checked_in_groups']} exchanges in each of two groups")
    if arguments.graph:
        check_graph(rank, world, device)
        note("replayed from a graph" if torch.version.hip is None else "refused in a HIP graph")
    if not arguments.check_only:
        rows = arguments.rows or (SHARED_ROWS if shared or device.type == "cpu" else TIMED_ROWS)
        report["results"] = measure(rank, world, device, tuple(rows))
        note("timed")
    dist.barrier()
    if rank == 0:
        (Path(folder) / "report.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{'rows':>6} {'plan':<8}{'layout':<12}" + "".join(
        f"{a + ' us':>12}{'GB/s':>8}{'host us':>9}" for a in ALGORITHMS
    )
    keyed = {(r["rows"], r["plan"], r["pitched"], r["algorithm"]): r for r in results}
    for rows, plan, pitched in dict.fromkeys(key[:3] for key in keyed):
        line = f"{rows:>6} {plan:<8}{'pitched' if pitched else 'contiguous':<12}"
        for algorithm in ALGORITHMS:
            r = keyed[rows, plan, pitched, algorithm]
            line += f"{r['us']:>12.1f}{r['received_gb_s']:>8.1f}{r['host_us']:>9.1f}"
        yield line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="default: one for each GPU, at least 2")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=int, nargs="+", help="row counts to time")
    parser.add_argument("--check-only", action="store_true", help="time nothing")
    parser.add_argument("--graph", action="store_true", help="also capture exchanges in a graph")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--timeout", type=float, default=420.0, help="seconds for everything")
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count() if arguments.device == "cuda" else 0
    if arguments.device == "cuda" and gpus == 0:
        print("no GPU that torch can see; --device cpu runs over gloo", file=sys.stderr)
        return 2
    arguments.ranks = arguments.ranks or max(2, gpus)
    if arguments.ranks < 2:
        parser.error("--ranks must be at least 2")
    arguments.shared = arguments.device == "cuda" and gpus < arguments.ranks
    print(f"{arguments.ranks} ranks on {gpus} GPUs" + (" (shared: function, not speed)" if arguments.shared else ""))
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.spawn(body, args=(arguments, folder), nprocs=arguments.ranks, join=False)
        deadline = time.monotonic() + arguments.timeout
        try:
            while not ranks.join(timeout=5):
                if time.monotonic() > deadline:
                    print(f"not finished after {arguments.timeout:g} s", file=sys.stderr)
                    return 1
        except mp.ProcessRaisedException as error:
            print(error, file=sys.stderr)
            return 1
        finally:
            for process in ranks.processes:
                if process.is_alive():
                    process.kill()
        report = json.loads((Path(folder) / "report.json").read_text())
    cuda = arguments.device == "cuda"
    report = {
        "command": " ".join(sys.argv),
        "ranks": arguments.ranks,
        "shared_gpu": arguments.shared,
        "device": torch.cuda.get_device_name(0) if cuda else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "driver": detect().driver,
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")},
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        **report,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    for line in table(report["results"]) if "results" in report else ():
        print(line)
    print(f"{report['device']}, torch {report['torch']}, NCCL or RCCL {report['nccl']}: all checks passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
