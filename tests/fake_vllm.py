"""A small stand-in for the parts of vLLM that the plugin touches, as modules of their names.

Its op writes row numbers instead of scores: enough to see which rows were computed, by which call, with which
metadata. Nothing here is vLLM's code.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib.machinery
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

INDEXER = "vllm.v1.attention.backends.mla.indexer"
ROCM = "vllm.v1.attention.ops.rocm_aiter_mla_sparse"
OPS = "vllm._aiter_ops"
MAP = "vllm.v1.attention.ops.metadata"
CUDA = "vllm.model_executor.layers.sparse_attn_indexer"
KPOOL = "vllm.models.glm5next.amd.sparse_indexer"
OP = "rocm_aiter_sparse_attn_indexer"
LAYER = "layer"


class CUDAGraphMode(enum.Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2

    def mixed_mode(self) -> CUDAGraphMode:
        return self


@dataclass
class Chunk:
    token_start: int
    token_end: int
    cu_seqlen_ks: torch.Tensor
    cu_seqlen_ke: torch.Tensor
    total_seq_lens: int = 64
    skip_kv_gather: bool = False
    local_total_seq_lens: int = 64
    pcp_deinterleave_idx: Any = None
    cu_seq_lens: Any = None


@dataclass
class Prefill:
    chunks: list[Chunk]
    max_prefill_seq_len: int = -1
    row_shard_sizes: list[int] | None = None


@dataclass
class Metadata:
    slot_mapping: torch.Tensor
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int
    decode: Any = None
    prefill: Prefill | None = None


@dataclass
class Context:
    attn_metadata: Any
    cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE
    notes: list[str] = field(default_factory=list)


def chunk(start: int, end: int, skip: bool = False) -> Chunk:
    rows = torch.arange(end - start, dtype=torch.int32)
    return Chunk(start, end, torch.zeros_like(rows), rows + 1, skip_kv_gather=skip)


def step(decodes: int, chunks: list[Chunk], sizes: list[int] | None, padded: int = 0) -> Metadata:
    """One decode row for each decode request, then the chunks' rows."""
    rows = sum(c.token_end - c.token_start for c in chunks)
    prefill = Prefill(chunks, 1000, sizes) if chunks else None
    slots = torch.arange(decodes + rows)
    decode = SimpleNamespace() if decodes else None
    return Metadata(slots, decodes, decodes, len(chunks), rows + padded, decode, prefill)


class World:
    """The installed modules, and what the op was called with."""

    def __init__(self) -> None:
        self.platform = SimpleNamespace(
            is_rocm=lambda: True, is_cuda=lambda: False, dispatch_key="CPU", fp8_dtype=lambda: torch.float8_e4m3fn
        )
        self.context = Context(None)
        self.tp = SimpleNamespace(world_size=1, rank_in_group=0, device_group=None, cpu_group=None)
        self.calls: list[dict[str, Any]] = []
        self.modules: dict[str, ModuleType] = {}
        self.dispatched: dict[str, Any] = {}

    @contextlib.contextmanager
    def override(self, context: Context) -> Iterator[None]:
        kept, self.context = self.context, context
        try:
            yield
        finally:
            self.context = kept

    def run_op(self, name: str, call: dict[str, Any]) -> torch.Tensor:
        """Clear, "insert", prefill rows, decode rows: in the order of vLLM's op, with its padded decode rows."""
        metadata = self.context.attn_metadata
        buffer = call["topk_indices_buffer"]
        metadata = metadata[LAYER] if isinstance(metadata, dict) else None
        self.calls.append({"op": name, "metadata": metadata, **call})
        if metadata is None:
            return buffer
        buffer[: len(call["hidden_states"])] = -1
        if metadata.num_prefills > 0:
            for part in metadata.prefill.chunks:
                rows = slice(part.token_start, part.token_end)
                buffer[rows] = call["hidden_states"][rows, :1].int() + 100 * part.cu_seqlen_ke[:, None]
        if metadata.num_decodes > 0:
            buffer[: 2 * metadata.num_decode_tokens] = 7
            buffer[metadata.num_decode_tokens : 2 * metadata.num_decode_tokens] = -7
        return buffer

    def call(self, metadata: Any, rows: int, **more: Any) -> dict[str, Any]:
        """Arguments whose hidden states carry the row's number."""
        self.context = Context(None if metadata is None else {LAYER: metadata})
        return {
            "hidden_states": torch.arange(rows).float()[:, None].repeat(1, 4),
            "k_cache_prefix": LAYER,
            "kv_cache": torch.zeros(1),
            "q_fp8": torch.zeros(rows, 2, 8),
            "k": torch.zeros(rows, 8),
            "weights": torch.zeros(rows, 2),
            "topk_tokens": 4,
            "head_dim": 8,
            "total_seq_lens": 64,
            "topk_indices_buffer": torch.full((rows + 6, 4), 555, dtype=torch.int32),
            "skip_k_cache_insert": False,
            "compress_ratio": 1,
        } | more


