"""Metadata, as compiled for the architecture, through the public functions: every integer of a step."""

from __future__ import annotations

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
        for name in ("token_to_req", "row_keys", "cu_seqlen_ks", "cu_seqlen_ke", "cu_seqlens_q", "decode_row_keys"):
            assert torch.equal(*(getattr(metadata, name) for metadata in built)), name
        assert len(built[0].chunks) == len(built[1].chunks)
        for ours, right in zip(built[0].chunks, built[1].chunks, strict=True):
            for name, value in ours._asdict().items():
                other = getattr(right, name)
                assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, name
