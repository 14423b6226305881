"""Which prefill rows each rank scores: integers only, the same on every rank.

Row j of a request sees ``(seq_len - query_len + 1 + j) // compress_ratio`` keys, so the cost of its first j
rows is a sum of floors of an arithmetic series. That sum and its inverse have closed forms: a plan takes one
pass over the requests and one constant-time cut for each rank, however many rows there are.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Protocol

import torch

from portable_indexer._checks import check_integer, describe
from portable_indexer.exchange import Staging, all_gatherv, failure_reported, resolve_group, staging_bytes

try:  # torch can be built without it; plain integers do the same then
    import numpy
except ImportError:
    numpy = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    Lengths = torch.Tensor | Sequence[int]

_INTEGERS = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
# Below this many requests plain integers beat array operations.
_VECTORISE_FROM = 32
# Keeps every intermediate of the vectorised sums inside int64.
_INT64_SAFE = 1 << 61


class Policy(Protocol):
    """What the planner asks of a policy (see ``ShardPolicy``)."""

    def decide(self, *, rows: int, pairs: int, tp_size: int) -> bool: ...


class Chunk(Protocol):
    """A chunk of prefill rows: step rows [token_start, token_end) and the key bounds of those rows."""

    @property
    def token_start(self) -> int: ...
    @property
    def token_end(self) -> int: ...
    @property
    def cu_seqlen_ks(self) -> torch.Tensor: ...
    @property
    def cu_seqlen_ke(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class PrefillRowShard:
    """One rank's part of a step's prefill rows.

    Attributes:
        num_decode_tokens: decode and verify rows that stand before the prefill rows; never sharded.
        sizes: rows of each rank, in rank order; may hold zeros. Their sum is the number of real prefill rows,
            so padded tail rows of a step lie behind every shard.
        rank: this process's rank in the group.

    Raises:
        TypeError, ValueError: a count is negative or no integer, or the rank is not one of ``sizes``.
    """

    num_decode_tokens: int
    sizes: tuple[int, ...]
    rank: int

    def __post_init__(self) -> None:
        if self.sizes is None:
            raise TypeError("sizes is None: such a step is not sharded, so pass shard=None instead")
        sizes = tuple(check_integer(f"sizes[{i}]", size) for i, size in enumerate(self.sizes))
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "num_decode_tokens", check_integer("num_decode_tokens", self.num_decode_tokens))
        object.__setattr__(self, "rank", check_integer("rank", self.rank))
        if self.num_decode_tokens < 0:
            raise ValueError(f"num_decode_tokens must be at least 0, got {self.num_decode_tokens}")
        if any(size < 0 for size in sizes):
            raise ValueError(f"sizes must be at least 0, got {list(sizes)}")
        if not 0 <= self.rank < len(sizes):
            raise ValueError(f"rank must be in [0, {len(sizes)}), one of sizes, got {self.rank}")

    @property
    def start(self) -> int:
        """First step row of this rank."""
        return self.num_decode_tokens + sum(self.sizes[: self.rank])

    @property
    def stop(self) -> int:
        """One past the last step row of this rank."""
        return self.start + self.sizes[self.rank]

    def narrow(self, chunk: Chunk) -> tuple[int, int, torch.Tensor, torch.Tensor] | None:
        """The part of a chunk that this rank scores.

        Args:
            chunk: step rows [token_start, token_end), and their key bounds ``cu_seqlen_ks`` and
                ``cu_seqlen_ke``, each [token_end - token_start].

        Returns:
            (start, end, ks, ke): step rows [start, end) and views of their bounds, or None where this rank
            owns no row of the chunk. Keys must be gathered before this is asked: every rank takes part in
            that.

        Raises:
            ValueError: the bounds do not have one entry for each row of the chunk.
        """
        first, last = chunk.token_start, chunk.token_end
        for name, bounds in (("cu_seqlen_ks", chunk.cu_seqlen_ks), ("cu_seqlen_ke", chunk.cu_seqlen_ke)):
            if bounds.ndim != 1 or bounds.shape[0] != last - first:
                raise ValueError(
                    f"chunk.{name} must be [{last - first}], one entry for each row of "
                    f"[token_start, token_end) = [{first}, {last}), got {list(bounds.shape)}"
                )
        start, end = max(first, self.start), min(last, self.stop)
        if start >= end:
            return None
        part = slice(start - first, end - first)
        return start, end, chunk.cu_seqlen_ks[part], chunk.cu_seqlen_ke[part]

    def check(self, rows: int, group: ProcessGroup | None = None) -> None:
        """Refuse a plan that does not fit a step of ``rows`` rows or the group, before any work is done.

        Raises:
            ValueError: the shards reach past the rows, the group has another size, or this process another
                rank.
        """
        with failure_reported(group):
            end = self.num_decode_tokens + sum(self.sizes)
            if end > rows:
                raise ValueError(
                    f"shard must fit the step's {rows} rows, got {self.num_decode_tokens} decode rows and "
                    f"{sum(self.sizes)} prefill rows"
                )
            _, rank = resolve_group(group, len(self.sizes))
            if rank != self.rank:
                raise ValueError(f"shard.rank must be {rank}, this process's rank in the group, got {self.rank}")

    def run(
        self,
        compute: Callable[[], None],
        buffer: torch.Tensor,
        width: int | None = None,
        *,
        group: ProcessGroup | None = None,
        staging: Staging | None = None,
    ) -> None:
        """Call ``compute``, which fills this rank's rows of ``buffer``, then exchange as ``exchange_topk`` does.

        What ``exchange_topk`` would refuse is refused before ``compute`` is called.

        Under PORTABLE_INDEXER_CHECK=1 an exception in ``compute``, raised here as it was, ends the exchange
        with an error on every other rank too.
        """
        self._exchange(buffer, width, group, staging, None, compute)

    def exchange_topk(
        self,
        buffer: torch.Tensor,
        width: int | None = None,
        *,
        group: ProcessGroup | None = None,
        staging: Staging | None = None,
        algorithm: str | None = None,
    ) -> None:
        """Make every rank's rows of ``buffer`` (int32 ids, [step rows, at least width]) known to all, in
        place.

        Decode rows and padded tail rows stay as they are. Every rank calls it once for each layer, also one
        that owns no row. Arguments and errors as for ``all_gatherv``.
        """
        self._exchange(buffer, width, group, staging, algorithm, None)

    def _exchange(
        self,
        buffer: torch.Tensor,
        width: int | None,
        group: ProcessGroup | None,
        staging: Staging | None,
        algorithm: str | None,
        fill: Callable[[], None] | None,
    ) -> None:
        all_gatherv(
            buffer,
            self.sizes,
            group=group,
            start=self.num_decode_tokens,
            width=width,
            staging=staging,
            algorithm=algorithm,
            rank=self.rank,
            fill=fill,
        )

    def staging_bytes(self, width: int) -> int:
        """Bytes of staging that an exchange of this plan's rows can need."""
        return staging_bytes(sum(self.sizes), width, len(self.sizes))


