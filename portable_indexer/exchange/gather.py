"""``all_gatherv``: uneven row shards, gathered in place."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from portable_indexer._checks import check_integer, check_output, describe
from portable_indexer.exchange.groups import all_gather_even, backend_for, capturing, resolve_group
from portable_indexer.exchange.records import OK, checking, failure_reported, swap_records

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ALGORITHMS = ("grouped", "padded")
_log = logging.getLogger(__name__)


class Scratch(Protocol):
    """Scratch that hands out views, as ``Workspace`` does."""

    def views(self, *specs: tuple[Sequence[int], torch.dtype]) -> Sequence[torch.Tensor]: ...


Staging = torch.Tensor | Scratch


def all_gatherv(
    buffer: torch.Tensor,
    sizes: Sequence[int],
    *,
    group: ProcessGroup | None = None,
    start: int = 0,
    width: int | None = None,
    staging: Staging | None = None,
    algorithm: str | None = None,
    rank: int | None = None,
    fill: Callable[[], None] | None = None,
) -> None:
    """Gather consecutive row shards in place: afterwards every rank holds all rows of all ranks.

    Every rank of the group calls it with the same arguments, also a rank whose shard is empty.

    Args:
        buffer: int32 [rows, columns], row pitch free. Rank r's rows follow those of rank r - 1, from
            ``start`` on; each rank has filled its own. No other row and no column from ``width`` on is read
            or written.
        sizes: rows of each rank, host integers in rank order; may hold zeros.
        group: process group; None is the default group, if its size is ``len(sizes)``.
        start: first row of rank 0's shard.
        width: columns to exchange; None is all of them.
        staging: scratch for what cannot go in place (rows with a pitch, or padding): a 1-D int32 tensor or a
            ``Workspace``, of ``staging_bytes``. None allocates it where needed. In use until the current
            stream has passed this call: two streams, or two overlapping layers, need one each.
        algorithm: "grouped" (a broadcast for each shard, grouped where the library groups) or "padded" (an
            even all-gather of padded shards). None: PORTABLE_INDEXER_EXCHANGE, else what the device's tuning
            data say.
        rank: the rank that the caller takes itself for; checked where given.
        fill: writes this rank's rows; called after all checks and before the exchange, so that nothing is
            computed for an exchange that cannot take place. What it raises is told to the other ranks.

    Raises:
        TypeError, ValueError: an argument is not as above or does not fit the buffer or the group; raised
            before any collective.
        RuntimeError: called while a HIP graph is captured, which torch's collectives do not support.
        ExchangeError: under PORTABLE_INDEXER_CHECK=1 (set on all ranks), if plans differ between ranks, or a
            rank failed (``failure_reported``) or is gone. Without it such faults end in the group's own
            timeout. The check waits for the device, and is left out while a CUDA graph is captured.
    """
    with failure_reported(group):
        plan = make_plan(buffer, sizes, group, start, width, staging, chosen_algorithm(algorithm), rank)
        if fill is not None:
            fill()
    if checking():
        if capturing():
            _log.warning("PORTABLE_INDEXER_CHECK=1 checks nothing while a graph is captured")
        else:
            swap_records(plan.group, OK, plan.text(buffer), buffer.device)
    gather(plan)


def staging_bytes(rows: int, width: int, tp_size: int, algorithm: str | None = None) -> int:
    """Bytes of staging that suffice for every exchange of up to ``rows`` rows of ``width`` ids.

    ``algorithm`` as for ``all_gatherv``. This is for rows with a pitch: contiguous ones need none with
    "grouped".
    """
    if tp_size < 2:
        return 0
    if chosen_algorithm(algorithm) == "padded":
        rows = tp_size * _block_limit(rows, tp_size)
    return rows * width * 4


@dataclass(frozen=True)
class Plan:
    """One checked exchange."""

    group: ProcessGroup
    rank: int
    sizes: tuple[int, ...]
    start: int
    rows: torch.Tensor  # int32 [sum(sizes), width], a view of the buffer
    staging: torch.Tensor | None  # int32 [enough]; None where all goes in place
    algorithm: str
    backend: str

    @property
    def own(self) -> slice:
        first = sum(self.sizes[: self.rank])
        return slice(first, first + self.sizes[self.rank])

    @property
    def even(self) -> bool:
        return min(self.sizes) == max(self.sizes)

    def text(self, buffer: torch.Tensor) -> str:
        """All that must be the same on every rank."""
        return (
            f"sizes {list(self.sizes)} from row {self.start}, width {self.rows.shape[1]}, "
            f"buffer {list(buffer.shape)}, {self.algorithm}"
        )


def make_plan(
    buffer: torch.Tensor,
    sizes: Sequence[int],
    group: ProcessGroup | None,
    start: int,
    width: int | None,
    staging: Staging | None,
    algorithm: str,
    rank: int | None,
) -> Plan:
    """Check everything; raise before any collective."""
    if torch.version.hip is not None and capturing():
        raise RuntimeError("all_gatherv must not be captured in a HIP graph: leave the exchange outside the graph")
    check_output("buffer", buffer)
    if buffer.dtype != torch.int32:
        raise TypeError(f"buffer must be torch.int32, got {describe(buffer)}")
    if isinstance(sizes, torch.Tensor):
        raise TypeError(f"sizes must be a sequence of host integers (a tensor may force a sync), got {describe(sizes)}")
    counts = tuple(check_integer(f"sizes[{i}]", size) for i, size in enumerate(sizes))
    if min(counts, default=-1) < 0:
        raise ValueError(f"sizes must hold one count of at least 0 for each rank, got {list(counts)}")
    start, total = check_integer("start", start), sum(counts)
    if start < 0 or start + total > buffer.shape[0]:
        raise ValueError(
            f"sizes must fit the buffer's {buffer.shape[0]} rows from start = {start} on, got {list(counts)}"
        )
    columns = buffer.shape[1] if width is None else check_integer("width", width)
    if not 1 <= columns <= buffer.shape[1]:
        raise ValueError(f"width must be in [1, {buffer.shape[1]}], the buffer's columns, got {columns}")
    member, own = resolve_group(group, len(counts))
    if rank is not None and rank != own:
        raise ValueError(f"rank must be {own}, this process's rank in the group, got {rank}")
    rows = buffer[start : start + total, :columns]
    direct = rows.is_contiguous()
    if algorithm == "padded":
        in_place = direct and min(counts) == max(counts)
        need = 0 if in_place else len(counts) * min(max(counts), _block_limit(total, len(counts)))
    else:
        need = 0 if direct else total
    scratch = _scratch(staging, need * columns, buffer.device) if need and len(counts) > 1 else None
    return Plan(member, own, counts, start, rows, scratch, algorithm, backend_for(member, buffer.device))


def gather(plan: Plan) -> None:
    """Run a checked plan: one collective, or several for padded blocks and for gloo."""
    rows, own, staging = plan.rows, plan.own, plan.staging
    if len(plan.sizes) == 1 or len(rows) == 0:
        return
    if plan.algorithm == "padded" and staging is not None:
        _gather_padded(plan, staging)
    elif staging is None:
        _gather_views(plan, rows.view(-1))
    else:
        packed = staging.view(rows.shape)
        packed[own].copy_(rows[own])
        _gather_views(plan, staging)
        rows[: own.start].copy_(packed[: own.start])
        rows[own.stop :].copy_(packed[own.stop :])


def _gather_views(plan: Plan, flat: torch.Tensor) -> None:
    """In place, from and to each rank's consecutive part of ``flat``."""
    views = flat.split([size * plan.rows.shape[1] for size in plan.sizes])
    own = views[plan.rank]
    if plan.even and (plan.backend == "nccl" or plan.algorithm == "padded"):
        # The list form below would allocate a flat copy for views of one length.
        all_gather_even(flat, own, plan.group)
    elif plan.backend == "nccl":
        dist.all_gather(list(views), own, group=plan.group)
    else:
        for source, view in enumerate(views):
            if view.numel():
                dist.broadcast(view, group=plan.group, group_src=source)


