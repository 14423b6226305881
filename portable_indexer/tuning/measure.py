"""What `portable-indexer tune` measures, through public functions only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import TYPE_CHECKING

from portable_indexer.tuning.fit import Sample

if TYPE_CHECKING:
    import torch

HEAD_DIM = 128
# Rows x keys. Those of a GPU span what servers run: first chunks of prompts to slices of a 1M context.
GPU_SHAPES = (
    (256, 4_096),
    (1_024, 3_072),
    (1_024, 16_384),
    (4_096, 4_096),
    (8_192, 8_192),
    (2_048, 32_768),
    (8_192, 32_768),
    (4_096, 131_072),
    (512, 262_144),
    (2_048, 262_144),
    (128, 1_048_576),
    (1_024, 1_048_576),
)
CPU_SHAPES = ((8, 64), (16, 256), (64, 128))
# Rows x keys x heads that the fit does not see: the model's error is measured on them.
GPU_UNSEEN = (
    (448, 5_000, 64),
    (900, 10_000, 32),
    (1_280, 4_096, 64),
    (2_560, 20_000, 32),
    (5_000, 7_000, 64),
    (7_168, 14_000, 64),
    (8_192, 50_000, 32),
    (3_584, 60_000, 64),
    (1_536, 150_000, 64),
    (400, 300_000, 32),
    (192, 700_000, 64),
    (1_792, 900_000, 32),
)
CPU_UNSEEN = ((12, 96, 4), (32, 200, 2))


@dataclass(frozen=True)
class Step:
    """The operands of one replicated step: causal rows, the last `rows` of `keys` positions."""

    q: torch.Tensor  # [rows, H, D] fp8
    kv: tuple[torch.Tensor, torch.Tensor]  # [keys, D] fp8, [keys] float32
    weights: torch.Tensor  # [rows, H] float32
    ks: torch.Tensor  # [rows] int32
    ke: torch.Tensor  # [rows] int32
    pairs: int

    def first(self, rows: int) -> Step:
        """The step's first rows."""
        pairs = int(self.ke[:rows].sum())
        return Step(self.q[:rows], self.kv, self.weights[:rows], self.ks[:rows], self.ke[:rows], pairs)


def make_step(rows: int, keys: int, num_heads: int, head_dim: int, where: torch.device, seed: int = 0) -> Step:
    """Random operands on a device, in the encoding that it multiplies natively."""
    import torch

    from portable_indexer.device import detect

    dtype = torch.float8_e4m3fnuz if detect(where).fp8 == "fnuz" else torch.float8_e4m3fn
    generator = torch.Generator(where).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=where)

    ke = torch.arange(keys - rows + 1, keys + 1, dtype=torch.int32, device=where)
    scales = torch.rand(keys, generator=generator, device=where) + 0.5
    return Step(
        q=normal(rows, num_heads, head_dim).to(dtype),
        kv=(normal(keys, head_dim).to(dtype), scales),
        weights=normal(rows, num_heads),
        ks=torch.zeros(rows, dtype=torch.int32, device=where),
        ke=ke,
        pairs=rows * (keys - rows) + rows * (rows + 1) // 2,
    )


def seconds_of(call: Callable[[], object], where: torch.device, budget_s: float = 0.2) -> tuple[float, float]:
    """Median seconds of one call: on the device, and on the host to launch it. Warm-up is left out.

    The device's time is that of a stream whose host is ahead, as in a server: the device is kept waiting until
    the host has launched all calls of a batch, so that no gap between launches counts. On a CPU both are the same.
    """
    import torch

    call()
    if where.type != "cuda":
        times: list[float] = []
        end = time.perf_counter() + budget_s
        while len(times) < 3 or (time.perf_counter() < end and len(times) < 50):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return median(times), median(times)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def batch(count: int, wait_s: float) -> tuple[float, float]:
        torch.cuda.synchronize(where)
        torch.cuda._sleep(int(wait_s * _ticks_per_second(where)))
        first.record()
        start = time.perf_counter()
        for _ in range(count):
            call()
        host = time.perf_counter() - start
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3 / count, host / count

    call()
    once, host = batch(1, 0.0)
    once, host = batch(1, 2 * host)
    count = max(1, min(10, int(budget_s / 5 / once)))
    batches = [batch(count, 1.5 * host * count) for _ in range(5)]
    return median(device for device, _ in batches), median(host for _, host in batches)


@cache
def _ticks_per_second(where: torch.device) -> float:
    """How fast the clock runs that `torch.cuda._sleep` counts."""
    import torch

    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    ticks = 1_000_000
    for _ in range(2):
        first.record()
        torch.cuda._sleep(ticks)
        last.record()
        last.synchronize()
    return ticks / max(float(first.elapsed_time(last)) / 1e3, 1e-6)


def compute_samples(
    where: torch.device,
    shapes: Sequence[tuple[int, int]],
    heads: Sequence[int],
    topk: int,
    head_dim: int = HEAD_DIM,
    budget_s: float = 0.2,
    steps_only: bool = False,
) -> Iterator[Sample]:
    """Times of scoring, selection and the whole step (or of the step alone) for each (rows, keys) and head count.

    Scoring and selection alone are timed on as many of the rows as one logits budget holds, as in a step.
    Shapes that do not fit into the device's free memory are left out.
    """
    import torch

    import portable_indexer as pi
    from portable_indexer.workspace import logits_budget

    for rows, keys in shapes:
        if where.type == "cuda" and not _fits(rows, keys, max(heads), head_dim, topk, where):
            continue
        for num_heads in heads:
            step = make_step(rows, keys, num_heads, head_dim, where)
            ids = torch.empty(rows, topk, dtype=torch.int32, device=where)
            whole = partial(pi.index_topk, step.q, step.kv, step.weights, step.ks, step.ke, topk, out=ids)
            yield Sample("step", rows, step.pairs, num_heads, head_dim, *seconds_of(whole, where, budget_s))
            if steps_only:
                continue
            part = step.first(max(1, min(rows, logits_budget() // (4 * keys))))
            shape = (len(part.q), part.pairs, num_heads, head_dim)
            logits = torch.empty(len(part.q), keys, dtype=torch.float32, device=where)
            score = partial(pi.fp8_mqa_logits, part.q, part.kv, part.weights, part.ks, part.ke, out=logits)
            yield Sample("score", *shape, *seconds_of(score, where, budget_s))
            select = partial(pi.top_k_per_row, logits, part.ks, part.ke, topk, out=ids[: len(part.q)])
            yield Sample("select", *shape, *seconds_of(select, where, budget_s))


def _fits(rows: int, keys: int, heads: int, head_dim: int, topk: int, where: torch.device) -> bool:
    import torch

    from portable_indexer.workspace import logits_budget

    # Random numbers are made as float32 and then rounded.
    need = 5 * (rows * heads * head_dim + keys * head_dim) + 4 * rows * topk + 3 * logits_budget()
    free, _ = torch.cuda.mem_get_info(where)
    return need < 0.8 * free
