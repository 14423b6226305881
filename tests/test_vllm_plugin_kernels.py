"""Prefill rows by this package's kernels inside a step of vLLM's, one rank after the other in one process."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from portable_indexer import index_topk, pool_topk
from portable_indexer.sharding import PrefillRowShard
from portable_indexer.vllm_plugin import own_kernels, scratch
from portable_indexer.vllm_plugin.own_kernels import OwnKernels, check_blocks

DIM, HEADS, TOPK, BLOCK = 32, 4, 16, 8
FP8 = torch.float8_e4m3fn


class Layer:
    """A cache of [keys, scales] blocks in two halves, requests with sub-chunks, and a count of gathers."""

    def __init__(self, generator: torch.Generator, decode: int = 2) -> None:
        lengths, rows = [40, 25], [30, 25]
        self.keys = [torch.randn(n, DIM, generator=generator).to(FP8) for n in lengths]
        self.scales = [torch.rand(n, generator=generator) + 0.5 for n in lengths]
        self.gathers: list[int] = []
        self.space = torch.zeros(1 << 20, dtype=torch.uint8)
        total = decode + sum(rows)
        self.chunks, self.wanted = [], torch.full((total, TOPK), -1, dtype=torch.int32)
        q = torch.randn(total, HEADS, DIM, generator=generator).to(FP8)
        weights = torch.randn(total, HEADS, generator=generator)
        row = decode
        for request, (length, new) in enumerate(zip(lengths, rows, strict=True)):
            for first in range(0, new, 7):
                last = min(first + 7, new)
                ke = torch.arange(length - new + first + 1, length - new + last + 1, dtype=torch.int32)
                self.chunks.append(
                    SimpleNamespace(
                        request=request,
                        token_start=row + first,
                        token_end=row + last,
                        cu_seqlen_ks=torch.zeros_like(ke),
                        cu_seqlen_ke=ke,
                        cu_seq_lens=torch.tensor([0, length], dtype=torch.int32),
                        block_table=torch.arange(8, dtype=torch.int32)[None] + 8 * request,
                        total_seq_lens=length,
                        skip_kv_gather=first > 0,
                    )
                )
                own = slice(row + first, row + last)
                self.wanted[own] = index_topk(
                    q[own],
                    (self.keys[request], self.scales[request]),
                    weights[own],
                    torch.zeros_like(ke),
                    ke,
                    TOPK,
                    backend="reference",
                )
            row += new
        self.call: dict[str, Any] = {
            "q_fp8": q,
            "weights": weights,
            "topk_tokens": TOPK,
            "head_dim": DIM,
            "total_seq_lens": 64,
            "kv_cache": torch.zeros(16, BLOCK, DIM + 4, dtype=torch.uint8),
            "topk_indices_buffer": torch.full((total + 4, TOPK + 3), 555, dtype=torch.int32),
        }
        self.kernels = OwnKernels("q_fp8", FP8, lambda: self, self.gather)

    def get_simultaneous(self, *specs: Any) -> list[torch.Tensor]:
        (shape, dtype), (scale_shape, _) = specs
        size = shape[0] * shape[1]
        keys = self.space[:size].view(dtype).view(shape)
        return [keys, self.space[size : size + scale_shape[0] * 4].view(scale_shape)]

    def gather(self, call: Any, chunk: Any, k: torch.Tensor, scales: torch.Tensor) -> None:
        self.gathers.append(chunk.request)
        k.copy_(self.keys[chunk.request])
        scales.copy_(self.scales[chunk.request][:, None].view(torch.uint8))


@pytest.fixture
def layer(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> Layer:
    monkeypatch.delenv("PORTABLE_INDEXER_CHECK", raising=False)
    monkeypatch.setattr(scratch, "_held", {})
    return Layer(generator)


@pytest.mark.parametrize("sizes", [(55,), (20, 35), (0, 55), (31, 0, 24), (13, 14, 14, 14)])
def test_the_ranks_rows_are_the_whole_and_every_rank_gathers(layer: Layer, sizes: tuple[int, ...]) -> None:
    # P03: also a rank that owns no row of a chunk gathers what later chunks reuse, and only once
    buffer = layer.call["topk_indices_buffer"]
    for rank in range(len(sizes)):
        layer.gathers.clear()
        layer.space.random_()
        layer.kernels.prefill(layer.call, layer.chunks, PrefillRowShard(2, sizes, rank))
        assert layer.gathers == [0, 1]
    assert torch.equal(buffer[2:57, :TOPK], layer.wanted[2:])
    assert (buffer[:2] == 555).all() and (buffer[57:] == 555).all() and (buffer[:, TOPK:] == 555).all()


def test_without_a_plan_one_rank_computes_all(layer: Layer) -> None:
    layer.kernels.prefill(layer.call, layer.chunks, None)
    assert torch.equal(layer.call["topk_indices_buffer"][2:57, :TOPK], layer.wanted[2:])


@pytest.mark.parametrize("sizes", [(20, 35), (0, 55)])
def test_pools_are_chosen_and_returned_as_tokens(layer: Layer, sizes: tuple[int, ...]) -> None:
    """Keys are pools of three tokens; a row's position is any of its tokens behind its last whole pool."""
    pool, width = 3, TOPK + 2
    kernels = dataclasses.replace(layer.kernels, pooled=True)
    positions = torch.zeros(57, dtype=torch.int64)
    wanted = torch.full((57, width), -1, dtype=torch.int32)
    for chunk in layer.chunks:
        own = slice(chunk.token_start, chunk.token_end)
        positions[own] = pool * chunk.cu_seqlen_ke + torch.arange(len(chunk.cu_seqlen_ke)) % pool - 1
        wanted[own] = pool_topk(
            layer.call["q_fp8"][own],
            (layer.keys[chunk.request], layer.scales[chunk.request]),
            layer.call["weights"][own],
            chunk.cu_seqlen_ks,
            chunk.cu_seqlen_ke,
            TOPK,
            pool=pool,
            positions=positions[own].int(),
            backend="reference",
        )
    call = layer.call | {"index_kpool": pool, "positions": positions}
    assert kernels.take(call) and not kernels.take(call | {"index_kpool": 5}), "the buffer is too narrow for more"
    for rank in range(2):
        kernels.prefill(call, layer.chunks, PrefillRowShard(2, sizes, rank))
    buffer = call["topk_indices_buffer"]
    assert torch.equal(buffer[2:57, :width], wanted[2:])
    assert (buffer[:2] == 555).all() and (buffer[57:] == 555).all() and (buffer[:, width:] == 555).all()


