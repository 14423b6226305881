"""What a step's metadata consists of: the kept buffers, what a backend needs to fill them, and the views."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from portable_indexer.chunks import KeyGroup, groups_of
from portable_indexer.prefill_chunks import PrefillChunks

NO_REQUEST = -1

# So many groups go along with a launch by value; more are read from a table on the device.
INLINE_GROUPS = 16
MAX_REQS = 1 << 24
# Words that are no group: they begin behind every request and every key.
NO_GROUPS = (0x7FFFFFFF << 32 | MAX_REQS + 1,) * INLINE_GROUPS
KEPT_VIEWS = 512


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

    @cached_property
    def _views(self) -> dict[tuple[str, int], torch.Tensor]:
        return {}

    def first(self, name: str, count: int) -> torch.Tensor:
        """The first entries of a buffer. The views of the counts seen last are kept: steps come again."""
        view = self._views.get((name, count))
        if view is None:
            if len(self._views) == KEPT_VIEWS:
                self._views.clear()
            view = self._views[name, count] = getattr(self, name)[:count]
        return view

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
    query_starts: Sequence[int]  # first row of each prefill request, and the end of the last: rows before the padding
    words: tuple[int, ...]  # each group of prefill requests as the kernels take it, see ``group_words``
    longest: int  # most rows or keys of a request that the host expects; a hint
    total_keys: int

    @property
    def groups(self) -> list[KeyGroup]:
        """The groups of prefill requests with their rows and keys."""
        return groups_of(self.words, self.query_starts, self.num_decodes, self.total_keys)


class Lease:
    """One step's right to its builder's buffers, until the builder builds another.

    Args:
        buffers: the buffers.
        generation: how many steps the builder has built, in a list of one that it counts up.
    """

    __slots__ = ("_built", "_generation", "unchecked")

    def __init__(self, buffers: MetadataBuffers, generation: list[int]) -> None:
        self.unchecked, self._generation, self._built = buffers, generation, generation[0]

    @property
    def is_current(self) -> bool:
        return self._generation[0] == self._built

    def buffers(self) -> MetadataBuffers:
        """The buffers; RuntimeError where they hold another step."""
        if self._generation[0] != self._built:
            raise RuntimeError("the builder has built another step since: its buffers hold that one")
        return self.unchecked


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
        lease: Lease,
        layout: StepLayout,
        seq_lens: list[int],
        num_tokens: int,
        rows_by_request: int,
        logits_budget: int,
    ) -> None:
        self._lease, self._layout = lease, layout
        self._rows_by_request = rows_by_request  # rows of every decode request; 0 where they differ
        self._logits_budget = logits_budget
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
        return self._layout.query_starts[0]

    @property
    def num_prefill_tokens(self) -> int:
        return self._layout.query_starts[-1] - self._layout.query_starts[0]

    @property
    def is_current(self) -> bool:
        """Whether the builder has built no other step since."""
        return self._lease.is_current

    @cached_property
    def token_to_req(self) -> torch.Tensor:
        """[num_tokens] int32: the request of each row; 0 in padding."""
        return self._lease.buffers().first("token_to_req", self.num_tokens)

    @cached_property
    def row_keys(self) -> torch.Tensor:
        """[num_tokens] int32: keys that each row may see, decode and prefill alike; 0 in padding."""
        return self._lease.buffers().first("row_keys", self.num_tokens)

    @cached_property
    def cu_seqlen_ks(self) -> torch.Tensor:
        """[num_tokens] int32: first packed key of each prefill row; 0 in decode rows and padding."""
        return self._lease.buffers().first("cu_seqlen_ks", self.num_tokens)

    @cached_property
    def cu_seqlen_ke(self) -> torch.Tensor:
        """[num_tokens] int32: one past the last packed key of each prefill row; 0 elsewhere (no keys)."""
        return self._lease.buffers().first("cu_seqlen_ke", self.num_tokens)

    @cached_property
    def cu_seqlens_q(self) -> torch.Tensor:
        """[num_tokens + 1] int32: 0, 1, 2, ...: boundaries where each row is a sequence by itself."""
        return self._lease.unchecked.first("arange", self.num_tokens + 1)

    @cached_property
    def decode_row_keys(self) -> torch.Tensor:
        """[num_decode_tokens] int32: the decode part of ``row_keys``."""
        return self._lease.buffers().first("row_keys", self.num_decode_tokens)

    @cached_property
    def decode_row_keys_by_request(self) -> torch.Tensor:
        """[num_decodes, next_n] int32: the same by request; ValueError unless each has next_n rows."""
        if not self._rows_by_request:
            raise ValueError("the decode requests of this step do not have next_n rows each")
        return self.decode_row_keys.view(self.num_decodes, self._rows_by_request)

    @property
    def prefill_query_lens(self) -> list[int]:
        """Rows of each prefill request: the planner's input."""
        return [end - start for start, end in itertools.pairwise(self._layout.query_starts)]

    @cached_property
    def chunks(self) -> PrefillChunks:
        """The chunks in order; together they hold every prefill row once. A group without rows has none."""
        self._lease.buffers()
        groups = self._layout.groups if self._layout.words else ()
        return PrefillChunks(groups, self._logits_budget, self._lease)
