"""A step's prefill chunks: what a consumer loops over, each cut out of the kept buffers when it is reached."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, overload

import torch

from portable_indexer.chunks import KeyGroup, rows_a_chunk

if TYPE_CHECKING:
    from portable_indexer.step_metadata import Lease

# Chunks of a group that are cut together: cheaper than one by one, and the first is soon at hand.
CUT_TOGETHER = 32


class PrefillChunk(NamedTuple):
    """Rows whose logits fit the budget and whose keys lie in one gathered workspace.

    Attributes:
        token_start, token_end: rows of the step.
        request_start, request_end: requests whose keys the workspace holds.
        cu_seqlen_ks, cu_seqlen_ke: [token_end - token_start] int32, first and one past the last packed key
            of each row; packed keys begin at 0 in each workspace.
        key_starts: [request_end - request_start + 1] int32, where each request's packed keys begin, and
            the end of the last one's.
        key_to_req: [total_keys] int32, the request of each packed key, numbered as in the step; -1 from the
            end of the device's lengths to the host's.
        total_keys: packed keys that the host expects, an upper bound.
        skip_kv_gather: the chunk before has gathered the same keys.
    """

    token_start: int
    token_end: int
    request_start: int
    request_end: int
    cu_seqlen_ks: torch.Tensor
    cu_seqlen_ke: torch.Tensor
    key_starts: torch.Tensor
    key_to_req: torch.Tensor
    total_keys: int
    skip_kv_gather: bool

    @property
    def num_reqs(self) -> int:
        return self.request_end - self.request_start


class PrefillChunks(Sequence[PrefillChunk]):
    """The chunks of a step in order; each is cut when first asked for, and kept.

    Where rows are cut was settled by ``build``. The builder's next ``build`` overwrites the buffers: after that, asking
    for a chunk not yet cut raises RuntimeError.
    """

    def __init__(self, groups: Sequence[KeyGroup], logits_budget: int, lease: Lease) -> None:
        self._groups, self._lease = groups, lease
        self._sizes: list[int] = []  # rows of each group's chunks
        self._begins = [0]  # number of each group's first chunk, then of all chunks
        for group in groups:
            size = rows_a_chunk(group, logits_budget)
            self._sizes.append(size)
            self._begins.append(self._begins[-1] - (group.token_start - group.token_end) // size)
        self._keys: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by group
        self._chunks: list[PrefillChunk | None] = [None] * self._begins[-1]

    def __len__(self) -> int:
        return len(self._chunks)

    @overload
    def __getitem__(self, index: int) -> PrefillChunk: ...
    @overload
    def __getitem__(self, index: slice) -> list[PrefillChunk]: ...
    def __getitem__(self, index: int | slice) -> PrefillChunk | list[PrefillChunk]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        chunk = self._chunks[index]
        return chunk if chunk is not None else self._cut(range(len(self))[index])

    def __iter__(self) -> Iterator[PrefillChunk]:
        for number, chunk in enumerate(self._chunks):
            yield chunk if chunk is not None else self._cut(number)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(<{len(self)} chunks>)"

    def _cut(self, wanted: int) -> PrefillChunk:
        """Cut a chunk, and those of its group that are cut together with it."""
        buffers, at = self._lease.buffers(), bisect_right(self._begins, wanted) - 1
        request_start, request_end, first, last, base, total = self._groups[at]
        keys = self._keys.get(at)
        if keys is None:
            key_starts = buffers.key_starts[request_start + at : request_end + at + 1]
            keys = self._keys[at] = key_starts, buffers.key_to_req[base : base + total]
        size, number = self._sizes[at], wanted - self._begins[at]
        number -= number % CUT_TOGETHER
        begin, start = self._begins[at] + number, first + number * size
        count = min(CUT_TOGETHER, self._begins[at + 1] - begin)
        end = min(start + count * size, last)
        all_ks: Sequence[torch.Tensor] = [buffers.cu_seqlen_ks[start:end]]
        all_ke: Sequence[torch.Tensor] = [buffers.cu_seqlen_ke[start:end]]
        if count > 1:
            rows = [size] * (count - 1) + [end - start - size * (count - 1)]
            all_ks, all_ke = all_ks[0].split_with_sizes(rows), all_ke[0].split_with_sizes(rows)
        cut, token = [], start
        for ks, ke in zip(all_ks, all_ke, strict=True):
            stop = min(token + size, end)
            cut.append(PrefillChunk(token, stop, request_start, request_end, ks, ke, *keys, total, token > first))
            token = stop
        self._chunks[begin : begin + count] = cut
        return cut[wanted - begin]
