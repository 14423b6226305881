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


def group_words(
    query_starts: Sequence[int],
    key_lens: Sequence[int],
    first_request: int,
    logits_budget: int,
    key_budget: int,
    most_keys: int | None = None,
) -> tuple[int, ...]:
    """Cut prefill requests into groups, greedily and in order.

    Args:
        query_starts: first row of each prefill request and the end of the last, [requests + 1].
        key_lens: keys of each, in the unit in which they are packed, [requests], at least one.
        first_request: number of the first one in the step.
        logits_budget: bytes that rows x keys float32 logits of one chunk may take.
        key_budget: packed keys that one gather may hold.
        most_keys: keys of the longest request or more, where that is known.

    Returns:
        One integer for each group: its ``key_base`` above, its ``request_start`` in the low 32 bits.

    A group of several requests keeps both budgets. A request that breaks the logits budget alone is a group
    by itself and is cut along its rows. Raises ValueError where a request alone breaks the key budget.
    """
    for request, own in enumerate(key_lens if (most_keys or max(key_lens)) > key_budget else ()):
        if own > key_budget:
            raise ValueError(f"request {first_request + request} has {own} keys, more than key_budget = {key_budget}")
    pairs_budget, row = logits_budget // LOGIT_BYTES, query_starts[0]
    words, base, keys = [first_request], 0, key_lens[0]
    for request, own in enumerate(key_lens[1:], 1):
        keys += own
        if keys * (query_starts[request + 1] - row) > pairs_budget or keys > key_budget:
            base, keys, row = base + keys - own, own, query_starts[request]
            words.append(base << 32 | first_request + request)
    return tuple(words)


def groups_of(words: Sequence[int], query_starts: Sequence[int], first_request: int, total_keys: int) -> list[KeyGroup]:
    """The groups that ``group_words`` cut, with rows and keys."""
    groups, end_row, end = [], query_starts[-1], first_request + len(query_starts) - 1
    for word in reversed(words):
        base, begin = word >> 32, word & 0xFFFFFFFF
        row = query_starts[begin - first_request]
        groups.append(KeyGroup(begin, end, row, end_row, base, total_keys - base))
        end, end_row, total_keys = begin, row, base
    return groups[::-1]


def rows_a_chunk(group: KeyGroup, logits_budget: int) -> int:
    """Rows of each chunk of a group but its last, which may have fewer: nearly equal parts within the budget.

    At least 1, also where a single row's logits exceed the budget.
    """
    rows, keys = group.token_end - group.token_start, group.total_keys
    if rows * keys * LOGIT_BYTES <= logits_budget:
        return rows or 1
    most = logits_budget // (LOGIT_BYTES * keys) or 1
    return -(-rows // -(-rows // most))