def eager_break_during_capture(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    wrapper.breaks = True  # type: ignore[attr-defined]
    return wrapper


def _ops(world: World) -> tuple[Any, Any, Any, Any]:
    def op(
        hidden_states: Any,
        k_cache_prefix: Any,
        kv_cache: Any,
        q_fp8: Any,
        k: Any,
        weights: Any,
        topk_tokens: int,
        head_dim: int,
        total_seq_lens: int,
        topk_indices_buffer: Any,
        skip_k_cache_insert: bool = False,
        compress_ratio: int = 1,
        candidate_blocks: Any = None,
    ) -> Any:
        given = dict(locals())
        given.pop("world", None)
        # The names that tell how the metadata is read, without reading it.
        if False:
            _ = k.num_prefills, k.num_decodes, k.num_decode_tokens, k.chunks
        return world.run_op(OP, given)

    def kpool(
        hidden_states: Any,
        k_cache_prefix: Any,
        kv_cache: Any,
        q_quant: Any,
        q_scale: Any,
        k: Any,
        weights: Any,
        topk_tokens: int,
        topk_indices_buffer: Any,
        skip_k_cache_insert: bool,
        use_fp4_cache: bool = False,
        gate_score: Any = None,
        index_kpool: int = 1,
        positions: Any = None,
    ) -> Any:
        given = dict(locals())
        given.pop("world", None)
        if False:
            _ = k.num_prefills, k.num_decodes, k.num_decode_tokens, k.max_prefill_seq_len
        return world.run_op("kpool", given)

    def gate(vllm_config: Any, dcp_world_size: int, use_pcp: bool, tp_size: int) -> bool:
        return bool(world.platform.is_cuda() and tp_size > 1)

    def plan(
        seq_lens_cpu: Any, query_lens_cpu: Any, compress_ratio: int, tp_size: int, min_rows: int
    ) -> list[int] | None:
        return ["vLLM's", min_rows]  # type: ignore[list-item]

    return op, kpool, gate, plan


def compute_token_to_req_indices(
    query_start_loc: torch.Tensor, out: torch.Tensor, num_mapped_tokens: int, num_tokens: int
) -> torch.Tensor:
    out[:num_tokens] = -5
    return out[:num_tokens]


def install(monkeypatch: pytest.MonkeyPatch) -> World:
    """Put the modules in place for one test."""
    world = World()
    op, kpool, gate, plan = _ops(world)
    broken = eager_break_during_capture(op)

    class DeepseekV32IndexerMetadataBuilder:
        def build(self) -> Any:
            return module.tp_prefill_row_sharding_supported, module.balanced_prefill_row_shard

    names: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.platforms": {"current_platform": world.platform},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.config": {"CUDAGraphMode": CUDAGraphMode, "get_current_vllm_config_or_none": lambda: None},
        "vllm.forward_context": {
            "get_forward_context": lambda: world.context,
            "override_forward_context": world.override,
        },
        "vllm.distributed": {"get_tp_group": lambda: world.tp},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.mla": {},
        "vllm.v1.attention.ops": {},
        INDEXER: {
            "tp_prefill_row_sharding_supported": gate,
            "balanced_prefill_row_shard": plan,
            "DeepseekV32IndexerPrefillMetadata": Prefill,
            "DeepseekV32IndexerMetadata": Metadata,
            "DeepseekV32IndexerPrefillChunkMetadata": Chunk,
            "DeepseekV32IndexerMetadataBuilder": DeepseekV32IndexerMetadataBuilder,
        },
        ROCM: {OP: broken, "eager_break_during_capture": eager_break_during_capture},
        OPS: {OP: broken},
        MAP: {"compute_token_to_req_indices": compute_token_to_req_indices},
        "vllm.v1.attention.backends.mla.sparse_swa": {"compute_token_to_req_indices": compute_token_to_req_indices},
        "vllm.models": {},
        "vllm.models.deepseek_v41": {OP: broken},
        "vllm.models.glm5next": {},
        "vllm.models.glm5next.amd": {},
        KPOOL: {"sparse_attn_indexer_kpool": kpool, "eager_break_during_capture": eager_break_during_capture},
    }
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for name, contents in names.items():
        made = ModuleType(name)
        made.__spec__ = importlib.machinery.ModuleSpec(name, None, origin="a stand-in")
        made.__path__ = []  # type: ignore[attr-defined]
        vars(made).update(contents)
        world.modules[name] = made
        monkeypatch.setitem(sys.modules, name, made)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(world.modules[parent], child, made)
    module = world.modules[INDEXER]

    def dispatch(name: str, function: Any) -> None:
        world.dispatched[name] = function

    monkeypatch.setattr("portable_indexer.vllm_plugin.rocm_op.replace_in_dispatcher", dispatch)
    monkeypatch.setattr("portable_indexer.vllm_plugin.cuda_op.replace_in_dispatcher", dispatch)
    monkeypatch.setattr("portable_indexer.vllm_plugin.registration._registered", False)
    monkeypatch.setattr("portable_indexer.vllm_plugin.on_import._waiting", {})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    from portable_indexer.vllm_plugin import hooks

    hooks.states.clear()
    for name in ("PORTABLE_INDEXER_VLLM", "PORTABLE_INDEXER_VLLM_KERNELS", "PORTABLE_INDEXER_SHARD"):
        monkeypatch.delenv(name, raising=False)
    return world
