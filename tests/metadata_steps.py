"""Steps for the metadata tests, and what they must come to, written out row by row."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch

from portable_indexer.metadata import IndexerMetadata, IndexerMetadataBuilder
from portable_indexer.step_metadata import MetadataBuffers

POISON = -77
GUARD = 4096


@dataclass
class Step:
    """One step: rows and tokens of each request; ``host_lens`` are upper bounds of ``seq_lens``."""

    query_lens: list[int]
    seq_lens: list[int]
    num_decodes: int = 0
    padding: int = 0
    compress_ratio: int = 1
    host_lens: list[int] = field(default_factory=list)

    @property
    def starts(self) -> list[int]:
        starts = [0]
        for query_len in self.query_lens:
            starts.append(starts[-1] + query_len)
        return starts

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """query_start_loc and seq_lens on the device."""
        starts = torch.tensor(self.starts, dtype=torch.int32, device=device)
        return starts, torch.tensor(self.seq_lens, dtype=torch.int32, device=device)

    def build(self, builder: IndexerMetadataBuilder, **options: int) -> IndexerMetadata:
        starts, lens = self.tensors(builder.device)
        return builder.build(
            starts,
            lens,
            query_start_loc_cpu=self.starts,
            seq_lens_cpu=self.host_lens or self.seq_lens,
            num_decodes=self.num_decodes,
            num_tokens=self.starts[-1] + self.padding,
            **options,
        )

    def row_lens(self, request: int) -> list[int]:
        """Keys that each row of a request may see."""
        rows, length = self.query_lens[request], self.seq_lens[request]
        return [max(length - rows + 1 + row, 0) // self.compress_ratio for row in range(rows)]

    def keys(self, request: int) -> int:
        return max(self.seq_lens[request], 0) // self.compress_ratio


def random_step(generator: torch.Generator, most_reqs: int = 40) -> Step:
    """Requests without rows, without keys and with fewer keys than rows among them."""

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    reqs = draw(0, most_reqs)
    ratio = (1, 3, 4)[draw(0, 2)]
    query_lens = [(0, 1, draw(1, 4), draw(0, 500))[draw(0, 3)] for _ in range(reqs)]
    seq_lens = [max(0, rows + (0, -5, draw(0, 700))[draw(0, 2)]) for rows in query_lens]
    host_lens = [length + (0, 0, draw(0, 300))[draw(0, 2)] for length in seq_lens]
    return Step(query_lens, seq_lens, draw(0, reqs), (0, 3, 600)[draw(0, 2)], ratio, host_lens)


def builder_for(step: Step, backend: str, device: torch.device, **options: int) -> IndexerMetadataBuilder:
    """A builder with just room for the step; every buffer poisoned and fenced."""
    keys = sum(length // step.compress_ratio for length in step.host_lens or step.seq_lens)
    sizes = {
        "max_tokens": max(1, step.starts[-1] + step.padding),
        "max_reqs": max(1, len(step.query_lens)),
        "max_keys": keys,
        "next_n": max([1, *step.query_lens[: step.num_decodes]]),
        "compress_ratio": step.compress_ratio,
    }
    return fenced(IndexerMetadataBuilder(**{**sizes, **options}, device=device, backend=backend))


def fenced(builder: IndexerMetadataBuilder) -> IndexerMetadataBuilder:
    """The builder with its buffers poisoned, inside larger ones whose rest ``check_fences`` looks at."""
    names = [f.name for f in dataclasses.fields(MetadataBuffers) if f.name != "arange"]
    whole = {
        name: torch.full((getattr(builder._buffers, name).numel() + 2 * GUARD,), POISON, dtype=torch.int32)
        for name in names
    }
    whole = {name: buffer.to(builder.device) for name, buffer in whole.items()}
    parts = {name: buffer[GUARD : buffer.numel() - GUARD] for name, buffer in whole.items()}
    builder._buffers = MetadataBuffers(**parts, arange=builder._buffers.arange)
    builder.fences = whole  # type: ignore[attr-defined]
    return builder


def check_fences(builder: IndexerMetadataBuilder) -> None:
    for name, buffer in builder.fences.items():  # type: ignore[attr-defined]
        outside = torch.cat([buffer[:GUARD], buffer[buffer.numel() - GUARD :]]).cpu()
        assert torch.equal(outside, torch.full_like(outside, POISON)), f"wrote outside {name}"


def check(step: Step, built: IndexerMetadata, builder: IndexerMetadataBuilder) -> None:
    """Compare everything with the step written out; buffers are looked at to their last entry."""
    check_fences(builder)
    starts, reqs = step.starts, len(step.query_lens)
    rest = builder.max_tokens - starts[-1]
    request_of = [request for request in range(reqs) for _ in range(step.query_lens[request])]
    row_keys = [length for request in range(reqs) for length in step.row_lens(request)]
    assert builder._buffers.token_to_req.tolist() == request_of + [0] * rest
    assert builder._buffers.row_keys.tolist() == row_keys + [0] * rest
    assert built.token_to_req.tolist() == (request_of + [0] * rest)[: built.num_tokens]
    assert built.row_keys.tolist() == (row_keys + [0] * rest)[: built.num_tokens]
    assert built.cu_seqlens_q.tolist() == list(range(built.num_tokens + 1))
    assert built.decode_row_keys.tolist() == row_keys[: starts[step.num_decodes]]

    ks, ke = [0] * builder.max_tokens, [0] * builder.max_tokens
    row, gathered = starts[step.num_decodes], None
    for chunk in built.chunks:
        assert chunk.token_start == row and chunk.token_end > row
        assert chunk.skip_kv_gather == (gathered == (chunk.request_start, chunk.request_end))
        row, gathered = chunk.token_end, (chunk.request_start, chunk.request_end)
        packed, first_key = [], {}
        for request in range(chunk.request_start, chunk.request_end):
            first_key[request] = len(packed)
            packed += [request] * step.keys(request)
        assert chunk.key_starts.tolist() == [*first_key.values(), len(packed)]
        assert chunk.key_to_req.tolist() == packed + [-1] * (chunk.total_keys - len(packed))
        for token in range(chunk.token_start, chunk.token_end):
            ks[token] = first_key[request_of[token]]
            ke[token] = ks[token] + row_keys[token]
        assert chunk.cu_seqlen_ks.tolist() == ks[chunk.token_start : chunk.token_end]
        assert chunk.cu_seqlen_ke.tolist() == ke[chunk.token_start : chunk.token_end]
    assert row == starts[-1]
    assert builder._buffers.cu_seqlen_ks.tolist() == ks
    assert builder._buffers.cu_seqlen_ke.tolist() == ke
    assert built.cu_seqlen_ke.tolist() == ke[: built.num_tokens]
