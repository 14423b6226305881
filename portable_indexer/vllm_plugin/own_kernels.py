"""Prefill rows scored and selected by this package's kernels (PORTABLE_INDEXER_VLLM_KERNELS=ours).

Keys are gathered by vLLM's own functions, which know the cache layouts that its writers use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from portable_indexer.vllm_plugin.hooks import log
from portable_indexer.vllm_plugin.scratch import scratch

if TYPE_CHECKING:
    import torch

    from portable_indexer.sharding import PrefillRowShard


@dataclass(frozen=True)
class OwnKernels:
    """Score and select in place of one op of vLLM.

    Attributes:
        q: name of the op's query argument.
        fp8: dtype of the cached keys.
        manager: vLLM's ``current_workspace_manager``.
        gather: ``gather(call, chunk, k, scales)`` copies a chunk's keys out of the cache: k [keys, head_dim] of
            ``fp8``, scales [keys, 4] bytes of float32.
        pooled: whether keys are pools of ``index_kpool`` tokens, and the ids those of tokens.
    """

    q: str
    fp8: torch.dtype
    manager: Callable[[], Any]
    gather: Callable[[dict[str, Any], Any, torch.Tensor, torch.Tensor], None]
    pooled: bool = False

    def take(self, call: dict[str, Any]) -> bool:
        """Whether a fast backend serves these arguments; the answer, with its reason, is logged once."""
        q, weights, ids = call[self.q], call["weights"], call["topk_indices_buffer"]
        if q.dim() != 3 or weights.dim() != 2 or weights.shape[1] != q.shape[1]:
            _refuse(f"q is {list(q.shape)} and weights are {list(weights.shape)}")
            return False
        if not _taken(q.device, q.dtype, weights.dtype, self.fp8, q.shape[1], q.shape[2], self._keys_a_row(call)):
            return False
        width = call["topk_tokens"] + (call["index_kpool"] - 1 if self.pooled else 0)
        if str(ids.dtype) != "torch.int32" or ids.shape[1] < width:
            _refuse(f"the id buffer is {ids.dtype} {list(ids.shape)}, and rows have up to {width} ids")
            return False
        if q.stride(2) != 1 or weights.stride(1) != 1 or ids.stride(1) != 1:
            _refuse("q, weights or the id buffer are not contiguous along their rows")
            return False
        return True

    def _keys_a_row(self, call: dict[str, Any]) -> int:
        topk: int = call["topk_tokens"]
        return topk // call["index_kpool"] if self.pooled else topk

    def workspace_bytes(self, call: dict[str, Any], ranks: int) -> int:
        """Bytes for the largest step of these arguments, the exchange included."""
        rows, columns = call["topk_indices_buffer"].shape
        _, heads, dim = call[self.q].shape
        return _workspace_bytes(rows, call["total_seq_lens"], self._keys_a_row(call), heads, dim, ranks, columns)

    def warm_up(self, call: dict[str, Any]) -> None:
        """Compile before serving."""
        q = call[self.q]
        _warm_up(q.device, q.shape[1], q.shape[2], self._keys_a_row(call))

    def prefill(self, call: dict[str, Any], chunks: list[Any], shard: PrefillRowShard | None) -> None:
        """Fill this rank's rows of the id buffer; all prefill rows where there is no shard."""
        import torch

        from portable_indexer.api import index_topk
        from portable_indexer.exchange.records import checking
        from portable_indexer.pools import pool_topk

        q, weights, topk = call[self.q], call["weights"], call["topk_tokens"]
        buffer, keys = call["topk_indices_buffer"], call["total_seq_lens"]
        positions = call["positions"].to(torch.int32) if self.pooled else None
        all_k, all_scales = self.manager().get_simultaneous(
            ((keys, call["head_dim"]), self.fp8), ((keys, 4), torch.uint8)
        )
        ranks = 1 if shard is None else len(shard.sizes)
        workspace = scratch(buffer.device, self.workspace_bytes(call, ranks))
        for chunk in chunks:
            k, scales = all_k[: chunk.total_seq_lens], all_scales[: chunk.total_seq_lens]
            # On every rank, also one without rows here: later chunks may reuse what was gathered.
            if not chunk.skip_kv_gather:
                if checking():
                    check_blocks(call["kv_cache"], chunk)
                self.gather(call, chunk, k, scales)
            start, end, ks, ke = chunk.token_start, chunk.token_end, chunk.cu_seqlen_ks, chunk.cu_seqlen_ke
            if shard is not None:
                part = shard.narrow(chunk)
                if part is None:
                    continue
                start, end, ks, ke = part
            own = slice(start, end)
            asked = (q[own], (k, scales.view(torch.float32)), weights[own], ks, ke, topk)
            if positions is None:
                index_topk(*asked, out=buffer[own], workspace=workspace)
            else:
                pool, at = call["index_kpool"], positions[own]
                pool_topk(*asked, pool=pool, positions=at, out=buffer[own], workspace=workspace)


def check_blocks(cache: torch.Tensor, chunk: Any) -> None:
    """Under PORTABLE_INDEXER_CHECK=1: the chunk's blocks are blocks of this cache, not of another group's.

    Raises ValueError with the first block id that is not. Waits for the device.
    """
    import torch

    lengths = chunk.cu_seq_lens.diff().cpu()
    table = chunk.block_table.cpu()
    used = torch.arange(table.shape[1]) < -(-lengths // cache.shape[1])[:, None]
    wrong = used & ((table < 0) | (table >= cache.shape[0]))
    if wrong.any():
        request, entry = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"block_table must hold blocks of this layer's cache, 0 to {cache.shape[0] - 1}, got block "
            f"{int(table[request, entry])} for keys {entry * cache.shape[1]} on of request {request}"
        )


@lru_cache(maxsize=32)
def _warm_up(device: torch.device, num_heads: int, head_dim: int, topk: int) -> None:
    from portable_indexer.warmup import warmup

    log.info("portable_indexer, kernels: %d variants compiled", warmup(num_heads, head_dim, topk, device=device))


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
        _refuse(reason)
    return reason is None


@lru_cache(maxsize=32)
def _refuse(reason: str) -> None:
    log.warning("portable_indexer, kernels: vLLM's are used: %s", reason)


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
def _workspace_bytes(rows: int, keys: int, topk: int, num_heads: int, head_dim: int, ranks: int, columns: int) -> int:
    from portable_indexer.workspace import workspace_bytes

    return workspace_bytes(rows, keys, topk, num_heads, head_dim, ranks, columns)
