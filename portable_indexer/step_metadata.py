"""What a step's metadata consists of: the kept buffers, what a backend needs to fill them, and the views."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from portable_indexer.chunks import KeyGroup, rows_a_chunk

NO_REQUEST = -1

# So many groups go along with a launch by value; more are read from a table on the device.
INLINE_GROUPS = 16
MAX_REQS = 1 << 24
BEYOND = MAX_REQS + 1
NO_GROUPS = [BEYOND] * INLINE_GROUPS


@dataclass(frozen=True)
class MetadataBuffers:
    """Persistent device memory of one builder, all int32 and contiguous."""

    token_to_req: torch.Tensor  # [max_tokens]
    cu_seqlen_ks: torch.Tensor  # [max_tokens]
    cu_seqlen_ke: torch.Tensor  # [max_tokens]
    row_keys: torch.Tensor  # [max_tokens]
    key_to_req: torch.Tensor  # [max_keys], a group's part begins at its key_base
    key_starts: torch.Tensor  # [2 * max_reqs], request r of group g at r + g, the group's end behind it
    arange: torch.Tensor  # [max_tokens + 1], never written again

    @cached_property
    def written(self) -> tuple[torch.Tensor, ...]:
        """The buffers that every step writes, in the order above."""
        rows = (self.token_to_req, self.cu_seqlen_ks, self.cu_seqlen_ke, self.row_keys)
        return (*rows, self.key_to_req, self.key_starts)

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Where the written buffers are."""
        return tuple(buffer.data_ptr() for buffer in self.written)

    @cached_property
    def max_tokens(self) -> int:
        return self.token_to_req.shape[0]

    @cached_property
    def device(self) -> torch.device:
        return self.token_to_req.device

    @staticmethod
    def allocate(max_tokens: int, max_reqs: int, max_keys: int, device: torch.device) -> MetadataBuffers:
        """Zeroed buffers for these capacities."""

        def zeros(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        # Made under inference_mode, they could not be written outside of it.
        with torch.inference_mode(False):
            return MetadataBuffers(
                token_to_req=zeros(max_tokens),
                cu_seqlen_ks=zeros(max_tokens),
                cu_seqlen_ke=zeros(max_tokens),
                row_keys=zeros(max_tokens),
                key_to_req=zeros(max_keys),
                key_starts=zeros(2 * max_reqs),
                arange=torch.arange(max_tokens + 1, dtype=torch.int32, device=device),
            )


class StepLayout(NamedTuple):
    """The host's side of one step: integers only."""

    num_reqs: int
    num_decodes: int
    compress_ratio: int
    groups: list[KeyGroup]
    num_tokens: int  # rows before the padding that the host expects; a hint, as are the next two
    longest: int  # most rows or keys of a request
    total_keys: int

    def words(self) -> list[int]:
        """Each group as one int64 for a kernel: key_base above, request_start in the low 32 bits.

        At least INLINE_GROUPS words; those that are no group begin beyond every request.
        """
        words = [self.total_keys << 32 | BEYOND] * INLINE_GROUPS
        words[: len(self.groups)] = [group.key_base << 32 | group.request_start for group in self.groups]
        return words


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


class IndexerMetadata:
    """One step's metadata: host integers, and views of the builder's buffers, cut when first asked for.

    The views hold this step's values until the builder's next ``build`` (or the next replay of a graph that
    holds one) on the same stream; after that, asking for a view not yet cut raises RuntimeError.

    Attributes:
        num_tokens: rows of the step, padding included.
        num_decodes, num_decode_tokens: requests and rows of the decode part, which comes first.
        num_prefills, num_prefill_tokens: requests and rows behind it; padding is in neither.
        compress_ratio: tokens for each key.
        prefill_seq_lens: host lengths of the prefill requests in tokens, upper bounds: the planner's input.
    """

    def __init__(
        self,
        buffers: MetadataBuffers,
        layout: StepLayout,
        query_starts: list[int],
        seq_lens: list[int],
        num_tokens: int,
        rows_by_request: int,
        logits_budget: int,
        generation: list[int],
    ) -> None:
        self._buffers, self._layout = buffers, layout
        self._query_starts = query_starts  # of the prefill requests, with the end of the last
        self._rows_by_request = rows_by_request  # rows of every decode request; 0 where they differ
        self._logits_budget = logits_budget
        self._generation, self._built = generation, generation[0]
        self.prefill_seq_lens, self.num_tokens = seq_lens, num_tokens

    @property
    def compress_ratio(self) -> int:
        return self._layout.compress_ratio

    @property
    def num_decodes(self) -> int:
        return self._layout.num_decodes

    @property
    def num_prefills(self) -> int:
        return self._layout.num_reqs - self._layout.num_decodes

    @property
    def num_decode_tokens(self) -> int:
        return self._query_starts[0]

    @property
    def num_prefill_tokens(self) -> int:
        return self._query_starts[-1] - self._query_starts[0]

    @property
    def is_current(self) -> bool:
        """Whether the builder has built no other step since."""
        return self._generation[0] == self._built

    def _held(self) -> MetadataBuffers:
        if not self.is_current:
            raise RuntimeError("the builder has built another step since: its buffers hold that one")
        return self._buffers

    @cached_property
    def token_to_req(self) -> torch.Tensor:
        """[num_tokens] int32: the request of each row; 0 in padding."""
        return self._held().token_to_req[: self.num_tokens]

    @cached_property
    def row_keys(self) -> torch.Tensor:
        """[num_tokens] int32: keys that each row may see, decode and prefill alike; 0 in padding."""
        return self._held().row_keys[: self.num_tokens]

    @cached_property
    def cu_seqlen_ks(self) -> torch.Tensor:
        """[num_tokens] int32: first packed key of each prefill row; 0 in decode rows and padding."""
        return self._held().cu_seqlen_ks[: self.num_tokens]

    @cached_property
    def cu_seqlen_ke(self) -> torch.Tensor:
        """[num_tokens] int32: one past the last packed key of each prefill row; 0 elsewhere (no keys)."""
        return self._held().cu_seqlen_ke[: self.num_tokens]

    @cached_property
    def cu_seqlens_q(self) -> torch.Tensor:
        """[num_tokens + 1] int32: 0, 1, 2, ...: boundaries where each row is a sequence by itself."""
        return self._buffers.arange[: self.num_tokens + 1]

    @cached_property
    def decode_row_keys(self) -> torch.Tensor:
        """[num_decode_tokens] int32: the decode part of ``row_keys``."""
        return self._held().row_keys[: self.num_decode_tokens]

    @cached_property
    def decode_row_keys_by_request(self) -> torch.Tensor:
        """[num_decodes, next_n] int32: the same by request; ValueError unless each has next_n rows."""
        if not self._rows_by_request:
            raise ValueError("the decode requests of this step do not have next_n rows each")
        return self.decode_row_keys.view(self.num_decodes, self._rows_by_request)

    @property
    def prefill_query_lens(self) -> list[int]:
        """Rows of each prefill request: the planner's input."""
        return [end - start for start, end in itertools.pairwise(self._query_starts)]

    @cached_property
    def chunks(self) -> list[PrefillChunk]:
        """The chunks in order; together they hold every prefill row once. A group without rows has none."""
        buffers = self._held()
        chunks = []
        for number, group in enumerate(self._layout.groups):
            request_start, request_end, first, last, base, total = group
            if first == last:
                continue
            size = rows_a_chunk(group, self._logits_budget)
            starts = buffers.key_starts[request_start + number : request_end + number + 1]
            keys = buffers.key_to_req[base : base + total]
            bounds = [buffers.cu_seqlen_ks[first:last]], [buffers.cu_seqlen_ke[first:last]]
            if size < last - first:
                bounds = bounds[0][0].split(size), bounds[1][0].split(size)
            for token, ks, ke in zip(range(first, last, size), *bounds, strict=True):
                end = min(token + size, last)
                chunks.append(
                    PrefillChunk(*(token, end, request_start, request_end, ks, ke, starts, keys, total, token > first))
                )
        return chunks
