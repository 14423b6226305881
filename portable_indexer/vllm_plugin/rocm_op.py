"""The hook into vLLM's ROCm indexer op, ``vllm::rocm_aiter_sparse_attn_indexer``.

Serves the models whose indexer runs it: DeepSeek-V3.2, V4 and V4.1 (its layers without candidate blocks), GLM-5
to 5.3, and others of that shape, with an fp8 key cache.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from portable_indexer.vllm_plugin.hooks import (
    Hook,
    Inactive,
    attribute,
    log,
    names_in,
    parameters_of,
    rebind,
    refuse_second,
    require_fields,
    vendor,
)
from portable_indexer.vllm_plugin.indexer_op import Form, IndexerOp
from portable_indexer.vllm_plugin.own_kernels import OwnKernels
from portable_indexer.vllm_plugin.settings import Settings
from portable_indexer.vllm_plugin.step import CHUNK_FIELDS, METADATA_FIELDS, PREFILL_FIELDS

if TYPE_CHECKING:
    import torch

OP = "rocm_aiter_sparse_attn_indexer"
DEFINED_IN = "vllm.v1.attention.ops.rocm_aiter_mla_sparse"
_REQUIRED = {
    "hidden_states",
    "k_cache_prefix",
    "kv_cache",
    "q_fp8",
    "k",
    "weights",
    "topk_tokens",
    "head_dim",
    "total_seq_lens",
    "topk_indices_buffer",
    "skip_k_cache_insert",
    "compress_ratio",
}
_KNOWN = _REQUIRED | {
    "quant_block_size",
    "scale_fmt",
    "max_model_len",
    "candidate_blocks",
    "candidate_block_size",
    "candidate_write",
}
_GATHER = {"k_cache", "k_fp8", "k_fp8_scale", "block_table", "cu_seqlen", "token_to_seq", "cache_layout"}
FORM = Form(
    rows=("hidden_states", "q_fp8", "weights", "topk_indices_buffer"),
    width=lambda call: int(call["topk_tokens"]),
    whole=lambda call, metadata, context: False,
)
# A torch.library registration lives as long as its Library object.
_libraries: list[Any] = []


def replace_in_dispatcher(op: str, function: Any) -> None:
    """vLLM binds an op when it registers it: names alone do not reach calls through ``torch.ops``."""
    import torch
    from vllm.platforms import current_platform

    if not hasattr(torch.ops.vllm, op):
        raise Inactive(f"torch.ops.vllm has no {op}: this build did not register it")
    library = torch.library.Library("vllm", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of every override, and this one is meant
        library.impl(op, function, current_platform.dispatch_key, allow_override=True)
    _libraries.append(library)


def gather_function(module: ModuleType) -> Any:
    """The cache gather of vLLM's ROCm indexer module, or Inactive where it has another form."""
    gather = attribute(module, "cp_gather_indexer_k_quant_cache_triton")
    parameters_of(gather, _GATHER, _GATHER | {"block_tile_size", "head_tile_size"})
    return gather


def own_or_none(settings: Settings, make: Callable[[], OwnKernels]) -> OwnKernels | None:
    """This package's kernels where they were asked for and can stand in, else None."""
    if settings.kernels != "ours":
        return None
    try:
        return make()
    except Inactive as reason:
        log.warning("portable_indexer, kernels: vLLM's are used: %s", reason)
        return None


def active(own: OwnKernels | None) -> str:
    """What a ROCm op's hook says of itself."""
    who = "this package's kernels" if own is not None else "vLLM's kernels"
    return f"prefill rows are sharded and exchanged, scored and selected by {who}"


def _own_kernels(module: ModuleType) -> OwnKernels:
    gather = gather_function(module)
    is_block_flat = attribute(module, "_indexer_k_is_c4a_block_flat")
    if list(inspect.signature(is_block_flat).parameters) != ["compress_ratio"]:
        raise Inactive("this vLLM chooses the cache layout in an unknown way")

    def gather_chunk(call: dict[str, Any], chunk: Any, k: torch.Tensor, scales: torch.Tensor) -> None:
        gather(
            call["kv_cache"],
            k,
            scales,
            chunk.block_table,
            chunk.cu_seq_lens,
            token_to_seq=chunk.token_to_seq,
            # None: values shuffled in 16 x 16 tiles where a block holds several keys.
            cache_layout="NORMAL" if is_block_flat(call["compress_ratio"]) else None,
        )

    manager = attribute(module, "current_workspace_manager")
    return OwnKernels("q_fp8", attribute(module, "FP8_DTYPE"), manager, gather_chunk)


def check_metadata() -> None:
    """Inactive unless vLLM's metadata has the fields that a step is split by."""
    from vllm.v1.attention.backends.mla import indexer

    require_fields(attribute(indexer, "DeepseekV32IndexerMetadata"), *METADATA_FIELDS)
    require_fields(attribute(indexer, "DeepseekV32IndexerPrefillMetadata"), *PREFILL_FIELDS)
    require_fields(attribute(indexer, "DeepseekV32IndexerPrefillChunkMetadata"), *CHUNK_FIELDS)


def stand_aside(function: Any) -> None:
    """Inactive where the op shards rows by itself."""
    own = [name for name in names_in(function) if "shard" in name or "all_gatherv" in name]
    if own:
        raise Inactive(f"this vLLM's op shards rows by itself ({', '.join(sorted(own))}), and is left to it")


def _apply(module: ModuleType, settings: Settings) -> str:
    if vendor(settings) != "rocm":
        raise Inactive("CUDA builds shard by themselves; the row plan's policy serves them")
    defined_in = __import__(DEFINED_IN, fromlist=[OP])
    original = attribute(module, OP)
    refuse_second(original)
    if original is not attribute(defined_in, OP):
        raise Inactive(f"{module.__name__}.{OP} is not {DEFINED_IN}.{OP}: somebody else has replaced it")
    signature = parameters_of(original, _REQUIRED, _KNOWN)
    stand_aside(original)
    if not {"num_prefills", "num_decodes", "num_decode_tokens", "chunks"} <= names_in(original):
        raise Inactive("this vLLM's op does not read the step's metadata in the known way")
    check_metadata()
    own = own_or_none(settings, lambda: _own_kernels(defined_in))
    function = IndexerOp(original, signature, FORM, own).function(
        getattr(defined_in, "eager_break_during_capture", None)
    )
    replace_in_dispatcher(OP, function)
    rebind(original, function)  # for callers of the Python function, such as DeepSeek-V4.1's own indexer layer
    return active(own)


HOOK = Hook("ROCm indexer op", "vllm._aiter_ops", _apply)
