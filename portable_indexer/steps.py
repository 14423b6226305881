"""A server's scheduler on lengths alone: which rows of which requests every step computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from portable_indexer.traces import Request

DEFAULT_MAX_BATCHED_TOKENS = 8192


@dataclass(frozen=True)
class Step:
    """One forward pass: first a row for each decoding request, then the prefill chunks, in this order.

    Lengths are in tokens. `seq_lens` count a request's keys including the rows of this step, so row j of a
    prefill chunk sees seq_len - query_len + 1 + j keys and a decode row sees all seq_len of them.
    `*_requests` are positions in the sequence given to `schedule`.
    """

    index: int
    decode_seq_lens: tuple[int, ...]
    prefill_seq_lens: tuple[int, ...]
    prefill_query_lens: tuple[int, ...]
    decode_requests: tuple[int, ...] = ()
    prefill_requests: tuple[int, ...] = ()

    @property
    def num_decode_rows(self) -> int:
        return len(self.decode_seq_lens)

    @property
    def num_prefill_rows(self) -> int:
        return sum(self.prefill_query_lens)

    @property
    def num_rows(self) -> int:
        return self.num_decode_rows + self.num_prefill_rows

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Keys of every request of the step, decoding ones first."""
        return self.decode_seq_lens + self.prefill_seq_lens

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Rows of every request of the step, decoding ones first."""
        return (1,) * self.num_decode_rows + self.prefill_query_lens

    def decode_pairs(self, compress_ratio: int = 1) -> int:
        """Key-row pairs that the decode rows score, with one key for each `compress_ratio` tokens."""
        return sum(seq_len // compress_ratio for seq_len in self.decode_seq_lens)

    def prefill_pairs(self, compress_ratio: int = 1) -> int:
        """Key-row pairs that the prefill rows score, with one key for each `compress_ratio` tokens."""
        return sum(
            _floor_sum(seq_len, compress_ratio) - _floor_sum(seq_len - query_len, compress_ratio)
            for seq_len, query_len in zip(self.prefill_seq_lens, self.prefill_query_lens, strict=True)
        )

    def shard_pairs(self, sizes: Sequence[int], compress_ratio: int = 1) -> list[int]:
        """Key-row pairs of each shard, where the prefill rows are cut into consecutive shards of `sizes` rows.

        Raises ValueError where the sizes are not exactly the step's prefill rows.
        """
        if sum(sizes) != self.num_prefill_rows or min(sizes, default=0) < 0:
            raise ValueError(f"sizes must sum to the step's {self.num_prefill_rows} prefill rows, got {sizes}")
        pairs = [0] * len(sizes)
        chunks = iter(zip(self.prefill_seq_lens, self.prefill_query_lens, strict=True))
        first = left = 0  # keys before the chunk's next row, and its rows not yet in a shard
        for rank, size in enumerate(sizes):
            while size:
                if not left:
                    seq_len, left = next(chunks)
                    first = seq_len - left
                    continue
                rows = min(size, left)
                pairs[rank] += _floor_sum(first + rows, compress_ratio) - _floor_sum(first, compress_ratio)
                first, left, size = first + rows, left - rows, size - rows
        return pairs

    def key_row_pairs(self, compress_ratio: int = 1) -> int:
        """Key-row pairs of the whole step, an exact integer."""
        return self.decode_pairs(compress_ratio) + self.prefill_pairs(compress_ratio)


def _floor_sum(n: int, divisor: int) -> int:
    """Sum of i // divisor for i in 0..n."""
    whole, rest = divmod(n + 1, divisor)
    return divisor * (whole * (whole - 1) // 2) + whole * rest


def schedule(
    requests: Sequence[Request],
    max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
    *,
    max_running: int | None = None,
    prefix_cache: bool = False,
    step_seconds: Callable[[Step], float] | None = None,
) -> Iterator[Step]:
    """Runs the requests through continuous batching with chunked prefill; yields the steps one by one.

    A step has at most `max_batched_tokens` rows. Running requests decode first, one row each, the oldest
    first; what is left of the budget goes to prompts in the order of arrival, the last of which may be cut
    into chunks. The last chunk of a prompt yields the first output token, so a request decodes
    output_tokens - 1 rows.

    max_running   most requests started and not finished at a time; None: as many as the budget carries
    prefix_cache  reuse whole blocks of equal leading `hash_ids` computed by earlier steps; the store never
                  evicts. `Request.cached_tokens` counts with or without it.
    step_seconds  how long a step takes; a request then joins no step that starts before its arrival. None:
                  all requests wait from the start, as on a saturated server.

    Raises ValueError for limits below 1 or a duration that is negative or not a number.
    """
    if max_batched_tokens < 1:
        raise ValueError(f"max_batched_tokens must be 1 or more, got {max_batched_tokens}")
    if max_running is not None and max_running < 1:
        raise ValueError(f"max_running must be 1 or more, or None, got {max_running}")
    return _Scheduler(requests, max_batched_tokens, max_running, prefix_cache, step_seconds).steps()


@dataclass
class _Running:
    """A started request: `done` tokens have their keys stored; `end` is `done` after its last row."""

    position: int
    request: Request
    done: int

    @property
    def end(self) -> int:
        return self.request.input_tokens + max(self.request.output_tokens - 1, 0)

    @property
    def prompt_left(self) -> int:
        return max(self.request.input_tokens - self.done, 0)


class _Scheduler:
    def __init__(
        self,
        requests: Sequence[Request],
        budget: int,
        max_running: int | None,
        prefix_cache: bool,
        step_seconds: Callable[[Step], float] | None,
    ) -> None:
        order = sorted(range(len(requests)), key=lambda i: requests[i].arrival_s)
        self.waiting = deque((i, requests[i]) for i in order)
        self.running: list[_Running] = []
        self.budget = budget
        self.max_running = max_running
        self.prefix_cache = prefix_cache
        self.step_seconds = step_seconds
        self.stored: set[tuple[int, int]] = set()  # (block_tokens, hash id) of blocks with keys
        self.clock = 0.0

    def steps(self) -> Iterator[Step]:
        index = 0
        while self.waiting or self.running:
            if not self.running and self.step_seconds is not None:
                self.clock = max(self.clock, self.waiting[0][1].arrival_s)
            step = self._step(index)
            yield step
            index += 1
            if self.step_seconds is not None:
                seconds = self.step_seconds(step)
                if not 0 <= seconds < float("inf"):
                    raise ValueError(f"step_seconds must return a duration of 0 or more, got {seconds}")
                self.clock += seconds

    def _step(self, index: int) -> Step:
        decoding = [r for r in self.running if r.prompt_left == 0][: self.budget]
        left = self.budget - len(decoding)
        chunks: list[tuple[_Running, int]] = []
        for request in [r for r in self.running if r.prompt_left > 0]:
            if left == 0:
                break
            left -= self._take(request, left, chunks)
        while left and self._may_start():
            request = self._start()
            left -= self._take(request, left, chunks)
        for request, rows in chunks:
            request.done += rows
            self._store(request)
        for request in decoding:
            request.done += 1
        step = Step(
            index,
            decode_seq_lens=tuple(r.done for r in decoding),
            prefill_seq_lens=tuple(r.done for r, _ in chunks),
            prefill_query_lens=tuple(rows for _, rows in chunks),
            decode_requests=tuple(r.position for r in decoding),
            prefill_requests=tuple(r.position for r, _ in chunks),
        )
        self.running = [r for r in self.running if r.done < r.end]
        return step

    @staticmethod
    def _take(request: _Running, left: int, chunks: list[tuple[_Running, int]]) -> int:
        rows = min(request.prompt_left, left)
        chunks.append((request, rows))
        return rows

    def _may_start(self) -> bool:
        if not self.waiting or (self.max_running is not None and len(self.running) >= self.max_running):
            return False
        return self.step_seconds is None or self.waiting[0][1].arrival_s <= self.clock

    def _start(self) -> _Running:
        position, request = self.waiting.popleft()
        started = _Running(position, request, max(request.cached_tokens, self._cached(request)))
        self.running.append(started)
        return started

    def _cached(self, request: Request) -> int:
        """Tokens of the whole leading blocks that are stored; at least one token is left to compute."""
        if not self.prefix_cache:
            return 0
        size = request.block_tokens
        usable = request.hash_ids[: (request.input_tokens - 1) // size]
        for count, block in enumerate(usable):
            if (size, block) not in self.stored:
                return count * size
        return len(usable) * size

    def _store(self, request: _Running) -> None:
        if self.prefix_cache:
            size = request.request.block_tokens
            whole = min(request.done, request.request.input_tokens) // size
            self.stored.update((size, block) for block in request.request.hash_ids[:whole])
