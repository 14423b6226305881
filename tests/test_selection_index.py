"""The contract of ``index_topk``: the ids of the backend's own logits, whatever the budget, chunks or stages."""

from __future__ import annotations

import random
from functools import partial

import problems
import pytest
import torch

import portable_indexer as pi
from portable_indexer.backend import Problem
from portable_indexer.registry import get_backend

POISON = 2**31 - 1


def reference_ids(o: problems.Operands, topk: int, backend: str) -> torch.Tensor:
    """The reference's choice from the logits of the backend under test."""
    logits = torch.full((o.q.shape[0], o.k.shape[0]), float("nan"), device=o.q.device)
    pi.fp8_mqa_logits(*o.args, out=logits, backend=backend)
    return pi.top_k_per_row(logits.cpu(), o.ks.cpu(), o.ke.cpu(), topk, backend="reference")


def run(o: problems.Operands, topk: int, backend: str, nbytes: int) -> torch.Tensor:
    """Into poisoned ids, with a poisoned workspace of so many bytes."""
    workspace = pi.Workspace(o.q.device, nbytes)
    workspace.views(((nbytes,), torch.uint8))[0].fill_(0xA5)
    out = torch.full((o.q.shape[0], topk + 2), POISON, dtype=torch.int32, device=o.q.device)
    pi.index_topk(*o.args, topk, out=out, backend=backend, workspace=workspace)
    assert (out[:, topk:] == POISON).all()
    return out[:, :topk].cpu()


@pytest.mark.parametrize("levels,ragged", [(0, False), (2, False), (2, True)])
def test_ids_of_its_own_logits(
    levels: int, ragged: bool, backend_name: str, device: torch.device, generator: torch.Generator
) -> None:
    o = problems.make(9, 1500, 4, 64, generator, levels=levels, ragged=ragged, device=device)
    o.ke[3] = o.ks[3] - 4
    right = reference_ids(o, 300, backend_name)
    problem = Problem.of_scores("index_topk", *o.args, 300)[0]
    for budget in (1 << 30, 3 * 6144, 1):
        nbytes = get_backend(backend_name).workspace_bytes(problem, budget)
        assert torch.equal(run(o, 300, backend_name, nbytes), right), budget


def test_peak_workspace_stays_within_the_budget(backend_name: str) -> None:  # M01 M05
    """8,192 rows of 300,000 keys would take 9.9 GB of logits at once."""
    backend = get_backend(backend_name)
    for budget in (512 << 20, 64 << 20):
        problem = Problem("index_topk", torch.device("cpu"), 8192, 300_000, 32, 128, 2048)
        assert backend.workspace_bytes(problem, budget) <= budget * 1.2


