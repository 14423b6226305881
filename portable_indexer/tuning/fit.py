"""From measured times to the numbers of `Costs`: a least-squares fit of relative errors, nothing negative."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Literal

from portable_indexer.tuning.costs import (
    SHORT_COLUMNS,
    Costs,
    chosen_in_registers,
    chunks_of,
    register_columns,
    width_of,
)

# Columns in the order of Costs: start, row, pair, flop of scoring; start, short, long, row, pair, id of selection.
_SCORE, _SELECT = 4, 6
_FLOP, _SHORT, _PAIR = 3, 5, 8


@dataclass(frozen=True)
class Sample:
    """One measured device time: of scoring, of selection, or of a whole replicated step ("step").

    `host_s` is the time in which the host launches it. `requests` packed side by side have equal shares of the rows
    and of the keys.
    """

    kind: Literal["score", "select", "step"]
    rows: int
    pairs: int
    num_heads: int
    head_dim: int
    seconds: float
    host_s: float = 0.0
    topk: int = 2048
    requests: int = 1

    @property
    def width(self) -> float:
        """Columns as the model judges them, which sees no requests."""
        return width_of(self.rows, self.pairs)

    @property
    def chunks(self) -> int:
        """Chunks of rows; scoring and selection are timed on one."""
        return chunks_of(self.rows, self.width) if self.kind == "step" else 1

    def predicted(self, costs: Costs) -> float:
        """The same time by the cost model."""
        seconds = 0.0
        if self.kind != "select":
            seconds += costs.score_s(self.rows, self.pairs, self.num_heads, self.head_dim, self.chunks)
        if self.kind != "score":
            seconds += costs.select_s(self.rows, self.pairs, self.width, self.topk, self.chunks)
        return seconds

    def _features(self) -> list[float]:
        chunks, ids = float(self.chunks), float(self.rows * self.topk)
        flops = 2.0 * self.num_heads * self.head_dim * self.pairs
        columns = register_columns(self.rows, self.pairs, self.width, self.topk)
        wide = chunks if self.width > SHORT_COLUMNS else 0.0
        short = [chunks, columns, wide, 0.0, 0.0, 0.0]
        long = [chunks, 0.0, wide, self.rows, self.pairs, ids]
        select = short if chosen_in_registers(self.rows, self.pairs, self.width) else long
        score = [chunks, self.rows, self.pairs, flops]
        row = (score if self.kind != "select" else [0.0] * _SCORE) + (
            select if self.kind != "score" else [0.0] * _SELECT
        )
        return [value / self.seconds for value in row]


@dataclass(frozen=True)
class Error:
    """How far predicted times are from measured ones, as shares of the measured ones."""

    shapes: int
    median: float
    worst: float


def error_of(costs: Costs, samples: Sequence[Sample]) -> Error:
    """The model's error on samples. Raises ValueError where there are none."""
    if not samples:
        raise ValueError("samples must not be empty")
    shares = [abs(sample.predicted(costs) / sample.seconds - 1.0) for sample in samples]
    return Error(len(shares), median(shares), max(shares))


def fit(samples: Sequence[Sample]) -> Costs:
    """The device's costs, exchange left out, that come nearest to the samples in the sum of squared relative errors.

    Of all choices of numbers that vanish, the one with the smallest error and nothing negative is taken: there are
    few enough to try each. Where only short or only long rows were measured, a column of the others is taken to
    cost the same.

    Raises:
        ValueError: if scoring or selection was not measured, or a time is not above 0.
    """
    import torch

    kinds = {sample.kind for sample in samples}
    if "step" not in kinds and not {"score", "select"} <= kinds:
        raise ValueError(f"samples must hold scoring and selection, got {sorted(kinds)}")
    if any(not sample.seconds > 0 for sample in samples):
        raise ValueError("every measured time must be above 0")
    matrix = torch.tensor([sample._features() for sample in samples], dtype=torch.float64)
    scale = matrix.abs().amax(dim=0).clamp_min(1e-300)
    wanted = torch.ones(len(samples), 1, dtype=torch.float64)
    seen = [i for i in range(matrix.shape[1]) if bool(matrix[:, i].any())]
    # A device always takes time for these; the others may vanish behind them.
    mandatory = {i for i in (_FLOP, _SHORT, _PAIR) if i in seen}
    best: tuple[float, list[float]] | None = None
    optional = [i for i in seen if i not in mandatory]
    for size in range(len(optional) + 1):
        for chosen in combinations(optional, size):
            columns = sorted(mandatory.union(chosen))
            part = matrix[:, columns] / scale[columns]
            answer = torch.linalg.lstsq(part, wanted, driver="gelsd").solution
            loss = float((part @ answer - wanted).square().sum())
            values = (answer[:, 0] / scale[columns]).tolist()
            good = all(v > 0 if i in mandatory else v >= 0 for i, v in zip(columns, values, strict=True))
            if good and (best is None or loss < best[0]):
                full = [0.0] * matrix.shape[1]
                for column, value in zip(columns, values, strict=True):
                    full[column] = value
                best = (loss, full)
    if best is None:
        raise ValueError("no set of non-negative costs fits the measured times")
    start, row, pair, flop, select_start, short, long, select_row, select_pair, select_id = best[1]
    short, select_pair = short or select_pair, select_pair or short
    # Steps of several chunks are launched several times; the middle one of the shorter half has one chunk.
    launches = sorted(sample.host_s for sample in samples if sample.kind == "step")
    launch = median(launches[: (len(launches) + 1) // 2]) if launches else 0.0
    return Costs(
        launch, start, row, pair, 1.0 / flop, select_start, short, long, select_row, select_pair, select_id_s=select_id
    )


def fit_exchange(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Latency (s) and bandwidth (bytes/s) from (bytes received, seconds) pairs.

    Raises:
        ValueError: if fewer than two different amounts of bytes were measured.
    """
    if len({received for received, _ in samples}) < 2:
        raise ValueError("an exchange must be measured with at least two amounts of bytes")
    if any(not seconds > 0 for _, seconds in samples):
        raise ValueError("every measured time must be above 0")
    # Weighted by 1 / seconds: small and large exchanges count alike.
    rows = [(1.0 / seconds, received / seconds) for received, seconds in samples]
    aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(r[0] for r in rows), sum(r[1] for r in rows)
    determinant = aa * bb - ab * ab
    latency = (a * bb - b * ab) / determinant
    slope = (b * aa - a * ab) / determinant
    if latency < 0:
        latency, slope = 0.0, b / bb
    if slope <= 0:
        # Nothing but latency was seen: the largest exchange bounds the bandwidth from below.
        received, seconds = max(samples)
        latency, slope = min(s for _, s in samples), seconds / received
    return latency, 1.0 / slope
