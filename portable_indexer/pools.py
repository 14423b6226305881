"""The k-pool form of the indexer: keys are pools of tokens, ids come back in tokens."""

from __future__ import annotations

import torch

from portable_indexer._checks import check_device, check_integer, describe
from portable_indexer.api import backend_for, index_topk
from portable_indexer.backend import KV, Problem, check_out_ids
from portable_indexer.workspace import Workspace


def pool_topk(
    q: torch.Tensor,
    kv: KV,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    topk: int,
    *,
    pool: int,
    positions: torch.Tensor,
    out: torch.Tensor | None = None,
    backend: str | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """Choose each row's best pools and return their tokens, with the newest tokens that no pool holds yet.

    Keys are complete pools of ``pool`` tokens: pool p of a row holds its tokens ``p * pool`` to
    ``p * pool + pool - 1``. The ``topk // pool`` best visible pools are chosen as by ``index_topk``.
    The tail, tokens from ``pool * (cu_seqlen_ke - cu_seqlen_ks)`` up to the row's position, is always
    part of the answer; where room is short it goes before the pools.

    Args:
        q, kv, weights: as for ``index_topk``, with one key a pool.
        cu_seqlen_ks, cu_seqlen_ke: [M] int32, in pools.
        topk: tokens from pools, ``pool`` to 4,096.
        pool: tokens of a pool, at least 1.
        positions: [M] int32, the row's own token, counted from the first token of its request.
        out: int32 [M, at least topk + pool - 1], row pitch free; further columns are left as they were.
        backend, workspace: as for ``index_topk``.

    Returns:
        ``out``, or a new int32 [M, topk + pool - 1]: row-local token ids ascending, then -1.

    Raises:
        TypeError, ValueError: an argument is not as above; nothing is written then.
    """
    problem, _, _ = Problem.of_scores("pool_topk", q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, topk)
    topk, pool = problem.topk, check_integer("pool", pool)
    if not 1 <= pool <= topk:
        raise ValueError(f"pool must be from 1 to topk = {topk}, got {pool}")
    rows, width = problem.num_rows, topk + pool - 1
    if not isinstance(positions, torch.Tensor) or positions.dtype != torch.int32:
        raise TypeError(f"positions must be torch.int32, got {describe(positions)}")
    if tuple(positions.shape) != (rows,) or not positions.is_contiguous():
        raise ValueError(f"positions must be contiguous [{rows}], got {describe(positions)}")
    check_device("positions", positions, q.device)
    if out is not None:
        check_out_ids("out", out, rows, width, q.device)
    tokens = torch.empty((rows, width), dtype=torch.int32, device=q.device) if out is None else out
    # Pool ids stand where their tokens will: in the first columns.
    ids = tokens[:, : topk // pool]
    index_topk(
        *(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, topk // pool), out=ids, backend=backend, workspace=workspace
    )
    chosen = backend_for(problem, backend)
    chosen.expand_pools(ids, cu_seqlen_ks, cu_seqlen_ke, positions, pool, tokens[:, :width])
    return tokens
