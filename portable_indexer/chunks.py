"""How a step's prefill rows are cut into chunks: integers from the host's lengths, the same on every rank.

A *group* is a run of requests whose keys are gathered together into one workspace; a *chunk* is a run of
rows of one group. Groups respect the key budget, chunks the logits budget; a group of too many rows is cut
into several chunks, of which only the first gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LOGIT_BYTES = 4


@dataclass(frozen=True)
class KeyGroup:
    """Requests ``[request_start, request_end)``, whose packed keys share a workspace.

    ``total_keys`` is what the host expects, an upper bound of what the device finds. ``key_base`` is where
    the group's part of the step's key-to-request buffer begins.
    """

    request_start: int
    request_end: int
    key_base: int
    total_keys: int


@dataclass(frozen=True)
class RowSpan:
    """Rows ``[token_start, token_end)`` of the step, all of group number ``group``."""

    group: int
    token_start: int
    token_end: int
    skip_kv_gather: bool


def group_requests(
    query_starts: Sequence[int],
    key_lens: Sequence[int],
    first_request: int,
    logits_budget: int,
    key_budget: int,
) -> list[KeyGroup]:
    """Cut the prefill requests ``[first_request, len(key_lens))`` into groups, greedily and in order.

    Args:
        query_starts: first row of each request and the end of the last, [requests + 1].
        key_lens: keys of each request, in the unit in which they are packed, [requests].
        first_request: number of requests before the prefill ones.
        logits_budget: bytes that rows x keys float32 logits of one chunk may take.
        key_budget: packed keys that one gather may hold.

    A group of several requests keeps both budgets. A request that breaks the logits budget alone is a group
    by itself and is cut along its rows. Raises ValueError where a request alone breaks the key budget.
    """
    end = len(key_lens)
    if first_request == end:
        return []
    pairs_budget = logits_budget // LOGIT_BYTES
    total = sum(key_lens) if first_request == 0 else sum(key_lens[first_request:])
    rows = query_starts[end] - query_starts[first_request]
    if total <= key_budget and total * rows <= pairs_budget:
        return [KeyGroup(first_request, end, 0, total)]
    groups: list[KeyGroup] = []
    start, base, keys = first_request, 0, 0
    for request in range(first_request, end):
        own = key_lens[request]
        if own > key_budget:
            raise ValueError(
                f"request {request} has {own} keys, more than key_budget = {key_budget} can hold"
            )
        rows = query_starts[request + 1] - query_starts[start]
        if request > start and (keys + own > key_budget or (keys + own) * rows > pairs_budget):
            groups.append(KeyGroup(start, request, base, keys))
            start, base, keys = request, base + keys, 0
        keys += own
    groups.append(KeyGroup(start, end, base, keys))
    return groups


def cut_rows(groups: Sequence[KeyGroup], query_starts: Sequence[int], logits_budget: int) -> list[RowSpan]:
    """Cut each group's rows into chunks of nearly equal size that keep the logits budget.

    Together the chunks cover every row of the groups once, in order. A chunk has at least one row, also
    where a single row's logits exceed the budget; a group without rows has no chunk.
    """
    spans: list[RowSpan] = []
    for number, group in enumerate(groups):
        first, last = query_starts[group.request_start], query_starts[group.request_end]
        rows = last - first
        if rows == 0:
            continue
        most = max(1, logits_budget // (LOGIT_BYTES * max(1, group.total_keys)))
        size = -(-rows // -(-rows // most))
        for token in range(first, last, size):
            spans.append(RowSpan(number, token, min(token + size, last), token > first))
    return spans
