"""The token-to-request map, on whichever backend is under test."""

from __future__ import annotations

import itertools

import pytest
import torch

from portable_indexer.metadata import token_to_req_indices

POISON = -77


def expected(starts: list[int], size: int, pad_value: int) -> list[int]:
    """Token by token, from the boundaries."""
    lens = [end - start for start, end in itertools.pairwise(starts)]
    requests = [request for request, tokens in enumerate(lens) for _ in range(tokens)]
    return (requests + [pad_value] * size)[:size]


@pytest.mark.parametrize(
    "starts",
    [
        [0],
        [0, 0],
        [0, 0, 0],
        [0, 1],
        [0, 0, 0, 5],
        [0, 5, 5, 5],
        [0, 0, 3, 3, 3, 1030, 1030, 1031],
        list(range(18)),
        [0, 1023, 1024, 1025, 2048, 4097],
    ],
)
@pytest.mark.parametrize("padding", [0, 1, 1500])
@pytest.mark.parametrize("pad_value", [0, -1, 7])  # R03: an id that is none stays what the caller said
def test_boundaries(backend_name, device, starts, padding, pad_value):
    tokens = starts[-1] + padding
    query_start_loc = torch.tensor(starts, dtype=torch.int32, device=device)
    out = torch.full((tokens + 100,), POISON, dtype=torch.int32, device=device)
    got = token_to_req_indices(query_start_loc, tokens, out=out, pad_value=pad_value, backend=backend_name)
    assert got.dtype == torch.int32 and got.shape == (tokens,)
    assert tokens == 0 or got.data_ptr() == out.data_ptr()
    # All of the buffer is this step's, also what a longer one wrote.
    assert out.tolist() == expected(starts, tokens + 100, pad_value)
    fresh = token_to_req_indices(query_start_loc, tokens, pad_value=pad_value, backend=backend_name)
    assert fresh.tolist() == expected(starts, tokens, pad_value)


def test_many_requests_of_one_token(backend_name, device):
    starts = [0, *range(513)]
    query_start_loc = torch.tensor(starts, dtype=torch.int32, device=device)
    got = token_to_req_indices(query_start_loc, 520, pad_value=-1, backend=backend_name)
    assert got.tolist() == expected(starts, 520, -1)


def test_random_boundaries(backend_name, device, generator):
    for _ in range(10):
        reqs = int(torch.randint(1, 300, (), generator=generator))
        lens = torch.randint(0, 40, (reqs,), generator=generator)
        lens *= torch.randint(0, 2, (reqs,), generator=generator)
        lens[int(torch.randint(0, reqs, (), generator=generator))] = 3000
        starts = [0, *lens.cumsum(0).tolist()]
        query_start_loc = torch.tensor(starts, dtype=torch.int32, device=device)
        got = token_to_req_indices(query_start_loc, starts[-1] + 9, pad_value=-1, backend=backend_name)
        assert got.tolist() == expected(starts, starts[-1] + 9, -1)


@pytest.mark.parametrize("starts", [[0, 1 << 20], [0, 0, 3, (1 << 20) - 1, 1 << 20], [0] * 512 + [1 << 20]])
def test_a_million_tokens(backend_name, device, starts):
    query_start_loc = torch.tensor(starts, dtype=torch.int32, device=device)
    got = token_to_req_indices(query_start_loc, starts[-1] + 5, pad_value=-1, backend=backend_name).cpu()
    lens = torch.tensor(starts).diff()
    want = torch.repeat_interleave(torch.arange(len(lens), dtype=torch.int32), lens)
    assert torch.equal(got, torch.cat([want, torch.full((5,), -1, dtype=torch.int32)]))


def test_draft_steps_shrink(backend_name, device):  # R01
    out = torch.full((8,), POISON, dtype=torch.int32, device=device)
    for starts in ([0, 4, 8], [0, 1, 2]):
        query_start_loc = torch.tensor(starts, dtype=torch.int32, device=device)
        got = token_to_req_indices(query_start_loc, starts[-1], out=out, backend=backend_name)
        assert got.tolist() == expected(starts, starts[-1], 0)
    assert out.tolist() == [0, 1, 0, 0, 0, 0, 0, 0]


def test_an_unaligned_buffer(backend_name, device):
    whole = torch.full((70,), POISON, dtype=torch.int32, device=device)
    boundaries = torch.tensor([-9, 0, 20, 60], dtype=torch.int32, device=device)[1:]
    token_to_req_indices(boundaries, 64, out=whole[3:67], pad_value=-1, backend=backend_name)
    assert whole.tolist() == [POISON] * 3 + [0] * 20 + [1] * 40 + [-1] * 4 + [POISON] * 3


@pytest.mark.parametrize(
    "change, error",
    [
        ({"query_start_loc": [0, 5]}, TypeError),
        ({"query_start_loc": torch.tensor([0, 5])}, ValueError),
        ({"query_start_loc": torch.zeros(0, dtype=torch.int32)}, ValueError),
        ({"query_start_loc": torch.zeros(3, 2, dtype=torch.int32)[:, 0]}, ValueError),  # R11
        ({"num_tokens": -1}, ValueError),
        ({"num_tokens": 2.0}, TypeError),
        ({"num_tokens": 9}, ValueError),
        ({"out": torch.zeros(8, dtype=torch.int64)}, ValueError),
        ({"out": torch.zeros(8, 2, dtype=torch.int32)[:, 0]}, ValueError),
        ({"pad_value": 1 << 31}, ValueError),
    ],
)
def test_bad_arguments_are_refused(backend_name, device, change, error):
    arguments = {
        "query_start_loc": torch.tensor([0, 5], dtype=torch.int32),
        "num_tokens": 5,
        "out": torch.full((8,), POISON, dtype=torch.int32),
        **change,
    }
    placed = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    # A copy to a GPU keeps its strides only where it is asked to.
    if device.type != "cpu":
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor) and not value.is_contiguous():
                placed[name] = torch.zeros((*value.shape, 2), dtype=value.dtype, device=device)[..., 0]
    with pytest.raises(error, match=next(iter(change)) if "num_tokens" not in change else "num_tokens|out"):
        token_to_req_indices(**placed, backend=backend_name)
    if "out" not in change:
        assert placed["out"].tolist() == [POISON] * 8
