"""Score and select within a budget: whole rows in row chunks, or, where none fit, stages along the keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch

from portable_indexer.backends.triton_common.kept import KeptKernel
from portable_indexer.backends.triton_common.runtime import interpreting
from portable_indexer.backends.triton_common.selection import Plan, SelectionChoice, kept_kernel, plan_for, select_rows
from portable_indexer.backends.triton_common.selection_stage import carry_best, stage_bounds
from portable_indexer.workspace import Spec, spec_bytes

if TYPE_CHECKING:
    from portable_indexer.workspace import Workspace

# (q, k, k_scale, weights, ks, ke, out): writes the logits of every valid key into out
Scorer = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None
]
PITCH = 64  # logits rows start at multiples of so many elements


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


@dataclass(frozen=True)
class IndexPlan:
    """Chunks of one call; a pure function of sizes, budget and the choice, without effect on any id."""

    choice: SelectionChoice
    keys: int
    topk: int
    rows: int  # rows of a chunk
    stage_keys: int  # keys of a stage; ``keys`` where rows are scored whole

    @cached_property
    def staged(self) -> bool:
        return self.stage_keys < self.keys

    @cached_property
    def stages(self) -> int:
        return -(-self.keys // self.stage_keys) if self.staged else 1

    @cached_property
    def prefix(self) -> int:
        """Columns before a stage's own, for the best keys of the stages before."""
        return _padded(self.topk, PITCH) if self.staged else 0

    @cached_property
    def select(self) -> Plan:
        return plan_for(self.choice, self.prefix + self.stage_keys, self.topk)

    def scratch(self, rows: int) -> tuple[Spec, ...]:
        """The logits of so many rows, and what choosing from them takes."""
        known = self._scratch.get(rows)
        if known is None:
            known = self._scratch[rows] = self._scratch_of(rows)
        return known

    @cached_property
    def _scratch(self) -> dict[int, tuple[Spec, ...]]:
        return {}

    def _scratch_of(self, rows: int) -> tuple[Spec, ...]:
        logits = ((rows, max(PITCH, _padded(self.prefix + self.stage_keys, PITCH))), torch.float32)
        staged: tuple[Spec, ...] = ()
        if self.staged:
            staged = (
                ((4, self.stages, _padded(rows, PITCH)), torch.int32),
                ((rows, self.prefix), torch.int32),
                ((rows, self.topk), torch.int32),
            )
        return (logits, *staged, *self.select.scratch(rows))

    @cached_property
    def nbytes(self) -> int:
        return spec_bytes(*self.scratch(self.rows))