def test_too_small_a_workspace_is_refused(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    o = problems.make(3, 1200, 4, 64, generator, device=device)
    out = torch.full((3, 64), POISON, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="workspace"):
        pi.index_topk(*o.args, 64, out=out, backend=backend_name, workspace=pi.Workspace(device, 1024))
    assert (out == POISON).all()


def test_neither_rows_nor_keys(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    o = problems.make(4, 100, 4, 64, generator, device=device)
    none = pi.index_topk(o.q[:0], (o.k, o.k_scale), o.weights[:0], o.ks[:0], o.ke[:0], 8, backend=backend_name)
    assert none.shape == (0, 8)
    ids = pi.index_topk(o.q, (o.k[:0], o.k_scale[:0]), o.weights, o.ks, o.ke, 8, backend=backend_name)
    assert (ids == -1).all()


@pytest.mark.parametrize("order", ["random", "ascending", "descending", "equal"])
def test_stages_along_the_keys(order: str, device: torch.device, generator: torch.Generator) -> None:  # M08 M13
    """Budgets that hold no whole row: best keys are carried from stage to stage, whatever the scores' order."""
    selection, selection_index = _triton_modules(device)
    choice = selection.SelectionChoice(
        short_keys=1024, tile_keys=1024, mark_block=512, mark_block_wide=512, finish_chunk=512, whole_rows=5,
        stage_keys=1100, spare_programs=3,
    )  # fmt: skip
    rows, keys, topk = 6, 4000, 100
    scores = {
        "random": torch.randint(-40, 40, (rows, keys), generator=generator).float(),
        "ascending": torch.arange(keys).float().expand(rows, -1),
        "descending": -torch.arange(keys).float().expand(rows, -1),
        "equal": torch.full((rows, keys), 2.5),
    }[order].to(device)
    ks = torch.tensor([0, 17, 1300, 3990, 2500, 5], dtype=torch.int32, device=device)
    ke = torch.tensor([4000, 3999, 2700, 4000, 2400, -(2**31)], dtype=torch.int32, device=device)
    right = torch.full((rows, topk), POISON, dtype=torch.int32)
    get_backend("reference").top_k_per_row(scores.cpu(), ks.cpu(), ke.cpu(), topk, right)

    def score(table: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *rest: torch.Tensor) -> None:
        """Stands for the scoring kernel: copies each row's valid columns, and nothing else."""
        _, _, begin, end, out = rest
        column = torch.arange(k.shape[0], device=out.device)
        valid = (column >= begin[:, None]) & (column < end[:, None])
        out.copy_(torch.where(valid, table[q[:, 0].long()][:, k[:, 0].long()], out))

    row_ids = torch.arange(rows, device=device)[:, None]
    key_ids = torch.arange(keys, device=device)[:, None]
    ones = torch.ones(keys, device=device)
    for nbytes, stages in ((45_000, 3), (4 << 20, 1)):
        plan = selection_index.fit_plan(rows, keys, topk, nbytes, choice)
        assert plan.nbytes <= nbytes
        assert plan.stages >= stages if stages > 1 else not plan.staged
        workspace = pi.Workspace(device, nbytes)
        workspace.views(((nbytes,), torch.uint8))[0].fill_(0xA5)
        out = torch.full((rows, topk), POISON, dtype=torch.int32, device=device)
        selection_index.index_topk(
            row_ids, key_ids, ones, ones[:rows, None], ks, ke, topk, out, workspace,
            score=partial(score, scores), choice=choice,
        )  # fmt: skip
        assert torch.equal(out.cpu(), right), (order, nbytes)


def test_plans_fit_their_budgets_and_fill_waves(device: torch.device) -> None:
    """Chunks are even, stages are long enough for the kernels, and a smaller budget never needs more bytes."""
    selection, selection_index = _triton_modules(device, run=False)
    choice = selection.SelectionChoice()
    for rows, keys in ((4096, 131072), (128, 1 << 20), (1024, 1 << 20), (1, 1 << 24), (8192, 8192), (70000, 64)):
        needs = []
        for budget in (1 << 30, 512 << 20, 64 << 20, 8 << 20, 1 << 20, 0):
            plan = selection_index.index_plan(rows, keys, 2048, budget, choice)
            logits = 4 * plan.rows * (plan.prefix + plan.stage_keys)
            assert logits <= budget or plan.rows == 1
            assert 1 <= plan.rows <= rows
            assert plan.staged <= (plan.stage_keys >= choice.short_keys)
            assert plan.stage_keys * plan.stages >= keys
            needs.append(plan.nbytes)
            assert selection_index.fit_plan(rows, keys, 2048, plan.nbytes, choice).nbytes <= plan.nbytes
        assert needs == sorted(needs, reverse=True)


def _triton_modules(device: torch.device, run: bool = True):
    """The launchers' modules; skips where this process's Triton cannot run kernels on the device."""
    pytest.importorskip("triton")
    from portable_indexer.backends.triton_common import runtime, selection, selection_index

    if run and not runtime.runs_on(device.type):
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1: Triton runs no kernels on CPU tensors in this process")
    return selection, selection_index


@pytest.mark.parametrize("topk", [1, 100, 512, 1000, 2048, 4096])
def test_warmup_knows_the_kernels_of_every_width(topk: int) -> None:
    """Widths just above a power of two, at the edges of 32 keys, and any between."""
    selection = pytest.importorskip("portable_indexer.backends.triton_common.selection", reason="no Triton")
    choice = selection.SelectionChoice()

    def kernels(plan) -> set[object]:
        if plan.short:
            return {selection.short_kernel(plan)}
        return {kernel for unit in (1, 4) for kernel in selection.long_kernels(plan, unit)}

    warmed = set().union(*map(kernels, selection.plans(choice, topk)))
    for power in range(25):
        edges = {(1 << power) + more for more in (0, 1, 15, 16, 31, 33)}
        for width in edges | {random.randrange(1 << power, 2 << power) for _ in range(40)}:
            assert kernels(selection.Plan(choice, width, topk)) <= warmed, width
