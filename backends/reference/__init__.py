"""Plain PyTorch on any device: the specification, the oracle of the tests, and the CPU's backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from portable_indexer.backends.reference.scoring import scores
from portable_indexer.backends.reference.selection import select

if TYPE_CHECKING:
    from portable_indexer.backend import Problem
    from portable_indexer.device import Device
    from portable_indexer.workspace import Workspace


class Reference:
    """Every operation, written out; slow on purpose where speed would cost clarity."""

    name = "reference"

    def unsupported(self, device: Device, problem: Problem | None = None) -> str | None:
        return None

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
        scores(q, k, k_scale, weights, ks, ke, out, clean_logits)

    def top_k_per_row(
        self, logits: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor, topk: int, out: torch.Tensor
    ) -> None:
        select(logits, ks, ke, topk, out)

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
        rows, keys = q.shape[0], k.shape[0]
        chunk = max(1, min(rows, workspace.nbytes // max(4 * keys, 1)))
        for first in range(0, rows, chunk):
            part = slice(first, min(first + chunk, rows))
            (logits,) = workspace.views(((part.stop - part.start, keys), torch.float32))
            scores(q[part], k, k_scale, weights[part], ks[part], ke[part], logits, False)
            select(logits, ks[part], ke[part], topk, out[part])

    def workspace_bytes(self, problem: Problem, budget: int) -> int:
        row = 4 * problem.num_keys
        return max(row, min(budget, row * problem.num_rows))

    def expand_pools(
        self,
        pool_ids: torch.Tensor,
        ks: torch.Tensor,
        ke: torch.Tensor,
        positions: torch.Tensor,
        pool: int,
        out: torch.Tensor,
    ) -> None:
        from portable_indexer.backends.reference import pools

        pools.expand_pools(pool_ids, ks, ke, positions, pool, out)

    def token_to_req_indices(self, query_start_loc: torch.Tensor, out: torch.Tensor, pad_value: int) -> None:
        from portable_indexer.backends.reference import metadata

        metadata.token_to_req_indices(query_start_loc, out, pad_value)

    def build_metadata(self, *args: Any, **kwargs: Any) -> None:
        from portable_indexer.backends.reference import metadata

        metadata.build_metadata(*args, **kwargs)

    def warmup(self, device: torch.device, num_heads: int, head_dim: int, topk: int) -> int:
        return 0
