"""The public operations: each checks its arguments, picks a backend and calls it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from portable_indexer._checks import check_device, check_float32, check_output, describe
from portable_indexer.backend import KV, Backend, Problem, check_out_ids
from portable_indexer.device import detect
from portable_indexer.exchange import failure_reported
from portable_indexer.registry import resolve
from portable_indexer.sharding import PrefillRowShard
from portable_indexer.workspace import Workspace, logits_budget, persistent_workspace

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def backend_for(problem: Problem, name: str | None) -> Backend:
    """The backend that serves a problem where its tensors are."""
    return resolve(detect(problem.device), problem, name)


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: KV,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    clean_logits: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Multi-query logits of every query row against its keys.

    ``logits[m, n] = k_scale[n] * sum_h weights[m, h] * relu(q[m, h] . k[n])`` in float32, for
    ``max(ks[m], 0) <= n < min(ke[m], N)``; columns are absolute.

    Args:
        q: [M, H, D] float8_e4m3fn or float8_e4m3fnuz.
        kv: (k [N, D] fp8 of either encoding, k_scale [N] or [N, 1] float32).
        weights: [M, H] float32, any sign.
        cu_seqlen_ks, cu_seqlen_ke: [M] int32, first and one past the last key of each row.
        out: [M, N] float32 to write into, row pitch free. Allocated, uninitialised, where None.
        clean_logits: fill all columns outside [ks, ke) with -inf; otherwise they are left as they were.
        backend: name of a backend; where None, ``resolve`` chooses.

    Returns:
        ``out``. NaN operands give NaN logits, in their own columns only.

    Raises:
        TypeError, ValueError: an argument's dtype, shape, device or layout is not as above, or the
            named backend cannot serve; nothing is written then.
    """
    problem, k, k_scale = Problem.of_scores("fp8_mqa_logits", q, kv, weights, cu_seqlen_ks, cu_seqlen_ke)
    shape = (problem.num_rows, problem.num_keys)
    if out is not None:
        check_output("out", out)
        check_float32("out", out)
        check_device("out", out, q.device)
        if tuple(out.shape) != shape:
            raise ValueError(f"out must be {list(shape)}, got {describe(out)}")
    chosen = backend_for(problem, backend)
    if out is None:
        out = torch.empty(shape, dtype=torch.float32, device=q.device)
    chosen.fp8_mqa_logits(q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, out, clean_logits)
    return out


def top_k_per_row(
    logits: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    topk: int,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The ``topk`` best keys of every row, as ids relative to ``ks``.

    The set is defined by (score descending, index ascending); NaN counts as -inf, -0.0 equals 0.0.
    Ids stand ascending in each row, then -1: also where a row has fewer than ``topk`` keys.

    Args:
        logits: [M, N] float32, row pitch free; only [ks, ke) of a row is read.
        cu_seqlen_ks, cu_seqlen_ke: [M] int32.
        topk: 1 to 4,096.
        out: int32 [M, at least topk], row pitch free; columns from ``topk`` on are left as they were.
        backend: name of a backend; where None, ``resolve`` chooses.

    Returns:
        ``out``, or a new int32 [M, topk].

    Raises:
        TypeError, ValueError: as for ``fp8_mqa_logits``.
    """
    problem = Problem.of_logits(logits, cu_seqlen_ks, cu_seqlen_ke, topk)
    topk = problem.topk
    if out is not None:
        check_out_ids("out", out, problem.num_rows, topk, logits.device)
    chosen = backend_for(problem, backend)
    if out is None:
        out = torch.empty((problem.num_rows, topk), dtype=torch.int32, device=logits.device)
    chosen.top_k_per_row(logits, cu_seqlen_ks, cu_seqlen_ke, topk, out[:, :topk])
    return out


def index_topk(
    q: torch.Tensor,
    kv: KV,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    topk: int,
    *,
    out: torch.Tensor | None = None,
    shard: PrefillRowShard | None = None,
    group: ProcessGroup | None = None,
    backend: str | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """Score every row and choose its ``topk`` best keys: ``fp8_mqa_logits`` and ``top_k_per_row`` in one.

    Without a shard all M rows are computed. With one, every rank passes all M rows of the step,
    computes the rows that it owns, and all ranks exchange ids, so that each returns the whole
    result, byte for byte what one rank alone would return. Rows outside
    ``[num_decode_tokens, num_decode_tokens + sum(sizes))`` are then neither read nor written.

    Args:
        q, kv, weights, cu_seqlen_ks, cu_seqlen_ke: as for ``fp8_mqa_logits``.
        topk: 1 to 4,096.
        out: int32 [M, at least topk], row pitch free. Allocated where None, and then -1 in rows
            that nobody owns.
        shard: this rank's part of the plan; its rank and its number of sizes must be the group's.
        group: process group of the exchange; None is the default group if its size fits.
        backend: name of a backend; where None, ``resolve`` chooses.
        workspace: scratch for logits, selection and exchange (``workspace_bytes`` says how much);
            where None, one that the process keeps for the current stream.

    Returns:
        ``out``, or a new int32 [M, topk]: row-local ids ascending, then -1.

    Raises:
        TypeError, ValueError: an argument is not as above, the plan does not fit the rows or the
            group, or the workspace is too small; nothing is written then, and no collective entered.
    """
    # A rank that refuses its arguments must not leave the others waiting for it.
    with nullcontext() if shard is None else failure_reported(group):
        problem, k, k_scale = Problem.of_scores("index_topk", q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, topk)
        rows, topk = problem.num_rows, problem.topk
        if out is not None:
            check_out_ids("out", out, rows, topk, q.device)
        if workspace is not None:
            if not isinstance(workspace, Workspace):
                raise TypeError(f"workspace must be a portable_indexer.Workspace, got {type(workspace).__name__}")
            check_device("workspace", workspace.views(((0,), torch.uint8))[0], q.device)
        if shard is not None:
            if not isinstance(shard, PrefillRowShard):
                raise TypeError(f"shard must be a portable_indexer.PrefillRowShard, got {type(shard).__name__}")
            shard.check(rows, group)
        chosen = backend_for(problem, backend)
        if workspace is not None:
            # Refused here, so that ranks with and without rows agree on it.
            need = chosen.workspace_bytes(problem, 0) if rows else 0
            if workspace.nbytes < need:
                raise ValueError(f"workspace of {workspace.nbytes} bytes is too small: this call needs {need}")
        else:
            nbytes = chosen.workspace_bytes(problem, logits_budget())
            staging = 0 if shard is None else shard.staging_bytes(topk)
            workspace = persistent_workspace(q.device, max(nbytes, staging))
        if out is None:
            out = torch.full((rows, topk), -1, dtype=torch.int32, device=q.device)
    ids = out[:, :topk]
    start, stop = (0, rows) if shard is None else (shard.start, shard.stop)
    own = slice(start, stop)

    def compute() -> None:
        if stop > start:
            chosen.index_topk(
                q[own],
                k,
                k_scale,
                weights[own],
                cu_seqlen_ks[own],
                cu_seqlen_ke[own],
                topk,
                ids[own],
                workspace,
            )

    if shard is None:
        compute()
    else:
        shard.run(compute, out, width=topk, group=group, staging=workspace)
    return out
