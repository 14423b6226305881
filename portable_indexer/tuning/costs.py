"""What a step of the indexer costs on a device: a few numbers and the times that follow from them.

Pure arithmetic on Python numbers, so every rank that holds the same numbers gets the same times. Pairs are
key-row pairs, `sum over rows of max(ke - ks, 0)`; times are seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ID_BYTES = 4
LOGIT_BYTES = 4
# Rows of up to so many columns are chosen in registers, and so are rows of up to half as many keys in wider steps.
SHORT_COLUMNS = 16_384
# What `index_topk` lets the logits of one chunk of rows take, unless PORTABLE_INDEXER_LOGITS_MB says otherwise.
CHUNK_BYTES = 512 << 20
# Columns of logits are allocated by so many.
_PITCH = 64


def width_of(rows: float, pairs: float, compress_ratio: int = 1) -> float:
    """Columns of a step's logits, judged by its rows and pairs: exact for the last rows of one causal request.

    With `compress_ratio` tokens for each key, so many rows see one more key than the rows before.
    """
    return pairs / rows + (rows - 1) / (2 * compress_ratio) if rows else 0.0


def largest_shard(rows: float, pairs: float, ranks: int, compress_ratio: int = 1) -> float:
    """Rows of the first of `ranks` shards with equal pairs: the largest, since its rows have the fewest keys.

    Judged as `width_of` does, exact for one causal request.
    """
    before = max(width_of(rows, pairs, compress_ratio) - rows / compress_ratio, 0.0)
    first = compress_ratio * (math.sqrt(before**2 + 2 * pairs / (ranks * compress_ratio)) - before)
    return min(max(first, rows / ranks), rows)


def chosen_in_registers(rows: float, pairs: float, width: float) -> bool:
    """Whether a step's rows are chosen in registers, each alone."""
    return width <= SHORT_COLUMNS or pairs <= rows * (SHORT_COLUMNS / 2)


def register_columns(rows: float, pairs: float, width: float, topk: int) -> float:
    """Columns, summed over rows, that programs hold which choose rows in registers.

    A program holds the step's columns, rounded up to a power of two, or in wider steps 8,192, and more where k or the
    width is large, which is not counted here. A row of up to `topk` keys takes none of it, one of up to half of it that
    half, and a longer one the whole. Rows' lengths are taken to spread evenly, up to `width` where their mean allows.
    """
    if not rows:
        return 0.0
    block = 1 << max(math.ceil(width) - 1, 0).bit_length() if width <= SHORT_COLUMNS else SHORT_COLUMNS // 2
    mean = pairs / rows
    least = max(2 * mean - width, 0.0)
    most = 2 * mean - least

    def longer_than(keys: float) -> float:
        if most <= least:
            return rows if most > keys else 0.0
        return rows * min(max((most - keys) / (most - least), 0.0), 1.0)

    whole = longer_than(max(block / 2, topk))
    return block / 2 * (longer_than(topk) - whole) + block * whole


def chunks_of(rows: float, columns: float, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Chunks of rows, one after the other, into which `index_topk` cuts a step of so many columns of logits."""
    row_bytes = LOGIT_BYTES * _PITCH * max(math.ceil(columns / _PITCH), 1)
    return max(math.ceil(rows / max(chunk_bytes // row_bytes, 1)), 1)


@dataclass(frozen=True)
class Exchange:
    """All-gather of uneven row blocks among `ranks` ranks.

    The device's time is latency_s + (bytes a rank receives from others) / bandwidth. `launch_s` is the host's, None
    where it is not known.
    """

    ranks: int
    latency_s: float
    bandwidth: float
    launch_s: float | None = None


@dataclass(frozen=True)
class Costs:
    """Times of scoring, selection and exchange on one device.

    `launch_s` is the host's: it takes that long to launch a step's kernels, so a shorter step gains nothing from
    being shorter. All others are the device's.

    A step is scored and chosen in chunks of rows (see `chunks_of`), each of which starts anew.
    Scoring: `chunks * score_start_s + rows * score_row_s + pairs * (score_pair_s + 2 * H * D / score_flops)`.
    Selection: `chunks * select_start_s`, in steps of more than 16,384 columns `chunks * select_long_s` more; for rows
    chosen in registers (see `register_columns`) `columns * select_short_s`, for others
    `rows * (select_row_s + k * select_id_s) + pairs * select_pair_s`.

    `exchange` holds one entry for each number of ranks that is known; other numbers have no predicted time.
    """

    launch_s: float
    score_start_s: float
    score_row_s: float
    score_pair_s: float
    score_flops: float
    select_start_s: float
    select_short_s: float
    select_long_s: float
    select_row_s: float
    select_pair_s: float
    exchange: tuple[Exchange, ...] = ()
    select_id_s: float = 0.0

    def score_s(self, rows: float, pairs: float, num_heads: int, head_dim: int, chunks: int = 1) -> float:
        """Seconds to score `pairs` key-row pairs in `rows` rows."""
        per_pair = self.score_pair_s + 2.0 * num_heads * head_dim / self.score_flops
        return chunks * self.score_start_s + rows * self.score_row_s + pairs * per_pair

    def select_s(self, rows: float, pairs: float, width: float, topk: int = 0, chunks: int = 1) -> float:
        """Seconds to choose the `topk` best in each of `rows` rows of `width` columns that hold `pairs` scores."""
        start = chunks * self.select_start_s
        if width > SHORT_COLUMNS:
            start += chunks * self.select_long_s
        if chosen_in_registers(rows, pairs, width):
            return start + register_columns(rows, pairs, width, topk) * self.select_short_s
        each = self.select_row_s + topk * self.select_id_s
        return start + rows * each + pairs * self.select_pair_s

    def exchange_s(self, rows: int, width: int, ranks: int) -> float | None:
        """Seconds for `ranks` ranks to collect `rows` x `width` int32 ids; None where that is not known."""
        entry = self.exchange_among(ranks)
        if entry is None:
            return None
        received = rows * width * ID_BYTES * (ranks - 1) / ranks
        return entry.latency_s + received / entry.bandwidth

    def exchange_among(self, ranks: int) -> Exchange | None:
        """The entry for so many ranks."""
        return next((entry for entry in self.exchange if entry.ranks == ranks), None)
