"""A step's prefill chunks: what a consumer loops over, each cut out of the kept buffers when it is reached."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, overload

import torch

from portable_indexer.chunks import KeyGroup, rows_a_chunk

if TYPE_CHECKING:
    from portable_indexer.step_metadata import Lease

# Chunks of a group that are cut together: cheaper than one by one, and the first is soon at hand.
CUT_TOGETHER = 64


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
        self._tokens: list[int] = []  # first row of each chunk, and the end of the last
        self._owners: list[int] = []  # number of each chunk's group
        for number, group in enumerate(groups):
            starts = range(group.token_start, group.token_end, rows_a_chunk(group, logits_budget))
            self._tokens += starts
            self._owners += [number] * len(starts)
        if groups:
            self._tokens.append(groups[-1].token_end)
        self._keys: list[tuple[torch.Tensor, torch.Tensor]] = []  # of each group
        self._chunks: list[PrefillChunk | None] = [None] * len(self._owners)

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
        """Cut a chunk and its neighbours: rows, keys and requests of one follow those of the one before."""
        buffers, groups = self._lease.buffers(), self._groups
        if not self._keys:
            counts = [group.request_end - group.request_start + 1 for group in groups]
            key_starts = _parts(buffers.key_starts, groups[0].request_start, counts)
            key_to_req = _parts(buffers.key_to_req, 0, [group.total_keys for group in groups])
            self._keys = list(zip(key_starts, key_to_req, strict=True))
        begin = wanted - wanted % CUT_TOGETHER
        tokens, owners = self._tokens[begin : begin + CUT_TOGETHER + 1], self._owners[begin : begin + CUT_TOGETHER]
        rows = list(map(operator.sub, tokens[1:], tokens))
        all_ks, all_ke = (_parts(bound, tokens[0], rows) for bound in (buffers.cu_seqlen_ks, buffers.cu_seqlen_ke))
        cut = []
        for owner, token, end, ks, ke in zip(owners, tokens, tokens[1:], all_ks, all_ke, strict=False):
            request_start, request_end, first, _, _, total = groups[owner]
            keys = self._keys[owner]
            cut.append(PrefillChunk(token, end, request_start, request_end, ks, ke, *keys, total, token > first))
        self._chunks[begin : begin + len(cut)] = cut
        return cut[wanted - begin]


def _parts(whole: torch.Tensor, begin: int, sizes: list[int]) -> Sequence[torch.Tensor]:
    """Neighbouring parts of these sizes."""
    part = whole[begin : begin + sum(sizes)]
    return part.split_with_sizes(sizes) if len(sizes) > 1 else (part,)
