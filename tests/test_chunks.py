"""How prefill requests are grouped: against the rule written out, request by request."""

from __future__ import annotations

import pytest
import torch

from portable_indexer.chunks import LOGIT_BYTES, KeyGroup, group_words, groups_of, rows_a_chunk


def grouped(starts: list[int], lens: list[int], first: int, logits_budget: int, key_budget: int) -> list[list[int]]:
    """The requests of each group: one joins the group before it where both budgets allow it."""
    groups: list[list[int]] = []
    for request in range(len(lens)):
        joined = [*groups[-1], first + request] if groups else []
        keys = sum(lens[member - first] for member in joined)
        rows = starts[request + 1] - starts[joined[0] - first] if joined else 0
        if joined and keys <= key_budget and LOGIT_BYTES * keys * rows <= logits_budget:
            groups[-1] = joined
        else:
            groups.append([first + request])
    return groups


@pytest.mark.parametrize("most_rows, most_keys", [(3, 4), (40, 2000), (1, 1), (0, 9), (700, 0)])
def test_groups_are_as_large_as_both_budgets_allow(generator, most_rows, most_keys):
    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    for _ in range(60):
        reqs, first = draw(1, 60), draw(0, 5)
        starts = [draw(0, 9)]
        for _ in range(reqs):
            starts.append(starts[-1] + draw(0, most_rows))
        lens = [draw(0, most_keys) for _ in range(reqs)]
        key_budget = max(1, *lens) * draw(1, 8)
        logits_budget = draw(4, 4 + 4 * (most_rows + 1) * (most_keys + 1) * draw(1, 30))
        words = group_words(starts, lens, first, logits_budget, key_budget)
        groups = groups_of(words, starts, first, sum(lens))
        wanted = grouped(starts, lens, first, logits_budget, key_budget)
        assert [list(range(group.request_start, group.request_end)) for group in groups] == wanted
        base = 0
        for group in groups:
            own = slice(group.request_start - first, group.request_end - first)
            rows = starts[group.request_start - first], starts[group.request_end - first]
            assert (group.token_start, group.token_end) == rows
            assert (group.key_base, group.total_keys) == (base, sum(lens[own]))
            base += group.total_keys


def test_large_keys_and_requests_do_not_run_into_each_other():
    lens = [1 << 29, 1 << 29, 1]
    words = group_words([0, 1, 2, 3], lens, (1 << 24) - 3, 1 << 40, 1 << 29)
    assert words == ((1 << 24) - 3, 1 << 61 | (1 << 24) - 2, 1 << 62 | (1 << 24) - 1)
    assert all(word < 1 << 63 for word in words)


def test_a_request_above_the_key_budget_is_named():
    with pytest.raises(ValueError, match="request 8 has 11 keys, more than key_budget = 10"):
        group_words([0, 1, 2, 3], [1, 11, 12], 7, 1 << 40, 10)


@pytest.mark.parametrize(
    "rows, keys, budget", [(100, 7, 4 * 7 * 33), (100, 7, 4), (1, 0, 4), (512, 512, 4 * 512 * 512)]
)
def test_rows_of_a_chunk_fill_the_budget_evenly(rows, keys, budget):
    size = rows_a_chunk(KeyGroup(0, 1, 5, 5 + rows, 0, keys), budget)
    assert size == 1 or LOGIT_BYTES * size * keys <= budget
    chunks = -(-rows // size)
    # One chunk fewer would break the budget, and the last is not much shorter than the others.
    assert chunks == 1 or LOGIT_BYTES * keys * -(-rows // (chunks - 1)) > budget
    assert size * chunks - rows < chunks