def _even(count: int, most: int, multiple: int) -> int:
    """Size of the chunks when ``count`` is cut into as few as ``most`` allows, all about equal."""
    chunks = -(-count // most)
    return min(most, _padded(-(-count // chunks), multiple))


@lru_cache(maxsize=1024)
def index_plan(rows: int, keys: int, topk: int, logits_budget: int, choice: SelectionChoice) -> IndexPlan:
    """Chunks whose logits stay within ``logits_budget`` bytes, or one row of the shortest stage if none do.

    Rows are scored whole as long as ``choice.whole_rows`` of them fit, or all there are.
    """
    rows = max(rows, 1)
    row_bytes = 4 * max(PITCH, _padded(keys, PITCH))
    whole = min(rows, logits_budget // row_bytes)
    if whole >= min(rows, choice.whole_rows) or keys <= choice.short_keys:
        return IndexPlan(choice, keys, topk, _even(rows, max(whole, 1), 1), keys)
    prefix = _padded(topk, PITCH)
    stage_rows = min(rows, max(1, logits_budget // (4 * (prefix + choice.stage_keys))))
    shortest = max(choice.short_keys, choice.stage_keys // 2)
    stage_keys = max(shortest, logits_budget // (4 * stage_rows) - prefix) // PITCH * PITCH
    if stage_keys >= keys:
        return IndexPlan(choice, keys, topk, stage_rows, keys)
    return IndexPlan(choice, keys, topk, _even(rows, stage_rows, 1), _even(keys, stage_keys, PITCH))


@lru_cache(maxsize=1024)
def fit_plan(rows: int, keys: int, topk: int, nbytes: int, choice: SelectionChoice) -> IndexPlan:
    """The plan with the largest logits budget whose scratch fits into ``nbytes``, or the smallest there is."""
    low, high = 0, nbytes
    best = index_plan(rows, keys, topk, 0, choice)
    if index_plan(rows, keys, topk, high, choice).nbytes <= nbytes:
        return index_plan(rows, keys, topk, high, choice)
    while high - low > max(nbytes >> 8, 1):
        middle = (low + high) // 2
        plan = index_plan(rows, keys, topk, middle, choice)
        if plan.nbytes <= nbytes:
            low, best = middle, plan
        else:
            high = middle
    return best


def index_topk(
    q: torch.Tensor,  # [M, H, D] fp8
    k: torch.Tensor,  # [N, D] fp8
    k_scale: torch.Tensor,  # [N] float32
    weights: torch.Tensor,  # [M, H] float32
    ks: torch.Tensor,  # [M] int32
    ke: torch.Tensor,  # [M] int32
    topk: int,
    out: torch.Tensor,  # [M, topk] int32, row pitch free
    workspace: Workspace,
    *,
    score: Scorer,
    choice: SelectionChoice,
) -> None:
    """Write each row's ids; ValueError, before anything is launched, where the workspace is too small."""
    rows, keys = q.shape[0], k.shape[0]
    if rows == 0:
        return
    plan = fit_plan(rows, keys, topk, workspace.nbytes, choice)
    run = _run_staged if plan.staged else _run_whole
    for first in range(0, rows, plan.rows):
        part = slice(first, min(first + plan.rows, rows))
        scratch = workspace.views(*plan.scratch(part.stop - part.start))
        run(plan, scratch, score, q[part], k, k_scale, weights[part], ks[part], ke[part], out[part])


def _run_whole(
    plan: IndexPlan,
    scratch: list[torch.Tensor],
    score: Scorer,
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    out: torch.Tensor,
) -> None:
    logits = scratch[0][:, : plan.keys]
    score(q, k, k_scale, weights, ks, ke, logits)
    select_rows(logits, ks, ke, plan.topk, out, plan.choice, scratch[1:])


def _run_staged(
    plan: IndexPlan,
    scratch: list[torch.Tensor],
    score: Scorer,
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    out: torch.Tensor,
) -> None:
    logits, bounds, best, chosen, *select = scratch
    threshold = select[0]
    rows, device, prefix = q.shape[0], q.device, plan.prefix
    blocks = -(-rows // 128)
    bound, move, finish = stage_kernels(plan.topk)
    bound.launch_tensors(
        (blocks * plan.stages, 1),
        device,
        ks,
        ke,
        *bounds,
        bounds.stride(1),
        rows,
        plan.keys,
        plan.stage_keys,
        prefix,
        plan.topk,
        blocks,
    )
    for stage in range(plan.stages):
        origin = stage * plan.stage_keys
        part = slice(origin, min(origin + plan.stage_keys, plan.keys))
        width = prefix + part.stop - part.start
        score_ks, score_ke, select_ks, select_ke = bounds[:, stage, :rows]
        score(q, k[part], k_scale[part], weights, score_ks, score_ke, logits[:, prefix:width])
        select_rows(
            logits[:, : prefix + plan.stage_keys], select_ks, select_ke, plan.topk, chosen, plan.choice, select, prefix
        )
        carry = finish if stage == plan.stages - 1 else move
        carry.launch_tensors(
            (rows, 1),
            device,
            logits,
            ks,
            select_ks,
            select_ke,
            chosen,
            best,
            threshold,
            out,
            logits.stride(0),
            out.stride(0),
            origin,
            prefix,
            plan.topk,
        )


def stage_kernels(topk: int) -> tuple[KeptKernel, KeptKernel, KeptKernel]:
    """Bounds of the stages, the step from one stage to the next, and the last step."""
    slots = ("SLOTS", 1 << (topk - 1).bit_length())
    return (
        kept_kernel(stage_bounds, 4, ("BLOCK", 128)),
        kept_kernel(carry_best, 8, slots, ("LAST", 0)),
        kept_kernel(carry_best, 8, slots, ("LAST", 1)),
    )


def warmup_stages(device: torch.device, topk: int) -> int:
    """Compile, and load on a GPU, the kernels of the stages; returns how many."""
    if interpreting():
        return 0
    f, i = (torch.empty(1, dtype=dtype, device=device) for dtype in (torch.float32, torch.int32))
    bound, *carries = stage_kernels(topk)
    bound.prepare(device, *(i,) * 6, *(1,) * 7)
    for kernel in carries:
        kernel.prepare(device, f, i, i, i, i, i, f, i, 1, 1, 1, 1, 1)
    return 1 + len(carries)
