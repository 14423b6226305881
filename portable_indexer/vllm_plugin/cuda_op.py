"""The hook into vLLM's CUDA indexer op, ``vllm::sparse_attn_indexer``, only under PORTABLE_INDEXER_VLLM_KERNELS=ours.

vLLM shards this op's rows by itself. What changes is who scores, selects and exchanges them; the row plan's hook
decides which steps are sharded either way.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from portable_indexer.vllm_plugin.hooks import (
    Hook,
    Inactive,
    attribute,
    names_in,
    parameters_of,
    rebind,
    refuse_second,
    vendor,
)
from portable_indexer.vllm_plugin.indexer_op import Form, IndexerOp
from portable_indexer.vllm_plugin.own_kernels import OwnKernels
from portable_indexer.vllm_plugin.rocm_op import check_metadata, replace_in_dispatcher
from portable_indexer.vllm_plugin.settings import Settings

if TYPE_CHECKING:
    import torch

OP = "sparse_attn_indexer"
_REQUIRED = {
    "hidden_states",
    "k_cache_prefix",
    "kv_cache",
    "q_quant",
    "q_scale",
    "k",
    "weights",
    "topk_tokens",
    "head_dim",
    "total_seq_lens",
    "topk_indices_buffer",
    "skip_k_cache_insert",
    "use_pcp",
    "dense_mha_metadata_layer_name",
    "use_fp4_cache",
    "dcp_world_size",
}
_KNOWN = _REQUIRED | {
    "quant_block_size",
    "scale_fmt",
    "max_model_len",
    "pcp_shard_decode_requests",
    "dcp_rank",
    "cp_kv_cache_interleave_size",
    "skip_topk_buffer_clear",
    "candidate_blocks",
    "candidate_block_size",
    "candidate_write",
    "topk_backend",
}
_GATHER = {"kv_cache", "dst_k", "dst_scale", "block_table", "cu_seq_lens"}


def _whole(call: dict[str, Any], metadata: Any, context: Any) -> bool:
    """Other key formats, context parallelism, and steps whose ids vLLM's dense attention will not read."""
    if call["use_fp4_cache"] or call["q_scale"] is not None or call["use_pcp"] or call["dcp_world_size"] != 1:
        return True
    name = call["dense_mha_metadata_layer_name"]
    name = name if isinstance(name, str) else name.value
    prefill = getattr(context.attn_metadata.get(name), "prefill", None) if name else None
    return bool(getattr(prefill, "use_dense_mha", False))


FORM = Form(
    rows=("hidden_states", "q_quant", "weights", "topk_indices_buffer"),
    width=lambda call: int(call["topk_tokens"]),
    whole=_whole,
    shards=True,
)


def _own_kernels(module: ModuleType) -> OwnKernels:
    gather = attribute(attribute(module, "ops"), "cp_gather_indexer_k_quant_cache")
    parameters_of(gather, _GATHER, _GATHER)

    def gather_chunk(call: dict[str, Any], chunk: Any, k: torch.Tensor, scales: torch.Tensor) -> None:
        if chunk.total_seq_lens > 0:
            gather(call["kv_cache"], k, scales, chunk.block_table, chunk.cu_seq_lens)

    fp8 = attribute(module, "current_platform").fp8_dtype()
    return OwnKernels("q_quant", fp8, attribute(module, "current_workspace_manager"), gather_chunk)


def _apply(module: ModuleType, settings: Settings) -> str:
    if settings.kernels != "ours":
        raise Inactive("vLLM's kernels were asked for")
    if vendor(settings) == "rocm" and settings.mode != "on":
        raise Inactive("this build runs the ROCm op")
    original = attribute(module, OP)
    refuse_second(original)
    signature = parameters_of(original, _REQUIRED, _KNOWN)
    if not {"num_prefills", "num_decodes", "num_decode_tokens", "chunks"} <= names_in(original):
        raise Inactive("this vLLM's op does not read the step's metadata in the known way")
    check_metadata()
    mx_scales = getattr(module, "mqa_logits_use_mx_scales", None)
    if mx_scales is not None and mx_scales():
        raise Inactive("this GPU's key cache has MX scales")
    function = IndexerOp(original, signature, FORM, _own_kernels(module)).function(
        getattr(module, "eager_break_during_capture", None)
    )
    replace_in_dispatcher(OP, function)
    rebind(original, function)
    return "prefill rows are scored, selected and exchanged by this package's kernels"


HOOK = Hook("CUDA indexer op", "vllm.model_executor.layers.sparse_attn_indexer", _apply)