def balanced_prefill_row_shard(
    seq_lens: Lengths,
    query_lens: Lengths,
    compress_ratio: int,
    tp_size: int,
    min_rows: int | None = None,
    *,
    policy: Policy | None = None,
) -> list[int] | None:
    """Cut the prefill rows of a step into one consecutive shard for each rank, of nearly equal key counts.

    Args:
        seq_lens: tokens of each prefill request after this step, [requests]. Upper bounds will do: they only
            balance. A CPU tensor of any integer dtype, or a sequence of integers.
        query_lens: rows (query tokens) of each request in this step, [requests], likewise.
        compress_ratio: tokens for each key; row j of a request costs
            ``max(0, seq_len - query_len + 1 + j) // compress_ratio`` keys.
        tp_size: ranks.
        min_rows: shard only steps with at least this many prefill rows, counted over all requests and all
            ranks together. None: no such bound.
        policy: asked ``decide(rows=, pairs=, tp_size=)`` with the step's prefill rows and key-row pairs; None
            always shards.

    Returns:
        Rows of each rank, [tp_size], summing to all rows; shards may be empty. The costliest exceeds the
        mean by at most the cost of one row. Where all rows cost nothing they are spread evenly. None where
        the step is not to be sharded: ``tp_size`` below 2, fewer than ``min_rows`` rows, or the policy
        refuses.

    Raises:
        TypeError, ValueError: lengths that are negative, not integers, not on the CPU or of different
            number; a ratio or a number of ranks below 1.
    """
    ratio = check_integer("compress_ratio", compress_ratio)
    ranks = check_integer("tp_size", tp_size)
    if ratio < 1:
        raise ValueError(f"compress_ratio must be at least 1, got {ratio}")
    if ranks < 1:
        raise ValueError(f"tp_size must be at least 1, got {ranks}")
    if min_rows is not None and check_integer("min_rows", min_rows) < 0:
        raise ValueError(f"min_rows must be None or at least 0, got {min_rows}")
    seqs, queries = _lengths("seq_lens", seq_lens), _lengths("query_lens", query_lens)
    if len(seqs) != len(queries):
        raise ValueError(f"seq_lens and query_lens must have one entry a request, got {len(seqs)} and {len(queries)}")
    if ranks < 2:
        return None
    step = _Step(seqs, queries, ratio)
    if min_rows is not None and step.rows < min_rows:
        return None
    if policy is not None and not policy.decide(rows=step.rows, pairs=step.pairs, tp_size=ranks):
        return None
    cuts = [0, *(step.cut(rank, ranks) for rank in range(1, ranks)), step.rows]
    return [stop - start for start, stop in pairwise(cuts)]


