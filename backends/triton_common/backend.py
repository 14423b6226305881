"""What the two Triton backends share: all of it but the vendor's name and its launch choices."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from portable_indexer.backend import FP8_ENCODINGS
from portable_indexer.backends.triton_common import metadata, pools, runtime, scoring, selection, selection_index
from portable_indexer.workspace import persistent_workspace

if TYPE_CHECKING:
    from portable_indexer.backend import Problem
    from portable_indexer.device import Device
    from portable_indexer.step_metadata import MetadataBuffers, StepLayout
    from portable_indexer.workspace import Workspace

OLDEST_TRITON = (3, 6)


class Launch(Protocol):
    """A vendor's ``launch`` module: pure functions that give frozen choices."""

    @property
    def DEFAULT_ARCH(self) -> str: ...

    def scoring_choice(
        self, arch: str, version: tuple[int, int], heads: int, dim: int, q_encoding: str, k_encoding: str
    ) -> scoring.ScoringChoice: ...

    def selection_choice(self, arch: str) -> selection.SelectionChoice: ...


class TritonBackend:
    """Thin: each method picks a launch choice and calls the shared launcher."""

    name: str
    vendor: str
    launch: Launch
    # (architecture prefix, Triton version): what is wrong with that pair.
    broken: dict[tuple[str, tuple[int, int]], str] = {}  # noqa: RUF012

    def unsupported(self, device: Device, problem: Problem | None = None) -> str | None:
        """Why this backend cannot serve the problem on the device; None where it can."""
        if device.is_gpu and device.vendor != self.vendor:
            return f"needs a device of vendor {self.vendor}, got {device.vendor} ({device.arch})"
        version = runtime.triton_version()
        if version < OLDEST_TRITON:
            return f"needs Triton {OLDEST_TRITON[0]}.{OLDEST_TRITON[1]} or newer, got {version[0]}.{version[1]}"
        fault = self.broken.get((device.arch if device.is_gpu else self._arch(), version))
        if fault is not None:
            return fault
        tensors = "cuda" if device.is_gpu else "cpu"
        if not runtime.runs_on(tensors):
            return f"Triton has no way to run kernels on {tensors} tensors in this process"
        target = runtime.target()
        if target is not None and target[0] != self.vendor:
            return f"Triton compiles for {target[1]} in this process"
        if problem is None:
            return None
        if problem.head_dim == 0:
            return scoring.too_many(problem.num_keys)
        return scoring.unsupported(problem.num_heads, problem.head_dim, problem.num_keys)

    def scoring_choice(self, heads: int, dim: int, q_dtype: torch.dtype, k_dtype: torch.dtype) -> scoring.ScoringChoice:
        """The scoring kernel's launch choice in this process."""
        encodings = FP8_ENCODINGS[q_dtype], FP8_ENCODINGS[k_dtype]
        return self.launch.scoring_choice(self._arch(), runtime.triton_version(), heads, dim, *encodings)

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
        """Write logits[m, n] of every valid key into out [M, >= N] float32 (columns are absolute)."""
        choice = self.scoring_choice(q.shape[1], q.shape[2], q.dtype, k.dtype)
        units = runtime.units(q.device)
        scoring.mqa_logits(q, k, k_scale, weights, ks, ke, out, clean_logits, choice=choice, units=units)

    def top_k_per_row(
        self, logits: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor, topk: int, out: torch.Tensor
    ) -> None:
        """Write each row's ids into out [M, topk] int32: ascending, relative to ks, then -1."""
        choice = self.launch.selection_choice(self._arch())
        nbytes = selection.scratch_bytes(logits.shape[0], logits.shape[1], topk, choice)
        workspace = persistent_workspace(logits.device, nbytes)
        selection.top_k_per_row(logits, ks, ke, topk, out, choice, workspace)

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
        score = partial(self.fp8_mqa_logits, clean_logits=False)
        choice = self.launch.selection_choice(self._arch())
        selection_index.index_topk(q, k, k_scale, weights, ks, ke, topk, out, workspace, score=score, choice=choice)

    def workspace_bytes(self, problem: Problem, budget: int) -> int:
        """Bytes of workspace that ``index_topk`` wants when its logits may take ``budget`` bytes."""
        choice = self.launch.selection_choice(self._arch())
        return selection_index.index_plan(problem.num_rows, problem.num_keys, problem.topk, budget, choice).nbytes

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
        pools.expand_pools(pool_ids, ks, ke, positions, pool, out)

    def token_to_req_indices(self, query_start_loc: torch.Tensor, out: torch.Tensor, pad_value: int) -> None:
        """Write the request of each token into out [T] int32; tokens past the last request get pad_value."""
        metadata.token_to_req_indices(query_start_loc, out, pad_value)

    def build_metadata(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        layout: StepLayout,
        buffers: MetadataBuffers,
        group_table: torch.Tensor | None = None,
    ) -> None:
        """Fill a step's metadata buffers by one self.launch."""
        metadata.build_metadata(query_start_loc, seq_lens, layout, buffers, group_table)

    def warmup(self, device: torch.device, num_heads: int, head_dim: int, topk: int) -> int:
        """Compile and load every variant that calls of this shape can reach; returns how many."""
        compiled = metadata.warmup_metadata(device)
        compiled += selection.warmup_selection(device, topk, self.launch.selection_choice(self._arch()))
        compiled += selection_index.warmup_stages(device, topk)
        compiled += pools.warmup_pools(device)
        for q_dtype in FP8_ENCODINGS:
            for k_dtype in FP8_ENCODINGS:
                choice = self.scoring_choice(num_heads, head_dim, q_dtype, k_dtype)
                compiled += scoring.warmup(device, num_heads, head_dim, q_dtype, k_dtype, choice)
        return compiled

    def _arch(self) -> str:
        target = runtime.target()
        return self.launch.DEFAULT_ARCH if target is None else target[1]
