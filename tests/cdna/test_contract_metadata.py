"""Metadata, as compiled for the architecture, through the public functions: every integer of a step."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from portable_indexer.metadata import IndexerMetadataBuilder, token_to_req_indices

pytestmark = pytest.mark.usefixtures("cdna")
POISON = -77


@pytest.mark.parametrize(
    ("lens", "padding"),
    [([], 5), ([0, 0], 3), ([1], 0), ([3, 0, 0, 1024, 1], 7), ([0, 5, 2048, 0, 1], 1000), ([1] * 700, 1)],
)
@pytest.mark.parametrize("pad_value", [0, -1])
def test_request_of_each_token(lens, padding, pad_value):
    starts = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0).to(torch.int32)
    tokens = sum(lens) + padding
    got, right = (
        token_to_req_indices(
            starts, tokens, out=torch.full((tokens + 9,), POISON, dtype=torch.int32), pad_value=pad_value, backend=name
        )
        for name in ("triton_rocm", "reference")
    )
    assert torch.equal(got, right)
    expected = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens, dtype=torch.long))
    assert got.tolist() == expected.tolist() + [pad_value] * padding


def step(generator, reqs, decodes, ratio, next_n):
    query = torch.randint(0, 40, (reqs,), generator=generator)
    query[:decodes] = torch.randint(0, next_n + 1, (decodes,), generator=generator)
    context = torch.randint(0, 900, (reqs,), generator=generator) + query
    context[::5] = (query[::5] - 3).clamp(min=0)  # shorter than its own rows: T13
    starts = torch.cat([torch.zeros(1, dtype=torch.long), query.cumsum(0)]).to(torch.int32)
    return starts, context.to(torch.int32), {"num_decodes": decodes, "logits_budget": 1 << 18, "key_budget": 3000}


@pytest.mark.parametrize(
    ("reqs", "decodes", "ratio", "next_n"),
    [(1, 0, 1, 1), (7, 0, 1, 1), (40, 10, 1, 4), (25, 25, 1, 2), (30, 3, 4, 2), (150, 20, 1, 1)],
)
def test_steps(generator, reqs, decodes, ratio, next_n):
    sizes = {"max_tokens": 8192, "max_reqs": 256, "max_keys": 1 << 18, "compress_ratio": ratio, "next_n": next_n}
    builders = [IndexerMetadataBuilder(**sizes, device="cpu", backend=name) for name in ("triton_rocm", "reference")]
    for _ in range(3):  # buffers stay: a shorter step must not show what a longer one left
        starts, lens, options = step(generator, reqs, decodes, ratio, next_n)
        host = (lens + torch.randint(0, 20, lens.shape, generator=generator)).to(torch.int32)
        built = [
            builder.build(starts, lens, query_start_loc_cpu=starts.tolist(), seq_lens_cpu=host.tolist(), **options)
            for builder in builders
        ]
        assert tensors(built[0]).keys() == tensors(built[1]).keys()
        for name, value in tensors(built[0]).items():
            assert torch.equal(value, tensors(built[1])[name]), name


def tensors(built, prefix="") -> dict[str, torch.Tensor]:
    """All tensors of a step, by the names of the fields that lead to them."""
    found = {}
    for field in dataclasses.fields(built):
        value = getattr(built, field.name)
        if isinstance(value, torch.Tensor):
            found[prefix + field.name] = value
        for place, item in enumerate(value if isinstance(value, (list, tuple)) else [value]):
            if dataclasses.is_dataclass(item):
                found |= tensors(item, f"{prefix}{field.name}[{place}].")
    return found