def test_scratch_covers_any_step_of_the_call(layer: Layer) -> None:
    # M12: made once, for the largest step
    need = layer.kernels.workspace_bytes(layer.call, 2)
    held = scratch.scratch(torch.device("cpu"), need)
    layer.kernels.prefill(layer.call, layer.chunks, PrefillRowShard(2, (20, 35), 0))
    assert [entry.workspace for entry in scratch._held.values()] == [held]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("q_fp8", torch.zeros(3, HEADS, DIM, dtype=torch.bfloat16), "q is torch.bfloat16"),
        ("weights", torch.zeros(3, HEADS, dtype=torch.bfloat16), "weights are torch.bfloat16"),
        ("topk_tokens", 5000, "topk"),
        ("q_fp8", torch.zeros(3, HEADS * DIM).to(FP8), "q is [3, 128]"),
        ("weights", torch.zeros(3, HEADS + 1), "weights are [3, 5]"),
        ("weights", torch.zeros(HEADS, 3).t(), "not contiguous along their rows"),
        ("topk_indices_buffer", torch.zeros(9, TOPK, dtype=torch.int64), "the id buffer is torch.int64 [9, 16]"),
        ("topk_indices_buffer", torch.zeros(9, TOPK - 1, dtype=torch.int32), "have up to 16 ids"),
    ],
)
def test_what_it_does_not_take_is_named_once(
    layer: Layer, caplog: pytest.LogCaptureFixture, name: str, value: Any, reason: str
) -> None:
    own_kernels._taken.cache_clear()
    own_kernels._refuse.cache_clear()
    assert layer.kernels.take(layer.call)
    for _ in range(3):
        assert not layer.kernels.take(layer.call | {name: value})
    assert caplog.text.count("vLLM's are used") == 1 and reason in caplog.text


def test_a_backend_that_is_too_slow_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    # V07: on a GPU the reference is no replacement of vLLM's kernels
    monkeypatch.setattr("portable_indexer.registry.resolve", lambda *args: SimpleNamespace(name="reference"))
    monkeypatch.setattr("portable_indexer.device.detect", lambda device: None)
    where = torch.device("cuda", 0)
    reason = own_kernels._why_not(where, FP8, torch.float32, FP8, HEADS, DIM, TOPK)
    assert reason == "no fast backend serves 4 heads of 32 on cuda:0"


def test_another_groups_block_table_is_noticed(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    # R19: ids of a cache with more blocks; ids behind the request's length do not matter
    cache = torch.zeros(2478, BLOCK, DIM + 4, dtype=torch.uint8)
    chunk = layer.chunks[0]
    chunk.block_table = torch.tensor([[0, 7, 9, 3, 2477, 17952, 0, 0]], dtype=torch.int32)
    check_blocks(cache, chunk)
    chunk.block_table[0, 3] = 17952
    with pytest.raises(ValueError, match="0 to 2477, got block 17952 for keys 24 on of request 0"):
        check_blocks(cache, chunk)
    monkeypatch.setenv("PORTABLE_INDEXER_CHECK", "1")
    with pytest.raises(ValueError, match="got block 17952"):
        layer.kernels.prefill(layer.call | {"kv_cache": cache}, layer.chunks, None)
