"""Exact, ordered top-k of each row in Triton: the launches of one selection, and the scratch that they need.

A row that fits into one program's registers is chosen there. A longer one is read once in full: a sample
guesses a threshold, one pass collects the keys that reach it, and the exact choice is made among those.
Rows on which the guess failed are tried once more with a better one, and then chosen without any guess;
the kernels for these end at once where no row failed. So the answer never depends on a guess, and every
decision is taken on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch

from portable_indexer.backends.triton_common.kept import KeptKernel
from portable_indexer.backends.triton_common.runtime import interpreting
from portable_indexer.backends.triton_common.selection_final import choose_candidates
from portable_indexer.backends.triton_common.selection_guess import guess_threshold
from portable_indexer.backends.triton_common.selection_mark import mark_again, mark_candidates
from portable_indexer.backends.triton_common.selection_short import select_short
from portable_indexer.backends.triton_common.selection_sweep import finish_rows
from portable_indexer.workspace import Spec, spec_bytes

if TYPE_CHECKING:
    from portable_indexer.workspace import Workspace

LongKernels = tuple[KeptKernel, KeptKernel, KeptKernel, KeptKernel, KeptKernel]


@dataclass(frozen=True)
class SelectionChoice:
    """Tile sizes and warps of the selection kernels; they change the time of an answer, never the answer."""

    short_keys: int = 16384  # rows of at most so many columns are chosen in registers
    short_keys_per_warp: int = 2048
    short_parts_per_warp: int = 1  # 2 where a wave has 64 lanes
    short_piece_per_warp: int = 512  # keys written at a time
    short_sample: int = 512  # keys of a row's sample
    most_sample: int = 16384  # keys of a row's sample; twice as many beyond 2^21 keys
    sample_run: int = 32  # of them side by side
    sample_keys_per_warp: int = 2048
    tile_keys: int = 8192  # keys that a program of the full read goes over
    mark_block: int = 4096  # of them in flight at a time
    mark_block_wide: int = 2048  # the same in rows of more than ``wide_keys`` columns
    wide_keys: int = 1 << 18
    mark_keys_per_warp: int = 512
    choose_keys_per_warp: int = 1024
    choose_piece: int = 1024  # ids written at a time
    finish_chunk: int = 4096  # keys of a search over a whole row in flight, times four
    finish_warps: int = 16
    spare_programs: int = 256  # of the kernels for rows that failed
    whole_rows: int = 16  # index_topk scores whole rows where so many fit into the budget
    stage_keys: int = 65536  # and otherwise so many keys of a row at a time, or more


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


@dataclass(frozen=True)
class Plan:
    """What the launches of one selection have in common; a pure function of widths, k and the choice."""

    choice: SelectionChoice
    width: int
    topk: int

    @cached_property
    def short(self) -> bool:
        return self.width <= self.choice.short_keys

    @cached_property
    def sample(self) -> int:
        """Keys of the sample: a sixteenth of the longest row, within what a program can hold."""
        return max(4096, min(_power_of_two(self.width) // 16, self.choice.most_sample << (self.width > 1 << 21)))

    @cached_property
    def capacity(self) -> int:
        """Candidates that a row's list holds: what a guess aims at and 4.3 deviations more, as the sample is small."""
        part = min(self.sample / _power_of_two(self.width), 1.0)
        root = (4.3 + math.sqrt(4.3**2 + 4 * self.topk * part)) / 2
        wanted = min(_power_of_two(int((root * root + 4.3 * root) / part)), 16384)
        return max(wanted, 2 * _power_of_two(self.topk), 1024)

    @cached_property
    def choose_warps(self) -> int:
        return _warps(self.capacity, self.choice.choose_keys_per_warp)

    @cached_property
    def short_row(self) -> int:
        """Keys of a row that a program of the candidates' choice holds: with no more it chooses without candidates."""
        return min(self.choose_warps * self.choice.short_keys_per_warp, self.choice.short_keys)

    @cached_property
    def tiles(self) -> int:
        return -(-self.width // self.choice.tile_keys)

    def scratch(self, rows: int) -> tuple[Spec, ...]:
        """Shapes and dtypes of the scratch of so many rows: threshold, counter, failures, bracket and candidates."""
        if self.short:
            return ()
        return (
            ((rows,), torch.float32),
            ((rows,), torch.int32),
            ((rows + 1,), torch.int32),
            ((rows, 4), torch.uint32),
            ((rows, 2, self.tiles), torch.int32),
            ((rows, self.capacity), torch.int32),
            ((rows, self.capacity), torch.float32),
        )

    def rows_within(self, nbytes: int, rows: int) -> int:
        """Most rows, up to ``rows``, whose scratch fits into ``nbytes``; 0 if not even one's does."""
        low, high = 0, rows
        while low < high:
            middle = rows if low == 0 and high == rows else (low + high + 1) // 2
            if spec_bytes(*self.scratch(middle)) <= nbytes:
                low = middle
            else:
                high = middle - 1
        return low

    @cached_property
    def kernels(self) -> dict[int, LongKernels]:
        """What ``long_kernels`` found, by unit."""
        return {}


@lru_cache(maxsize=4096)
def plan_for(choice: SelectionChoice, width: int, topk: int) -> Plan:
    """The plan, one object for the same sizes: what it works out once serves every layer and chunk."""
    return Plan(choice, width, topk)


SCRATCH_LIMIT = 256 << 20


@lru_cache(maxsize=4096)
def scratch_bytes(rows: int, width: int, topk: int, choice: SelectionChoice) -> int:
    """Bytes of scratch that ``top_k_per_row`` wants: for all rows, within 256 MiB unless one row takes more."""
    plan = plan_for(choice, width, topk)
    return spec_bytes(*plan.scratch(max(1, plan.rows_within(SCRATCH_LIMIT, rows)))) if rows else 0


@cache
def kept_kernel(function: Any, num_warps: int, *constants: tuple[str, int]) -> KeptKernel:
    """The one kept kernel of these constants, given in the order of the function's parameters."""
    return KeptKernel(function, dict(constants), num_warps)


def _unit(logits: torch.Tensor) -> int:
    """Row starts are multiples of so many elements: 4 where the kernels may read 16 bytes at a time."""
    return 4 if logits.data_ptr() % 16 == 0 and logits.stride(0) % 4 == 0 else 1


def _warps(held: int, each: int) -> int:
    """Warps of a program that holds so many keys in registers, ``each`` of them a warp."""
    return max(4, min(held // each, 16))


def short_kernel(plan: Plan) -> KeptKernel:
    """The kernel that chooses rows of up to ``choice.short_keys`` columns."""
    choice, block = plan.choice, max(_power_of_two(plan.width), 1024)
    warps = _warps(block, choice.short_keys_per_warp)
    return kept_kernel(
        select_short,
        warps,
        ("BLOCK", block),
        ("PARTS", warps * choice.short_parts_per_warp),
        ("SLOTS", _power_of_two(plan.topk)),
        ("PIECE", min(warps * choice.short_piece_per_warp, block)),
        ("SAMPLE", choice.short_sample),
    )


def long_kernels(plan: Plan, unit: int) -> LongKernels:
    """The kernels for longer rows, in the order of their launches: guess, mark, choose, mark again, finish."""
    known = plan.kernels.get(unit)
    if known is None:
        known = plan.kernels[unit] = _long_kernels(plan, unit)
    return known


def _long_kernels(plan: Plan, unit: int) -> LongKernels:
    choice, held = plan.choice, ("CAPACITY", plan.capacity)
    row = ("UNIT", unit)
    sample = (("SAMPLE", plan.sample), ("RUN", choice.sample_run))
    block = choice.mark_block_wide if plan.width > choice.wide_keys else choice.mark_block
    tile = (("BLOCK", block), ("STEPS", choice.tile_keys // block))
    mark_warps = max(1, block // choice.mark_keys_per_warp)
    few = plan.tiles <= 16
    listed = (
        held,
        ("PIECE", min(choice.choose_piece, plan.capacity)),
        ("TILES", 16 if few else 128),
        ("LOG_TILES", 4 if few else 7),
    )
    again = (("SAMPLE", min(plan.sample, plan.capacity)), ("RUN", choice.sample_run))
    choose_warps = plan.choose_warps
    short = ("SHORT", plan.short_row)
    rows_alone = (
        short,
        ("PARTS", choose_warps * choice.short_parts_per_warp),
        ("SHORT_PIECE", choose_warps * choice.short_piece_per_warp),
        ("SHORT_SAMPLE", choice.short_sample),
    )
    return (
        kept_kernel(guess_threshold, _warps(plan.sample, choice.sample_keys_per_warp), row, *sample, held, short),
        kept_kernel(mark_candidates, mark_warps, row, *tile),
        kept_kernel(choose_candidates, choose_warps, row, *listed, *again, *rows_alone),
        kept_kernel(mark_again, mark_warps, row, *tile),
        kept_kernel(finish_rows, choice.finish_warps, row, *listed, ("CHUNK", choice.finish_chunk)),
    )


def select_rows(
    logits: torch.Tensor,  # [M, W] float32, row pitch free
    ks: torch.Tensor,  # [M] int32
    ke: torch.Tensor,  # [M] int32
    topk: int,
    out: torch.Tensor,  # [M, topk] int32, row pitch free
    choice: SelectionChoice,
    scratch: Sequence[torch.Tensor],
    prefix: int = 0,
) -> None:
    """Choose all rows. ``scratch`` holds what ``Plan.scratch`` asks for, for at least M rows.

    Rows that start at column ``prefix - topk`` bring a threshold along, in the first piece of scratch.
    """
    rows, width = logits.shape
    if rows == 0:
        return
    plan = plan_for(choice, width, topk)
    unit = _unit(logits)
    device = logits.device
    pitch, out_pitch = logits.stride(0) // unit, out.stride(0)
    read = (logits, ks, ke)
    if plan.short:
        short_kernel(plan).launch_tensors((rows, 1), device, *read, out, logits.stride(0), out_pitch, width, topk)
        return
    state, candidates = scratch[:4], scratch[4:]
    capacity, tiles, spare = plan.capacity, plan.tiles, choice.spare_programs
    guess, mark, choose, again, finish = long_kernels(plan, unit)
    guess.launch_tensors((rows, 1), device, *read, *state, pitch, width, topk, prefix)
    marked = (*read, *state, *candidates, pitch, width, tiles, capacity)
    mark.launch_tensors((rows * tiles, 1), device, *marked)
    chosen = (*read, *state, *candidates, out, pitch, out_pitch, width, tiles, choice.tile_keys, topk)
    choose.launch_tensors((rows, 1), device, *chosen)
    programs = min(rows * tiles, spare)
    again.launch_tensors((programs, 1), device, *marked, programs)
    programs = min(rows, spare)
    finish.launch_tensors((programs, 1), device, *chosen, programs)


def top_k_per_row(
    logits: torch.Tensor,  # [M, W] float32, row pitch free
    ks: torch.Tensor,  # [M] int32
    ke: torch.Tensor,  # [M] int32
    topk: int,
    out: torch.Tensor,  # [M, topk] int32, row pitch free
    choice: SelectionChoice,
    workspace: Workspace,
) -> None:
    """Choose all rows, in as many row chunks as the workspace asks for."""
    rows, width = logits.shape
    plan = plan_for(choice, width, topk)
    chunk = rows if plan.short else plan.rows_within(workspace.nbytes, rows)
    if rows and not chunk:
        workspace.views(*plan.scratch(1))  # says how much is missing
    for first in range(0, rows, max(chunk, 1)):
        part = slice(first, min(first + chunk, rows))
        scratch = workspace.views(*plan.scratch(part.stop - part.start))
        select_rows(logits[part], ks[part], ke[part], topk, out[part], choice, scratch)


def plans(choice: SelectionChoice, topk: int) -> Iterator[Plan]:
    """Plans that reach all kernels for rows of up to 2^26 keys: one serves all widths up to its power of two."""
    return (plan_for(choice, 1 << power, topk) for power in range(10, 27))


def warmup_selection(device: torch.device, topk: int, choice: SelectionChoice) -> int:
    """Compile, and load on a GPU, every variant that rows of up to 2^26 keys can reach; returns how many."""
    if interpreting():
        return 0
    f, i, u = (torch.empty(1, dtype=dtype, device=device) for dtype in (torch.float32, torch.int32, torch.uint32))
    compiled: set[KeptKernel] = set()
    for plan in plans(choice, topk):
        if plan.short:
            kernel = short_kernel(plan)
            kernel.prepare(device, f, i, i, i, 1, 1, 1, 1)
            compiled.add(kernel)
            continue
        for unit in (1, 4):
            kernels = long_kernels(plan, unit)
            state, candidates = (f, i, i, f, i, i, u), (i, i, f)
            kernels[0].prepare(device, *state, 1, 1, 1, 1)
            kernels[1].prepare(device, *state, *candidates, 1, 1, 1, 1)
            kernels[2].prepare(device, *state, *candidates, i, 1, 1, 1, 1, 1, 1)
            kernels[3].prepare(device, *state, *candidates, 1, 1, 1, 1, 1)
            kernels[4].prepare(device, *state, *candidates, i, 1, 1, 1, 1, 1, 1, 1)
            compiled.update(kernels)
    return len(compiled)