def _gather_padded(plan: Plan, staging: torch.Tensor) -> None:
    """Even all-gathers of one block for each rank; several only where shards are very uneven."""
    ranks, width, longest = len(plan.sizes), plan.rows.shape[1], max(plan.sizes)
    limit = _block_limit(len(plan.rows), ranks)
    for first in range(0, longest, limit):
        block = min(limit, longest - first)
        flat = staging[: ranks * block * width]
        blocks = flat.view(ranks, block, width)
        offset = 0
        parts = []
        for size in plan.sizes:
            parts.append(plan.rows[offset + min(first, size) : offset + min(first + block, size)])
            offset += size
        blocks[plan.rank, : len(parts[plan.rank])].copy_(parts[plan.rank])
        all_gather_even(flat, blocks[plan.rank].view(-1), plan.group)
        for source, part in enumerate(parts):
            if source != plan.rank and len(part):
                part.copy_(blocks[source, : len(part)])


def _block_limit(rows: int, ranks: int) -> int:
    """Most rows of a padded block, from replicated integers: twice the mean, so that staging has a bound."""
    return 2 * -(-rows // ranks)


def _scratch(staging: Staging | None, count: int, device: torch.device) -> torch.Tensor:
    if staging is None:
        return torch.empty(count, dtype=torch.int32, device=device)
    if isinstance(staging, torch.Tensor):
        if staging.dtype != torch.int32 or staging.ndim != 1 or not staging.is_contiguous():
            raise ValueError(f"staging must be a contiguous 1-D torch.int32 tensor, got {describe(staging)}")
        if len(staging) < count:
            raise ValueError(f"staging must hold at least {count} ids for this exchange, got {len(staging)}")
        view = staging[:count]
    else:
        view = staging.views(((count,), torch.int32))[0]
    if view.device != device:
        raise ValueError(f"staging must be on {device}, as the buffer, got {view.device}")
    return view


def chosen_algorithm(algorithm: str | None) -> str:
    """One of ``ALGORITHMS``: the argument, else the environment's, else the tuning data's."""
    name, value = "algorithm", algorithm
    if value is None:
        name = "PORTABLE_INDEXER_EXCHANGE"
        value = os.environ.get(name, "").strip().lower() or "auto"
    if value == "auto":
        return _tuned_algorithm()
    if value not in ALGORITHMS:
        raise ValueError(f"{name} must be one of auto, {', '.join(ALGORITHMS)}, got {value!r}")
    return value


@functools.lru_cache(maxsize=1)
def _tuned_algorithm() -> str:
    from portable_indexer.device import detect
    from portable_indexer.tuning import tuning_for

    return "padded" if tuning_for(detect()).exchange_algorithm == "padded" else "grouped"
