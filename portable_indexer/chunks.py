"""How a step's prefill rows are cut into chunks: integers from the host's lengths, the same on every rank.

A *group* is a run of requests whose keys are gathered together into one workspace; a *chunk* is a run of
rows of one group. Groups respect the key budget, chunks the logits budget; a group of too many rows is cut
into several chunks, of which only the first gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LOGIT_BYTES = 4


class KeyGroup(NamedTuple):
    """Requests ``[request_start, request_end)``, whose packed keys share a workspace.

    ``total_keys`` is what the host expects, an upper bound of what the device finds. ``key_base`` is where
    the group's part of the step's key-to-request buffer begins. Rows are numbered as in the step.
    """

    request_start: int
    request_end: int
    token_start: int
    token_end: int
    key_base: int
    total_keys: int


def group_requests(
    query_starts: Sequence[int],
    key_lens: Sequence[int],
    first_request: int,
    logits_budget: int,
    key_budget: int,
) -> list[KeyGroup]:
    """Cut prefill requests into groups, greedily and in order.

    Args:
        query_starts: first row of each prefill request and the end of the last, [requests + 1].
        key_lens: keys of each, in the unit in which they are packed, [requests].
        first_request: number of the first one in the step.
        logits_budget: bytes that rows x keys float32 logits of one chunk may take.
        key_budget: packed keys that one gather may hold.

    A group of several requests keeps both budgets. A request that breaks the logits budget alone is a group
    by itself and is cut along its rows. Raises ValueError where a request alone breaks the key budget.
    """
    if not key_lens:
        return []
    pairs_budget = logits_budget // LOGIT_BYTES
    total, end_row = sum(key_lens), query_starts[-1]
    start, start_row = 0, query_starts[0]
    if total <= key_budget and total * (end_row - start_row) <= pairs_budget:
        return [KeyGroup(first_request, first_request + len(key_lens), start_row, end_row, 0, total)]
    groups: list[KeyGroup] = []
    base, keys, row = 0, 0, start_row
    for request, own in enumerate(key_lens):
        if own > key_budget:
            raise ValueError(f"request {first_request + request} has {own} keys, more than key_budget = {key_budget}")
        next_row = query_starts[request + 1]
        more = keys + own
        if (more > key_budget or more * (next_row - start_row) > pairs_budget) and request > start:
            groups.append(KeyGroup(first_request + start, first_request + request, start_row, row, base, keys))
            start, start_row, base, more = request, row, base + keys, own
        keys, row = more, next_row
    end = first_request + len(key_lens)
    groups.append(KeyGroup(first_request + start, end, start_row, end_row, base, keys))
    return groups


def rows_a_chunk(group: KeyGroup, logits_budget: int) -> int:
    """Rows of each chunk of a group but its last, which may have fewer: nearly equal parts within the budget.

    At least 1, also where a single row's logits exceed the budget.
    """
    rows = group.token_end - group.token_start
    most = max(1, logits_budget // (LOGIT_BYTES * max(1, group.total_keys)))
    return max(1, -(-rows // max(1, -(-rows // most))))
