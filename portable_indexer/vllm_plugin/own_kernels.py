"""Prefill rows scored and selected by this package's kernels (PORTABLE_INDEXER_VLLM_KERNELS=ours).

Keys are gathered by vLLM's own function, which knows the cache layouts that its writers use.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from portable_indexer.vllm_plugin.hooks import Inactive, attribute, log, parameters_of
from portable_indexer.vllm_plugin.scratch import scratch

if TYPE_CHECKING:
    import torch

    from portable_indexer.sharding import PrefillRowShard

_GATHER = {"k_cache", "k_fp8", "k_fp8_scale", "block_table", "cu_seqlen", "token_to_seq", "cache_layout"}
_TILES = {"block_tile_size", "head_tile_size"}


class OwnKernels:
    """Gather, score and select with the names of vLLM's ROCm indexer module.

    Raises:
        Inactive: the module's gather has another form than the one that this was written for.
    """

    def __init__(self, module: ModuleType) -> None:
        self._gather = attribute(module, "cp_gather_indexer_k_quant_cache_triton")
        parameters_of(self._gather, _GATHER, _GATHER | _TILES)
        self._is_block_flat = attribute(module, "_indexer_k_is_c4a_block_flat")
        if list(inspect.signature(self._is_block_flat).parameters) != ["compress_ratio"]:
            raise Inactive("this vLLM chooses the cache layout in an unknown way")
        self._manager = attribute(module, "current_workspace_manager")
        self._fp8 = attribute(module, "FP8_DTYPE")

    def take(self, call: dict[str, Any]) -> bool:
        """Whether a fast backend serves these arguments; the answer, with its reason, is logged once."""
        q, weights = call["q_fp8"], call["weights"]
        return _taken(
            q.device, q.dtype, weights.dtype, self._fp8, q.shape[1], q.shape[2], call["topk_tokens"]
        )

    def workspace_bytes(self, call: dict[str, Any], ranks: int) -> int:
        """Bytes for the largest step of these arguments, the exchange included."""
        buffer, q = call["topk_indices_buffer"], call["q_fp8"]
        rows, columns = buffer.shape
        return _workspace_bytes(
            rows, call["total_seq_lens"], call["topk_tokens"], q.shape[1], q.shape[2], ranks, columns
        )

    def prefill(self, call: dict[str, Any], chunks: list[Any], shard: PrefillRowShard | None) -> None:
        """Fill this rank's rows of the id buffer; all prefill rows where there is no shard."""
        import torch

        from portable_indexer.api import index_topk

        q, weights, topk = call["q_fp8"], call["weights"], call["topk_tokens"]
        buffer, keys = call["topk_indices_buffer"], call["total_seq_lens"]
        all_k, all_scales = self._manager().get_simultaneous(
            ((keys, call["head_dim"]), self._fp8), ((keys, 4), torch.uint8)
        )
        layout = "NORMAL" if self._is_block_flat(call["compress_ratio"]) else None
        ranks = 1 if shard is None else len(shard.sizes)
        workspace = scratch(buffer.device, self.workspace_bytes(call, ranks))
        for chunk in chunks:
            k, scales = all_k[: chunk.total_seq_lens], all_scales[: chunk.total_seq_lens]
            # On every rank, also one without rows here: later chunks may reuse what was gathered.
            if not chunk.skip_kv_gather:
                self._gather(
                    call["kv_cache"],
                    k,
                    scales,
                    chunk.block_table,
                    chunk.cu_seq_lens,
                    token_to_seq=chunk.token_to_seq,
                    cache_layout=layout,
                )
            start, end, ks, ke = chunk.token_start, chunk.token_end, chunk.cu_seqlen_ks, chunk.cu_seqlen_ke
            if shard is not None:
                part = shard.narrow(chunk)
                if part is None:
                    continue
                start, end, ks, ke = part
            index_topk(
                q[start:end],
                (k, scales.view(torch.float32)),
                weights[start:end],
                ks,
                ke,
                topk,
                out=buffer[start:end],
                workspace=workspace,
            )


@lru_cache(maxsize=32)
def _taken(
    device: torch.device,
    q_dtype: torch.dtype,
    weights_dtype: torch.dtype,
    k_dtype: torch.dtype,
    num_heads: int,
    head_dim: int,
    topk: int,
) -> bool:
    reason = _why_not(device, q_dtype, weights_dtype, k_dtype, num_heads, head_dim, topk)
    if reason is not None:
        log.warning("portable_indexer, kernels: vLLM's are used: %s", reason)
    return reason is None


def _why_not(
    device: torch.device,
    q_dtype: torch.dtype,
    weights_dtype: torch.dtype,
    k_dtype: torch.dtype,
    num_heads: int,
    head_dim: int,
    topk: int,
) -> str | None:
    import torch

    from portable_indexer.backend import FP8_ENCODINGS, Problem, check_topk
    from portable_indexer.device import detect
    from portable_indexer.registry import resolve

    if q_dtype not in FP8_ENCODINGS:
        return f"q is {q_dtype}"
    if weights_dtype != torch.float32:
        return f"weights are {weights_dtype}"
    try:
        check_topk(topk)
        problem = Problem("index_topk", device, 1, 1, num_heads, head_dim, topk, q_dtype, k_dtype)
        backend = resolve(detect(device), problem)
    except ValueError as error:
        return str(error)
    if backend.name == "reference" and device.type != "cpu":
        return f"no fast backend serves {num_heads} heads of {head_dim} on {device}"
    return None


@lru_cache(maxsize=32)
def _workspace_bytes(
    rows: int, keys: int, topk: int, num_heads: int, head_dim: int, ranks: int, columns: int
) -> int:
    from portable_indexer.workspace import workspace_bytes

    return workspace_bytes(rows, keys, topk, num_heads, head_dim, ranks, columns)
