"""What `portable-indexer tune` measures, through public functions only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from portable_indexer.tuning.fit import Sample

if TYPE_CHECKING:
    import torch

HEAD_DIM = 128


class Shape(NamedTuple):
    """Rows and keys of a step: causal rows, the last of each request.

    `requests` of equal length are packed side by side, each with its share of rows and keys. A key stands for `pool`
    tokens, so topk // pool of them are asked for.
    """

    rows: int
    keys: int
    pool: int = 1
    requests: int = 1


# Those of a GPU span what servers run: first chunks of prompts to slices of a 1M context, a step of many chunks of
# logits, and pooled keys.
GPU_SHAPES = (
    Shape(256, 4_096),
    Shape(1_024, 3_072),
    Shape(1_024, 16_384),
    Shape(4_096, 4_096),
    Shape(8_192, 8_192),
    Shape(2_048, 32_768),
    Shape(8_192, 32_768),
    Shape(4_096, 131_072),
    Shape(512, 262_144),
    Shape(2_048, 262_144),
    Shape(128, 1_048_576),
    Shape(1_024, 1_048_576),
    Shape(8_192, 524_288),
    Shape(4_096, 4_096, pool=4),
    Shape(4_096, 32_768, pool=4),
    Shape(2_048, 262_144, pool=4),
)
CPU_SHAPES = (Shape(8, 64), Shape(16, 256), Shape(64, 128), Shape(16, 128, pool=4))
# Shapes and heads that the fit does not see: the model's error is measured on them.
GPU_UNSEEN = (
    (Shape(448, 5_000), 64),
    (Shape(900, 10_000), 32),
    (Shape(1_280, 4_096), 64),
    (Shape(2_560, 20_000), 32),
    (Shape(5_000, 7_000), 64),
    (Shape(8_192, 50_000), 32),
    (Shape(3_584, 60_000), 64),
    (Shape(1_536, 150_000), 64),
    (Shape(400, 300_000), 32),
    (Shape(6_144, 800_000), 32),
    (Shape(3_000, 100_000, pool=4), 64),
    (Shape(4_096, 32_768, requests=4), 64),
)
CPU_UNSEEN = ((Shape(12, 96), 4), (Shape(32, 200, requests=2), 2))


@dataclass(frozen=True)
class Step:
    """The operands of one replicated step."""

    q: torch.Tensor  # [rows, H, D] fp8
    kv: tuple[torch.Tensor, torch.Tensor]  # [keys, D] fp8, [keys] float32
    weights: torch.Tensor  # [rows, H] float32
    ks: torch.Tensor  # [rows] int32
    ke: torch.Tensor  # [rows] int32
    pairs: int

    def first(self, rows: int) -> Step:
        """The step's first rows."""
        pairs = int((self.ke[:rows] - self.ks[:rows]).sum())
        return Step(self.q[:rows], self.kv, self.weights[:rows], self.ks[:rows], self.ke[:rows], pairs)


def make_step(shape: Shape, num_heads: int, head_dim: int, where: torch.device, seed: int = 0) -> Step:
    """Random operands on a device, in the encoding that it multiplies natively.

    Raises ValueError where the requests' shares of rows and keys are not whole.
    """
    import torch

    from portable_indexer.device import detect

    rows, keys = shape.rows // shape.requests, shape.keys // shape.requests  # of each request
    if (rows * shape.requests, keys * shape.requests) != (shape.rows, shape.keys):
        raise ValueError(f"{shape.requests} requests must have equal shares of {shape.rows} rows and {shape.keys} keys")
    dtype = torch.float8_e4m3fnuz if detect(where).fp8 == "fnuz" else torch.float8_e4m3fn
    generator = torch.Generator(where).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=where)

    own = torch.arange(keys - rows + 1, keys + 1, dtype=torch.int32, device=where)
    ks = torch.arange(0, shape.keys, keys, dtype=torch.int32, device=where).repeat_interleave(rows)
    scales = torch.rand(shape.keys, generator=generator, device=where) + 0.5
    return Step(
        q=normal(shape.rows, num_heads, head_dim).to(dtype),
        kv=(normal(shape.keys, head_dim).to(dtype), scales),
        weights=normal(shape.rows, num_heads),
        ks=ks,
        ke=ks + own.repeat(shape.requests),
        pairs=shape.requests * (rows * (keys - rows) + rows * (rows + 1) // 2),
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
        hold(where, wait_s)
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


def hold(where: torch.device, seconds: float) -> None:
    """Keep a GPU's current stream waiting, so that the host gets ahead of it."""
    import torch

    torch.cuda._sleep(int(seconds * _ticks_per_second(where)))


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
    shapes: Sequence[Shape],
    heads: Sequence[int],
    topk: int,
    head_dim: int = HEAD_DIM,
    budget_s: float = 0.2,
    steps_only: bool = False,
) -> Iterator[Sample]:
    """Times of scoring, selection and the whole step (or of the step alone) for each shape and head count.

    Scoring and selection alone are timed on as many of the rows as one logits budget holds, as in a step.
    Shapes that do not fit into the device's free memory are left out.
    """
    import torch

    import portable_indexer as pi
    from portable_indexer.workspace import logits_budget

    for shape in shapes:
        k = max(1, topk // shape.pool)
        if where.type == "cuda" and not _fits(shape, max(heads), head_dim, k, where):
            continue
        for num_heads in heads:
            step = make_step(shape, num_heads, head_dim, where)
            ids = torch.empty(shape.rows, k, dtype=torch.int32, device=where)
            whole = partial(pi.index_topk, step.q, step.kv, step.weights, step.ks, step.ke, k, out=ids)
            times = seconds_of(whole, where, budget_s)
            yield Sample("step", shape.rows, step.pairs, num_heads, head_dim, *times, k, shape.requests)
            if steps_only:
                continue
            part = step.first(max(1, min(shape.rows, logits_budget() // (4 * shape.keys))))
            of = (len(part.q), part.pairs, num_heads, head_dim)
            logits = torch.empty(len(part.q), shape.keys, dtype=torch.float32, device=where)
            score = partial(pi.fp8_mqa_logits, part.q, part.kv, part.weights, part.ks, part.ke, out=logits)
            yield Sample("score", *of, *seconds_of(score, where, budget_s), k, shape.requests)
            select = partial(pi.top_k_per_row, logits, part.ks, part.ke, k, out=ids[: len(part.q)])
            yield Sample("select", *of, *seconds_of(select, where, budget_s), k, shape.requests)


def _fits(shape: Shape, heads: int, head_dim: int, topk: int, where: torch.device) -> bool:
    import torch

    from portable_indexer.workspace import logits_budget

    # Random numbers are made as float32 and then rounded.
    need = 5 * (shape.rows * heads + shape.keys) * head_dim + 4 * shape.rows * topk + 3 * logits_budget()
    free, _ = torch.cuda.mem_get_info(where)
    return need < 0.8 * free
