"""What a backend is, and what a call asks of it: both checked here, once, before anything is launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from portable_indexer._checks import (
    check_bounds,
    check_device,
    check_float32,
    check_integer,
    check_layout,
    check_output,
    describe,
)

if TYPE_CHECKING:
    from portable_indexer.device import Device
    from portable_indexer.workspace import Workspace

FP8_ENCODINGS: dict[torch.dtype, str] = {torch.float8_e4m3fn: "fn", torch.float8_e4m3fnuz: "fnuz"}
MAX_TOPK = 4096
MAX_KEYS = 2**31 - 1

KV = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Problem:
    """The shape of one call: what a backend needs to know to accept or refuse it.

    ``num_keys`` counts keys in the unit that the caller gave (tokens, compressed entries or pools).
    ``q_dtype`` and ``k_dtype`` are None where the operation has no such operand.
    """

    op: str
    device: torch.device
    num_rows: int = 0
    num_keys: int = 0
    num_heads: int = 0
    head_dim: int = 0
    topk: int = 0
    q_dtype: torch.dtype | None = None
    k_dtype: torch.dtype | None = None

    @staticmethod
    def of_scores(
        op: str,
        q: torch.Tensor,
        kv: KV,
        weights: torch.Tensor,
        cu_seqlen_ks: torch.Tensor,
        cu_seqlen_ke: torch.Tensor,
        topk: int = 0,
    ) -> tuple[Problem, torch.Tensor, torch.Tensor]:
        """Check the operands of a scoring call.

        Returns the problem, k [N, D] and k_scale as a vector [N] (a view, also of an [N, 1] input).
        Raises TypeError or ValueError naming the argument, what came and what is accepted.
        """
        if not (isinstance(kv, (tuple, list)) and len(kv) == 2):
            raise TypeError(f"kv must be a pair (k, k_scale), got {type(kv).__name__}")
        k, k_scale = kv
        for name, tensor, ndim in (("q", q, 3), ("k", k, 2)):
            check_layout(name, tensor, ndim)
            if tensor.dtype not in FP8_ENCODINGS:
                hint = ""
                if tensor.dtype == torch.uint8:
                    hint = f"; raw bytes carry no encoding, say which: {name}.view(torch.float8_e4m3fn)"
                raise TypeError(
                    f"{name} must be torch.float8_e4m3fn or torch.float8_e4m3fnuz, got {describe(tensor)}{hint}"
                )
        rows, heads, dim = q.shape
        keys = k.shape[0]
        check_device("kv[0]", k, q.device)
        if keys > MAX_KEYS:
            raise ValueError(f"k must have at most {MAX_KEYS} rows (ids are int32), got {describe(k)}")
        if k.shape[1] != dim:
            raise ValueError(f"k must be [N, {dim}] to match q {tuple(q.shape)}, got {describe(k)}")
        if heads < 1 or dim < 1:
            raise ValueError(f"q must have at least one head and one channel, got {describe(q)}")
        if not isinstance(k_scale, torch.Tensor):
            raise TypeError(f"k_scale must be a tensor, got {type(k_scale).__name__}")
        if k_scale.ndim == 2 and k_scale.shape[1] == 1:
            k_scale = k_scale[:, 0]
        if k_scale.dtype != torch.float32 or tuple(k_scale.shape) != (keys,):
            raise ValueError(f"k_scale must be float32 [{keys}] or [{keys}, 1], got {describe(kv[1])}")
        check_device("kv[1]", k_scale, q.device)
        check_layout("weights", weights, 2)
        check_float32("weights", weights)
        check_device("weights", weights, q.device)
        if tuple(weights.shape) != (rows, heads):
            raise ValueError(f"weights must be [{rows}, {heads}] to match q {tuple(q.shape)}, got {describe(weights)}")
        check_bounds(cu_seqlen_ks, cu_seqlen_ke, rows, q.device)
        if op != "fp8_mqa_logits":
            topk = check_topk(topk)
        problem = Problem(op, q.device, rows, keys, heads, dim, topk, q.dtype, k.dtype)
        return problem, k, k_scale

    @staticmethod
    def of_logits(logits: torch.Tensor, cu_seqlen_ks: torch.Tensor, cu_seqlen_ke: torch.Tensor, topk: int) -> Problem:
        """Check the operands of ``top_k_per_row``: logits [M, N] float32, row pitch free."""
        check_layout("logits", logits, 2)
        check_float32("logits", logits)
        if logits.shape[1] > MAX_KEYS:
            raise ValueError(f"logits must have at most {MAX_KEYS} columns (ids are int32), got {describe(logits)}")
        check_bounds(cu_seqlen_ks, cu_seqlen_ke, logits.shape[0], logits.device)
        topk = check_topk(topk)
        return Problem("top_k_per_row", logits.device, logits.shape[0], logits.shape[1], topk=topk)


def check_topk(topk: int) -> int:
    """The k as an int; refused where it is no integer or outside 1..4096."""
    topk = check_integer("topk", topk)
    if not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"topk must be from 1 to {MAX_TOPK}, got {topk}")
    return topk


def check_out_ids(name: str, out: torch.Tensor, rows: int, width: int, device: torch.device) -> None:
    """Check a caller's id buffer: int32 [rows, >= width], last dimension contiguous, row pitch free."""
    check_output(name, out)
    if out.dtype != torch.int32:
        raise TypeError(f"{name} must be torch.int32, got {describe(out)}")
    if out.shape[0] != rows or out.shape[1] < width:
        raise ValueError(f"{name} must be [{rows}, at least {width}], got {describe(out)}")
    check_device(name, out, device)


