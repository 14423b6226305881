"""Lets vLLM's CPU build run its ROCm indexer op, so that a whole engine can be looked at without a GPU.

Its CPU path calls kernels of its own. Here the indexer layer calls the ROCm op instead, which finds DeepSeek-V4's
block-flat key cache as that model's CPU compressor wrote it; the op's compiled selections are PyTorch, and its
Triton kernels are interpreted.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from portable_indexer.vllm_plugin.on_import import when_imported

OUT = "PORTABLE_INDEXER_E2E"


def prepare() -> None:
    """Callbacks for the modules to come; nothing is imported now."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    when_imported("triton.backends", _cpu_backend)
    when_imported("triton.runtime.interpreter", _masked_store)
    when_imported("vllm._aiter_ops", _register)
    when_imported("vllm.model_executor.layers.sparse_attn_indexer", _redirect)
    when_imported("vllm.models.deepseek_v4.cpu.cpu_mla", _tile_scheduler)
    when_imported("vllm.model_executor.model_loader.weight_utils", _weights)


def _cpu_backend(module: ModuleType) -> None:
    driver = SimpleNamespace(is_active=lambda: True)
    module.backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)


def _masked_store(module: ModuleType) -> None:
    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return module._interpreter.store(ptrs.data, value.data, mask.data.astype(bool))

    module.InterpreterBuilder.create_masked_store = create_masked_store


def _register(module: ModuleType) -> None:
    import world

    world.define_selection()
    world.register_stock_op()


def _redirect(module: ModuleType) -> None:
    """The layer's CPU path becomes the ROCm one; what it chose, and what it would have chosen, is kept on disk."""
    import torch

    calls: dict[str, int] = defaultdict(int)

    def forward(self: Any, hidden_states: Any, q_quant: Any, k: Any, weights: Any) -> Any:
        from vllm.forward_context import get_forward_context, override_forward_context
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
        found = {
            "ids": ids[:rows, : self.topk_tokens].clone(),
            "decode": mine.num_decode_tokens,
            "requests": (mine.num_decodes, mine.num_prefills),
            "sizes": getattr(mine.prefill, "row_shard_sizes", None),
        }
        if found["sizes"] is not None:
            # The same step again, replicated, into buffers of its own: by the plugin, and by vLLM's op alone.
            from portable_indexer.vllm_plugin.step import with_metadata

            whole = replace(mine, prefill=replace(mine.prefill, row_shard_sizes=None))
            stock = sys.modules["vllm._aiter_ops"].rocm_aiter_sparse_attn_indexer.__portable_indexer_original__
            for name, function in (("replicated", op), ("stock", stock)):
                buffer = torch.full_like(self.topk_indices_buffer, -3)
                with override_forward_context(with_metadata(context, prefix, whole)):
                    function(**call | {"topk_indices_buffer": buffer})
                found[name] = buffer[:rows, : self.topk_tokens].clone()
        rank = torch.distributed.get_rank()
        torch.save(found, Path(os.environ[OUT]) / f"{prefix}-{calls[prefix]:04d}-rank{rank}.pt")
        calls[prefix] += 1
        return ids

    module.SparseAttnIndexer.forward_cpu = forward
    module.SparseAttnIndexer.forward_native = forward


def _tile_scheduler(module: ModuleType) -> None:
    # This build's dictionary lacks a key that its caller asks for.
    module.DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = lambda self, tokens: defaultdict(lambda: None)


def _weights(module: ModuleType) -> None:
    """Weights that tell rows apart, other ones for each tensor, the same in every run of a rank."""
    import torch

    original, count = module.initialize_single_dummy_weight, iter(range(1 << 30))

    def initialize(parameter: Any, *rest: Any, **more: Any) -> None:
        original(parameter, *rest, **more)
        if not torch.is_floating_point(parameter) or (parameter.dtype.itemsize == 1 and parameter.dim() < 2):
            return
        generator = torch.Generator().manual_seed(1000 + next(count))
        fresh = torch.empty(parameter.shape, dtype=torch.float32).uniform_(-1, 1, generator=generator)
        if parameter.dim() < 2:
            fresh = 1.0 + 0.2 * fresh  # norms
        elif parameter.dtype == torch.float32:
            fresh = 0.05 + 0.02 * fresh.abs()  # block scales
        elif parameter.dtype.itemsize == 2:
            fresh = 0.05 * fresh
        if parameter.dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn):
            parameter.data.copy_(fresh.to(parameter.dtype))

    module.initialize_single_dummy_weight = initialize
