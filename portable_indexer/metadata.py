"""The indexer's metadata: which request each row belongs to, which keys it may see, how rows are chunked.

Everything that a kernel reads comes from the device's own boundaries and lengths, by one launch a step, so a
captured graph replays right after they change. The host's lengths only shape chunks, and may be upper bounds.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from portable_indexer._checks import check_integer, check_layout, describe
from portable_indexer.backend import Backend, Problem
from portable_indexer.chunks import LOGIT_BYTES, group_words
from portable_indexer.device import detect
from portable_indexer.group_table import GroupTable
from portable_indexer.prefill_chunks import PrefillChunk, PrefillChunks
from portable_indexer.registry import resolve
from portable_indexer.step_metadata import INLINE_GROUPS, MAX_REQS, IndexerMetadata, Lease, MetadataBuffers, StepLayout
from portable_indexer.workspace import DEFAULT_LOGITS_MB

__all__ = ["IndexerMetadata", "IndexerMetadataBuilder", "PrefillChunk", "PrefillChunks", "token_to_req_indices"]

MAX_TOKENS = 1 << 30
KEPT_DECODES = 256

HostIntegers = torch.Tensor | Sequence[int]


@lru_cache(maxsize=64)
def _backend(device: torch.device, backend: str | None) -> Backend:
    """The backend of a device, resolved once: a step has no time to ask again."""
    return resolve(detect(device), Problem("token_to_req_indices", device), backend)


def _is_vector(tensor: Any) -> bool:
    """Whether this is a contiguous int32 vector."""
    right = isinstance(tensor, torch.Tensor) and tensor.dtype is torch.int32 and tensor.ndim == 1
    return right and tensor.is_contiguous()


def _refusal(name: str, tensor: Any, sizes: str, device: torch.device | None = None) -> Exception:
    """The error for what is no contiguous int32 vector of such a size, on the device."""
    try:
        check_layout(name, tensor, 1)
    except (TypeError, ValueError) as error:
        return error
    where = "" if device is None else f" on {device}"
    return ValueError(f"{name} must be int32 {sizes}{where}, got {describe(tensor)}")


def token_to_req_indices(
    query_start_loc: torch.Tensor,
    num_tokens: int,
    *,
    out: torch.Tensor | None = None,
    pad_value: int = 0,
    backend: str | None = None,
) -> torch.Tensor:
    """The request of each token, from device boundaries alone: no synchronisation, fit for graph capture.

    Args:
        query_start_loc: [requests + 1] int32, contiguous: first token of each request, then the end of the
            last; not decreasing, from 0 on. Requests without tokens may stand anywhere. Read on the device at run time.
        num_tokens: tokens of the step, padding included.
        out: [at least num_tokens] int32, contiguous; all of it is written, so nothing of a longer step
            stays. Allocated where None.
        pad_value: written for tokens behind the last request's end.
        backend: name of a backend; where None, ``resolve`` chooses.

    Returns:
        [num_tokens] int32: a slice of ``out``, or a new tensor.

    Raises:
        TypeError, ValueError: an argument is not as above; nothing is written then.
    """
    if not (_is_vector(query_start_loc) and query_start_loc.numel()):
        raise _refusal("query_start_loc", query_start_loc, "[at least 1]")
    device = query_start_loc.device
    num_tokens = num_tokens if type(num_tokens) is int else check_integer("num_tokens", num_tokens)
    if not 0 <= num_tokens <= MAX_TOKENS:
        raise ValueError(f"num_tokens must be from 0 to {MAX_TOKENS}, got {num_tokens}")
    pad_value = pad_value if type(pad_value) is int else check_integer("pad_value", pad_value)
    if not -0x80000000 <= pad_value <= 0x7FFFFFFF:
        raise ValueError(f"pad_value must fit int32, got {pad_value}")
    chosen = _backend(device, backend)
    if out is None:
        out = torch.empty(num_tokens, dtype=torch.int32, device=device)
    elif not (_is_vector(out) and out.numel() >= num_tokens and out.device == device):
        raise _refusal("out", out, f"[at least {num_tokens}]", device)
    chosen.token_to_req_indices(query_start_loc, out, pad_value)
    return out if out.numel() == num_tokens else out[:num_tokens]


class IndexerMetadataBuilder:
    """Builds each step's metadata into buffers that stay: one launch, no allocation, no synchronisation.

    A builder serves one stream. Its buffers are overwritten by each ``build``, in stream order: what other
    streams still read of a step must be waited for by the caller. Two builders share nothing.

    Args:
        max_tokens: rows of the largest step, padding included.
        max_reqs: requests of the largest step.
        max_keys: packed keys of all prefill requests of a step together, in the keys' unit.
        compress_ratio: tokens for each key: a request of s tokens has s // compress_ratio keys.
        next_n: most rows of a decode or verify request.
        device: where the buffers are.
        backend: name of a backend; where None, ``resolve`` chooses.

    Raises:
        TypeError, ValueError: a capacity is out of range, or the backend cannot serve.
    """

    def __init__(
        self,
        max_tokens: int,
        max_reqs: int,
        max_keys: int,
        *,
        compress_ratio: int = 1,
        next_n: int = 1,
        device: torch.device | str,
        backend: str | None = None,
    ) -> None:
        capacities = (
            ("max_tokens", max_tokens, 1, MAX_TOKENS),
            ("max_reqs", max_reqs, 1, MAX_REQS),
            ("max_keys", max_keys, 0, MAX_TOKENS),
            ("compress_ratio", compress_ratio, 1, MAX_TOKENS),
            ("next_n", next_n, 1, MAX_TOKENS),
        )
        for name, value, least, most in capacities:
            if not least <= check_integer(name, value) <= most:
                raise ValueError(f"{name} must be from {least} to {most}, got {value}")
        self.device = torch.empty(0, device=device).device
        self.max_tokens, self.max_reqs, self.max_keys = max_tokens, max_reqs, max_keys
        self.compress_ratio, self.next_n = compress_ratio, next_n
        self._backend = _backend(self.device, backend)
        self._buffers = MetadataBuffers.allocate(max_tokens, max_reqs, max_keys, self.device)
        self._table = GroupTable(max_reqs, self.device)
        # First rows where all requests decode next_n rows, for as many as fit; and what is kept of such steps, by
        # the number of requests: a slice of those, and the layout.
        most = min(max_reqs, max_tokens // next_n)
        self._uniform = torch.arange(0, most * next_n + 1, next_n, dtype=torch.int32)
        self._decodes: dict[int, tuple[torch.Tensor, StepLayout]] = {}
        self._generation = [0]
        # A step without requests: compiles and loads what a captured build needs.
        nothing = torch.zeros(1, dtype=torch.int32, device=self.device)
        empty = StepLayout(0, 0, compress_ratio, (0,), (), 0, 0)
        self._backend.build_metadata(nothing, nothing[:0], empty, self._buffers, None)

    def build(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        query_start_loc_cpu: HostIntegers,
        seq_lens_cpu: HostIntegers,
        num_decodes: int = 0,
        num_tokens: int | None = None,
        logits_budget: int = DEFAULT_LOGITS_MB << 20,
        key_budget: int | None = None,
    ) -> IndexerMetadata:
        """Launch the step's metadata and return its description.

        Args:
            query_start_loc: [requests + 1] int32 on the device: first row of each request, then the end of
                the last; not decreasing. Requests without rows may stand anywhere.
            seq_lens: [requests] int32 on the device, in tokens, this step's included. Row j of a request of
                n rows sees (seq_len - n + 1 + j) // compress_ratio keys, never fewer than 0.
            query_start_loc_cpu, seq_lens_cpu: the same on the host. They size and cut chunks, and nothing
                else: lengths may be upper bounds, keys that the device does not have are marked -1 in
                ``key_to_req``. Where chunks end between requests, both sides must agree on the rows there.
            num_decodes: requests at the front that decode or verify; they have no packed keys.
            num_tokens: rows of the step where padding follows the last request's.
            logits_budget: bytes that one chunk's rows x keys float32 logits may take.
            key_budget: packed keys that one gather may hold; ``max_keys`` where None.

        Raises:
            TypeError, ValueError: an argument is not as above or exceeds a capacity; nothing is launched
                then, and the last step's metadata stays.
            RuntimeError: inside graph capture, with more groups of requests than a launch takes by value.
        """
        device, num_reqs = self.device, _size(seq_lens_cpu)
        right = _is_vector(query_start_loc) and query_start_loc.numel() == num_reqs + 1
        if not right or query_start_loc.device != device:
            raise _refusal("query_start_loc", query_start_loc, f"[{num_reqs + 1}]", device)
        if not (_is_vector(seq_lens) and seq_lens.numel() == num_reqs and seq_lens.device == device):
            raise _refusal("seq_lens", seq_lens, f"[{num_reqs}]", device)
        if _size(query_start_loc_cpu) != num_reqs + 1 or num_reqs > self.max_reqs:
            raise ValueError(
                f"query_start_loc_cpu must have one entry more than seq_lens_cpu, and that at most "
                f"max_reqs = {self.max_reqs}, got {_size(query_start_loc_cpu)} and {num_reqs}"
            )
        num_decodes = num_decodes if type(num_decodes) is int else check_integer("num_decodes", num_decodes)
        logits_budget = logits_budget if type(logits_budget) is int else check_integer("logits_budget", logits_budget)
        if num_tokens is not None and type(num_tokens) is not int:
            num_tokens = check_integer("num_tokens", num_tokens)
        if key_budget is not None and type(key_budget) is not int:
            key_budget = check_integer("key_budget", key_budget)
        if not 0 <= num_decodes <= num_reqs:
            raise ValueError(f"num_decodes must be from 0 to {num_reqs}, got {num_decodes}")
        layout = self._uniform_step(query_start_loc_cpu, num_decodes) if num_decodes == num_reqs else None
        if layout is not None:
            starts, by_request = layout.query_starts, self.next_n
        else:
            starts, by_request = self._starts(query_start_loc_cpu, num_decodes)
        end = starts[-1]
        rows = end if num_tokens is None else num_tokens
        if not end <= rows <= self.max_tokens:
            raise ValueError(
                f"the step has {end} rows, {rows} with padding; padding must not be negative, and the "
                f"rows at most max_tokens = {self.max_tokens}"
            )
        lens: list[int] = []
        if layout is None and num_decodes == num_reqs:
            layout = StepLayout(num_reqs, num_decodes, self.compress_ratio, (end,), (), self.next_n, 0)
        elif layout is None:
            lens = _integers("seq_lens_cpu", seq_lens_cpu[num_decodes:] if num_decodes else seq_lens_cpu)
            layout = self._layout(num_decodes, starts, lens, logits_budget, key_budget)
        words = layout.words
        table = self._table.hold(words) if len(words) > INLINE_GROUPS else None
        self._backend.build_metadata(query_start_loc, seq_lens, layout, self._buffers, table)
        self._generation[0] += 1
        return IndexerMetadata(Lease(self._buffers, self._generation), layout, lens, rows, by_request, logits_budget)

    def _uniform_step(self, values: HostIntegers, num_decodes: int) -> StepLayout | None:
        """The layout of a step whose first requests decode next_n rows each, and that has no others.

        None where that cannot be seen at once, without a look at one request after the other.
        """
        if not isinstance(values, torch.Tensor) or values.dtype is not torch.int32 or not values.is_cpu:
            return None
        kept = self._decodes.get(num_decodes)
        if kept is None:
            if len(self._decodes) == KEPT_DECODES:
                self._decodes.clear()
            end = (num_decodes * self.next_n,)
            layout = StepLayout(num_decodes, num_decodes, self.compress_ratio, end, (), self.next_n, 0)
            kept = self._decodes[num_decodes] = self._uniform[: num_decodes + 1], layout
        if values.numel() != num_decodes + 1:
            values = values[: num_decodes + 1]
        return kept[1] if torch.equal(values, kept[0]) else None

    def _starts(self, values: HostIntegers, num_decodes: int) -> tuple[Sequence[int], int]:
        """First rows of the prefill requests and the end; rows of every decode request, 0 where they differ."""
        if num_decodes and self._uniform_step(values, num_decodes) is not None:
            starts = _integers("query_start_loc_cpu", values[num_decodes:])
            if starts == sorted(starts):
                return starts, self.next_n
        starts = _integers("query_start_loc_cpu", values)
        # A sorted list is recognised in one pass.
        if starts[0] != 0 or starts != sorted(starts):
            raise ValueError(f"query_start_loc_cpu must begin with 0 and not decrease, got {starts}")
        if num_decodes == 0:
            return starts, self.next_n
        rows = set(map(operator.sub, starts[1 : num_decodes + 1], starts))
        if max(rows) > self.next_n:
            raise ValueError(
                f"the first num_decodes = {num_decodes} requests must have at most next_n = {self.next_n} rows "
                f"each, got query_start_loc_cpu {starts}"
            )
        return starts[num_decodes:], self.next_n if rows == {self.next_n} else 0

    def _layout(
        self, num_decodes: int, starts: Sequence[int], lens: list[int], logits_budget: int, key_budget: int | None
    ) -> StepLayout:
        """The layout of a step with prefill requests, of which ``starts`` and ``lens`` are."""
        ratio, most = self.compress_ratio, self.max_keys if key_budget is None else key_budget
        keys, longest = lens, max(lens)
        if ratio != 1 or min(lens) < 0:
            keys = [length // ratio if length > 0 else 0 for length in lens]
        if logits_budget < LOGIT_BYTES or most < (key_budget is not None):
            raise ValueError(f"logits_budget must be at least 4 and key_budget 1, got {logits_budget} and {most}")
        total, rows = sum(keys), starts[-1] - starts[0]
        words: tuple[int, ...] = (num_decodes,)
        if total > most or total * rows * LOGIT_BYTES > logits_budget:
            words = group_words(starts, keys, num_decodes, logits_budget, most, longest)
        if total > self.max_keys:
            raise ValueError(f"the prefill requests have {total} keys, more than max_keys = {self.max_keys}")
        # No request has more keys than tokens, nor, but for odd ones, more rows. Every step pays for this: comparisons
        # cost less than calls of min and max.
        if ratio != 1 and longest > rows:
            longest = max(rows, longest // ratio)
        if longest < self.next_n:
            longest = self.next_n
        return StepLayout(num_decodes + len(lens), num_decodes, ratio, starts, words, longest, total)


def _size(values: HostIntegers) -> int:
    return values.shape[0] if isinstance(values, torch.Tensor) else len(values)


def _integers(name: str, values: HostIntegers) -> list[int]:
    if isinstance(values, torch.Tensor):
        usual = values.dtype is torch.int32 or not values.is_floating_point()
        if not usual or not values.is_cpu or values.ndim != 1:
            raise TypeError(f"{name} must be a vector of integers on the host, got {describe(values)}")
        integers: list[int] = values.tolist()
        return integers
    if set(map(type, values)) <= {int}:
        return list(values)
    return [check_integer(name, value) for value in values]
