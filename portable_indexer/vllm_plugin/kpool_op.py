"""The hook into GLM-5.3-Flash's pooled indexer on AMD, ``sparse_attn_indexer_kpool`` with pools of several keys."""

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
from portable_indexer.vllm_plugin.rocm_op import (
    DEFINED_IN,
    active,
    check_metadata,
    gather_function,
    own_or_none,
    stand_aside,
)
from portable_indexer.vllm_plugin.settings import Settings

if TYPE_CHECKING:
    import torch

OP = "sparse_attn_indexer_kpool"
_REQUIRED = {
    "hidden_states",
    "k_cache_prefix",
    "kv_cache",
    "q_quant",
    "k",
    "weights",
    "topk_tokens",
    "topk_indices_buffer",
    "skip_k_cache_insert",
    "use_fp4_cache",
    "gate_score",
    "index_kpool",
    "positions",
}
_KNOWN = _REQUIRED | {
    "q_scale",
    "quant_block_size",
    "scale_fmt",
    "head_dim",
    "max_pool_len",
    "total_seq_lens",
    "compress_ape",
    "tail_kv_cache",
    "tail_prefix",
    "topk_backend",
}


def _width(call: dict[str, Any]) -> int:
    """Ids of the chosen pools' tokens and of the tokens behind the last whole pool."""
    return min(int(call["topk_indices_buffer"].shape[1]), int(call["topk_tokens"]) + int(call["index_kpool"]) - 1)


def _whole(call: dict[str, Any], metadata: Any, context: Any) -> bool:
    """Steps in which every prompt fits into the top-k are filled in without scores, on every rank."""
    longest = metadata.prefill.max_prefill_seq_len
    unknown = call["use_fp4_cache"] or call["positions"] is None or call["index_kpool"] < 2
    return bool(unknown or longest <= call["topk_tokens"])


FORM = Form(
    rows=("hidden_states", "q_quant", "q_scale", "weights", "topk_indices_buffer", "gate_score", "positions"),
    width=_width,
    whole=_whole,
)


def _own_kernels(module: ModuleType) -> OwnKernels:
    """Pools come out of the cache by the gather that the op itself imports, in the layout that it asks for."""
    gather = gather_function(__import__(DEFINED_IN, fromlist=[OP]))

    def gather_chunk(call: dict[str, Any], chunk: Any, k: torch.Tensor, scales: torch.Tensor) -> None:
        gather(call["kv_cache"], k, scales, chunk.block_table, chunk.cu_seq_lens, token_to_seq=chunk.token_to_seq)

    fp8 = attribute(module, "current_platform").fp8_dtype()
    return OwnKernels("q_quant", fp8, attribute(module, "current_workspace_manager"), gather_chunk, pooled=True)


def _apply(module: ModuleType, settings: Settings) -> str:
    if vendor(settings) != "rocm":
        raise Inactive("CUDA builds shard by themselves")
    original = attribute(module, OP)
    refuse_second(original)
    signature = parameters_of(original, _REQUIRED, _KNOWN)
    stand_aside(original)
    if not {"num_prefills", "num_decodes", "num_decode_tokens", "max_prefill_seq_len"} <= names_in(original):
        raise Inactive("this vLLM's op does not read the step's metadata in the known way")
    check_metadata()
    own = own_or_none(settings, lambda: _own_kernels(module))
    function = IndexerOp(original, signature, FORM, own).function(getattr(module, "eager_break_during_capture", None))
    rebind(original, function)
    return active(own)


HOOK = Hook("GLM k-pool op (AMD)", "vllm.models.glm5next.amd.sparse_indexer", _apply)
