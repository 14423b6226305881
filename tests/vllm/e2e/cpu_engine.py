"""Lets vLLM's CPU build run its ROCm indexer op, so that a whole engine can be looked at without a GPU.

Its CPU path calls kernels of its own. Here the indexer layer calls the ROCm op instead, which finds DeepSeek-V4's
block-flat key cache as that model's CPU compressor wrote it; the op's compiled selections are PyTorch, and its
Triton kernels are interpreted.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from portable_indexer.vllm_plugin.on_import import when_imported

OUT = "PORTABLE_INDEXER_E2E"
FORGET = "PORTABLE_INDEXER_E2E_FORGET"  # ids that attention does not get to see, to prove that answers need them


def prepare() -> None:
    """Callbacks for the modules to come; nothing is imported now."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    when_imported("triton.backends", _cpu_backend)
    when_imported("triton.runtime.interpreter", _masked_store)
    when_imported("vllm._custom_ops", _experts)
    when_imported("vllm._aiter_ops", _register)
    when_imported("vllm.model_executor.layers.sparse_attn_indexer", _redirect)
    when_imported("vllm.models.deepseek_v4.cpu.cpu_mla", _mla)
    when_imported("vllm.v1.worker.utils", _zeroer)
    when_imported("vllm.v1.attention.backends.mla.sparse_swa", _window)


def _cpu_backend(module: ModuleType) -> None:
    driver = SimpleNamespace(is_active=lambda: True)
    module.backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)


def _masked_store(module: ModuleType) -> None:
    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return module._interpreter.store(ptrs.data, value.data, mask.data.astype(bool))

    module.InterpreterBuilder.create_masked_store = create_masked_store


def _experts(module: ModuleType) -> None:
    """vLLM 0.33 names the activation to its compiled library; that of 0.32 knows the default one only."""
    original = module.fused_experts_cpu
    signature = inspect.signature(original)
    if "act_method" not in signature.parameters:
        return

    def fused_experts_cpu(*args: Any, **kwargs: Any) -> Any:
        import torch

        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        operator = torch.ops._C.fused_experts_cpu
        if len(operator.default._schema.arguments) == len(signature.parameters):
            return original(*args, **kwargs)
        if call.arguments.pop("act_method") != signature.parameters["act_method"].default:
            raise ValueError("the compiled library of vLLM 0.32 has one activation")
        return operator(**call.arguments)  # by name: the operator has another order than the function

    module.fused_experts_cpu = fused_experts_cpu


def _register(module: ModuleType) -> None:
    import world

    world.define_selection()
    world.register_stock_op()


def _redirect(module: ModuleType) -> None:
    """The layer's CPU path becomes the ROCm one; what it was asked and what it chose is kept on disk."""
    import torch

    calls: dict[str, int] = defaultdict(int)

    def forward(self: Any, hidden_states: Any, q_quant: Any, k: Any, weights: Any) -> Any:
        from vllm.forward_context import get_forward_context
        from vllm.v1.worker.workspace import init_workspace_manager, is_workspace_manager_initialized

        torch.accelerator.empty_cache = lambda: None
        if not is_workspace_manager_initialized():
            init_workspace_manager(torch.device("cpu"))
        op, prefix = torch.ops.vllm.rocm_aiter_sparse_attn_indexer, self.k_cache.prefix
        call = {
            "hidden_states": hidden_states,
            "k_cache_prefix": module._encode_layer_name(prefix),
            "kv_cache": self.k_cache.kv_cache,
            "q_fp8": q_quant,
            "k": k,
            "weights": weights.float().contiguous(),
            "quant_block_size": self.quant_block_size,
            "scale_fmt": self.scale_fmt,
            "topk_tokens": self.topk_tokens,
            "head_dim": self.head_dim,
            "max_model_len": self.max_model_len,
            "total_seq_lens": 4 * self.max_model_len,
            "topk_indices_buffer": self.topk_indices_buffer,
            "skip_k_cache_insert": self.skip_k_cache_insert,
            "compress_ratio": self.compress_ratio,
        }
        ids = op(**call)
        context = get_forward_context()
        if not isinstance(context.attn_metadata, dict):
            return ids
        mine = context.attn_metadata[prefix]
        rows = mine.num_decode_tokens + mine.num_prefill_tokens
        request, visible = _rows(mine)
        found = {
            "ids": ids[:rows, : self.topk_tokens].clone(),
            "decode": mine.num_decode_tokens,
            "sizes": getattr(mine.prefill, "row_shard_sizes", None),
            "chunks": [chunk.skip_kv_gather for chunk in mine.prefill.chunks] if mine.prefill is not None else [],
            "q": q_quant[:rows].view(torch.uint8).clone(),
            "weights": call["weights"][:rows].clone(),
            "request": request,
            "visible": visible,
        }
        # Attention adds in the order of the ids; vLLM's kernels and this package's order them differently.
        ordered = torch.where(ids < 0, torch.iinfo(ids.dtype).max, ids).sort(dim=1).values
        for entry in map(int, os.environ.get(FORGET, "").split()):
            ordered[ordered == entry] = torch.iinfo(ids.dtype).max
        ids.copy_(torch.where(ordered == torch.iinfo(ids.dtype).max, -1, ordered))
        rank = torch.distributed.get_rank()
        torch.save(found, Path(os.environ[OUT]) / f"{prefix}-{calls[prefix]:04d}-rank{rank}.pt")
        calls[prefix] += 1
        return ids

    module.SparseAttnIndexer.forward_cpu = forward
    module.SparseAttnIndexer.forward_native = forward


def _rows(metadata: Any) -> tuple[Any, Any]:
    """For each row its request, named by its first cache block, and how many entries it may see."""
    import torch

    request, visible = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    if metadata.decode is not None:
        request.append(metadata.decode.block_table[: metadata.num_decodes, 0].long())
        visible.append(metadata.decode.seq_lens[: metadata.num_decodes].flatten().long())
    for chunk in metadata.prefill.chunks if metadata.prefill is not None else ():
        owner = torch.searchsorted(chunk.cu_seq_lens, chunk.cu_seqlen_ks, right=True) - 1
        request.append(chunk.block_table[owner.clamp(0, len(chunk.block_table) - 1), 0].long())
        visible.append((chunk.cu_seqlen_ke - chunk.cu_seqlen_ks).long())
    return torch.cat(request), torch.cat(visible)


def _mla(module: ModuleType) -> None:
    # This build's dictionary lacks a key that its caller asks for.
    module.DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = lambda self, tokens: defaultdict(lambda: None)
    # Its builder makes one chunk of a step; the other builds' chunks are wanted here.
    del module.DeepseekV4CPUIndexerMetadataBuilder._split_indexer_prefill_chunks


def _zeroer(module: ModuleType) -> None:
    """New blocks are cleared by memset: interpreted, vLLM's kernel takes most of a run."""

    def zero_block_ids(self: Any, block_ids: list[int]) -> None:
        if not block_ids or self._meta is None:
            return
        addresses, strides, sizes = (part.tolist() for part in self._meta[:3])
        for address, stride, size in zip(addresses, strides, sizes, strict=True):
            for block in block_ids:
                ctypes.memset(address + 4 * stride * block, 0, 4 * size)

    module.KVBlockZeroer.zero_block_ids = zero_block_ids


def _window(module: ModuleType) -> None:
    # The CPU attention finds its window by itself, and reads nothing of what this kernel would write in minutes.
    module._COMPUTE_SWA_INDICES_AND_LENS_KERNEL = lambda *args, **kwargs: None
