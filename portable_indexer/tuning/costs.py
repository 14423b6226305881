"""What a step of the indexer costs on a device: a few numbers and the times that follow from them.

Pure arithmetic on Python numbers, so every rank that holds the same numbers gets the same times. Pairs are
key-row pairs, `sum over rows of max(ke - ks, 0)`; times are seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ID_BYTES = 4
LOGIT_BYTES = 4
SHORT_COLUMNS = 8_192
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


def padded(columns: float) -> int:
    """The power of two that a row of so many columns is padded to."""
    return 1 << max(math.ceil(columns) - 1, 0).bit_length()


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
    Selection: `chunks * select_start_s + rows * k * select_id_s`, and from rows of up to 8,192 columns
    `rows * columns * select_short_s`, the columns rounded up to a power of two; from longer rows
    `chunks * select_long_s + rows * select_row_s + pairs * select_pair_s`.

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
        start = chunks * self.select_start_s + rows * topk * self.select_id_s
        if width <= SHORT_COLUMNS:
            return start + rows * padded(width) * self.select_short_s
        return start + chunks * self.select_long_s + rows * self.select_row_s + pairs * self.select_pair_s

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