class Backend(Protocol):
    """What the registry hands out. Tensors arrive checked; results are written into ``out``.

    Shapes, here and everywhere: q [M, H, D] fp8, k [N, D] fp8, k_scale [N] float32 (any stride),
    weights [M, H] float32, ks and ke [M] int32 contiguous; the last dimension of every tensor but
    k_scale is contiguous, every other stride is free. Valid keys of row m: max(ks, 0) <= n < min(ke, N).
    """

    @property
    def name(self) -> str: ...

    def unsupported(self, device: Device, problem: Problem | None = None) -> str | None:
        """Why this backend cannot serve the problem on the device; None where it can."""

    def fp8_mqa_logits(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        k_scale: torch.Tensor,
        weights: torch.Tensor,
        ks: torch.Tensor,
        ke: torch.Tensor,
        out: torch.Tensor,
        clean_logits: bool,
    ) -> None:
        """Write logits[m, n] of every valid key into out [M, N] float32 (columns are absolute)."""

    def top_k_per_row(
        self, logits: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor, topk: int, out: torch.Tensor
    ) -> None:
        """Write each row's ids into out [M, topk] int32: ascending, relative to ks, then -1."""

    def index_topk(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        k_scale: torch.Tensor,
        weights: torch.Tensor,
        ks: torch.Tensor,
        ke: torch.Tensor,
        topk: int,
        out: torch.Tensor,
        workspace: Workspace,
    ) -> None:
        """Score and select within the workspace; out as for ``top_k_per_row``."""

    def workspace_bytes(self, problem: Problem, budget: int) -> int:
        """Bytes that ``index_topk`` wants within a logits budget in bytes; never less than it needs."""
        ...

    def expand_pools(
        self,
        pool_ids: torch.Tensor,
        ks: torch.Tensor,
        ke: torch.Tensor,
        positions: torch.Tensor,
        pool: int,
        out: torch.Tensor,
    ) -> None:
        """Turn pool ids [M, P] into token ids [M, W] int32 (see ``pool_topk``); they may be out's first columns."""

    def token_to_req_indices(self, query_start_loc: torch.Tensor, out: torch.Tensor, pad_value: int) -> None:
        """Write the request of each token into out [T] int32; tokens past the last request get pad_value."""

    def build_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Fill a step's metadata buffers (see ``portable_indexer.metadata``)."""

    def warmup(self, device: torch.device, num_heads: int, head_dim: int, topk: int) -> int:
        """Compile every variant that calls of this shape can reach; returns how many."""
        ...