def _series(count: int, ratio: int) -> int:
    """Sum of ``x // ratio`` over 0 <= x < count; 0 for a negative count."""
    if count <= 0:
        return 0
    whole, rest = divmod(count, ratio)
    return ratio * (whole * (whole - 1) // 2) + rest * whole


def _series_length(value: int, ratio: int) -> int:
    """The largest count whose series is at most ``value``, which is not negative."""
    whole = (1 + math.isqrt(1 + 4 * (2 * value // ratio))) // 2
    return whole * ratio + (value - ratio * (whole * (whole - 1) // 2)) // whole


def _lengths(name: str, value: Lengths) -> Any:
    """Checked lengths: an int64 numpy array where they are many and numpy is there, else a list."""
    if isinstance(value, torch.Tensor):
        if value.dtype not in _INTEGERS:
            raise TypeError(f"{name} must be of an integer dtype, got {describe(value)}")
        if value.ndim != 1:
            raise ValueError(f"{name} must have 1 dimension, got {describe(value)}")
        if value.device.type != "cpu":
            raise ValueError(f"{name} must be on the CPU (a plan reads no device value), got {describe(value)}")
        if numpy is not None and len(value) >= _VECTORISE_FROM and value.dtype is not torch.uint64:
            array = value.numpy().astype(numpy.int64)
            if (least := int(array.min())) < 0:
                raise ValueError(f"{name} must be at least 0, got {least}")
            return array
        value = value.tolist()
    elif isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a CPU integer tensor or a sequence of integers, got {type(value).__name__}")
    values = list(value)
    if not set(map(type, values)) <= {int}:
        values = [check_integer(f"{name}[{i}]", entry) for i, entry in enumerate(values)]
    if values and min(values) < 0:
        raise ValueError(f"{name} must be at least 0, got {min(values)}")
    if numpy is not None and len(values) >= _VECTORISE_FROM and max(values) < _INT64_SAFE:
        return numpy.array(values, dtype=numpy.int64)
    return values


class _Step:
    """The rows of a step in request order, as a cost that grows with the row.

    The per-request columns are numpy arrays or lists; single entries are taken out of them as plain integers.
    """

    def __init__(self, seqs: Any, queries: Any, ratio: int) -> None:
        self._ratio = ratio
        self._firsts: Any
        self._row_ends: Any
        self._cost_ends: Any
        if numpy is not None and _fits(seqs, queries, ratio):
            ends = seqs + 1
            # Keys of each request's first row before division; may be negative.
            self._firsts = ends - queries
            costs = _series_of_all(ends, ratio) - _series_of_all(numpy.maximum(self._firsts, 0), ratio)
            # Rows and costs of all requests before each one and, last, of all.
            self._row_ends, self._cost_ends = numpy.zeros((2, len(seqs) + 1), dtype=numpy.int64)
            queries.cumsum(out=self._row_ends[1:])
            costs.cumsum(out=self._cost_ends[1:])
        else:
            spans = [(int(seq) + 1, int(query)) for seq, query in zip(seqs, queries, strict=True)]
            self._firsts = [end - query for end, query in spans]
            self._row_ends = [0, *accumulate(query for _, query in spans)]
            each = (_series(end, ratio) - _series(end - query, ratio) for end, query in spans)
            self._cost_ends = [0, *accumulate(each)]
        self.rows, self.pairs = int(self._row_ends[-1]), int(self._cost_ends[-1])

    def cut(self, rank: int, ranks: int) -> int:
        """First row of a rank: where the cost so far is nearest to its share of the cost.

        Of several such rows, the one nearest to its share of the rows. Cuts grow with the rank.
        """
        share, even = rank * self.pairs, rank * self.rows // ranks
        row, cost = self._last(share // ranks)
        if row < self.rows:
            following = cost + self._row_cost(row)
            # In whole units of 1 / ranks: is the share nearer to the next row's end than to its start?
            if ranks * following - share < share - ranks * cost:
                row, cost = row + 1, following
        if row < even and not self._row_cost(row):
            return min(even, self._last(cost)[0])
        if even < row and not self._row_cost(row - 1):
            return max(even, self._last(cost - 1)[0] + 1 if cost else 0)
        return row

    def _last(self, cost: int) -> tuple[int, int]:
        """The largest number of rows that cost at most ``cost`` together, and what they cost."""
        request = bisect_right(self._cost_ends, cost) - 1
        start, spent = int(self._row_ends[request]), int(self._cost_ends[request])
        if request == len(self._firsts):
            return start, spent
        first = int(self._firsts[request])
        base = _series(first, self._ratio)
        rows = _series_length(cost - spent + base, self._ratio) - first
        return start + rows, spent + _series(first + rows, self._ratio) - base

    def _row_cost(self, row: int) -> int:
        """Keys of one row."""
        request = bisect_right(self._row_ends, row) - 1
        return max(0, int(self._firsts[request]) + row - int(self._row_ends[request])) // self._ratio


def _fits(seqs: Any, queries: Any, ratio: int) -> bool:
    """Whether both are arrays, and every intermediate of the vectorised sums stays inside int64."""
    if isinstance(seqs, list) or isinstance(queries, list):
        return False
    longest, most = int(seqs.max()) + 1, int(queries.max())
    return longest * (longest + ratio) <= _INT64_SAFE and len(seqs) * most * longest <= _INT64_SAFE


def _series_of_all(counts: Any, ratio: int) -> Any:
    """``_series`` of int64 counts, none negative."""
    if ratio == 1:
        return counts * (counts - 1) >> 1
    whole = counts // ratio
    # ratio * whole * (whole - 1) / 2 + whole * (counts - ratio * whole), over one denominator
    return whole * (2 * counts - ratio * (whole + 1)) >> 1
