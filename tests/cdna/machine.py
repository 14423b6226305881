"""Runs a kernel: a grid of workgroups, their waves in lockstep where they agree on the way.

Waves at the same program counter form one `Batch`, across workgroups. The batch furthest behind runs
first, block by block; a branch that divides a batch splits it, and parts that meet again join. A barrier
holds a batch until nothing else can run. Workgroups run `WAVES` waves at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .asm import Instruction, Program
from .errors import CdnaError, Stuck, UnknownInstruction
from .memory import Memory
from .ops import decode, flow
from .ops.local import Lds
from .wave import LANES, Batch

WAVES = 64
# User registers that a kernel may ask for before its preloaded arguments, in the hardware's order.
USER_REGISTERS = (
    ("dispatch_ptr", 2), ("queue_ptr", 2), ("kernarg_segment_ptr", 2), ("dispatch_id", 2),
    ("private_segment_size", 1),
)  # fmt: skip


@dataclass
class Block:
    """Straight code: functions of a Batch, then what decides where its waves go."""

    steps: list
    leave: object  # function of a Batch, or None to run on
    end: int  # the program counter behind it
    size: int  # instructions


@dataclass
class Kernel:
    """A decoded program; `origin` finds the instruction of a step that failed."""

    program: Program
    blocks: dict[int, Block] = field(default_factory=dict)
    origin: dict[int, Instruction] = field(default_factory=dict)

    def __post_init__(self) -> None:
        code = self.program.code
        unknown, decoded = [], []
        for instruction in code:
            try:
                known = flow.FLOW.get(instruction.name)
                decoded.append(known(instruction, self.program) if known else decode(instruction, self.program))
            except UnknownInstruction as error:
                unknown.append(str(error))
                decoded.append(None)
        if unknown:
            raise UnknownInstruction(f"{self.program.name}: " + "; ".join(unknown))
        targets = (i.operands[0] for i in code if i.name in flow.FLOW and i.operands)
        starts = {0, *(self.program.labels[name] for name in targets if name in self.program.labels)}
        starts |= {place + 1 for place, instruction in enumerate(code) if instruction.name in flow.FLOW}
        ordered = sorted(start for start in starts if start < len(code))
        for start, stop in zip(ordered, [*ordered[1:], len(code)], strict=True):
            ends = code[stop - 1].name in flow.FLOW
            steps = [step for step in decoded[start : stop - ends] if step is not None]
            self.blocks[start] = Block(steps, decoded[stop - 1] if ends else None, stop, stop - start)
        self.origin = {id(step): instruction for step, instruction in zip(decoded, code, strict=True) if step}


@dataclass
class Counters:
    """What a launch did."""

    instructions: int = 0  # wave instructions: one for each wave that runs it
    workgroups: int = 0


def execute(
    kernel: Kernel,
    grid: tuple[int, int, int],
    num_warps: int,
    lds_bytes: int,
    kernargs: bytes,
    memory: Memory,
    lockstep: bool = True,
    limit: int = 300_000_000,
) -> Counters:
    """Runs every workgroup of `grid`. With `lockstep` off, each wave runs alone to the next barrier.

    Raises CdnaError with the line at fault; Stuck past `limit` wave instructions.
    """
    arguments = np.frombuffer(bytearray(kernargs) or bytearray(4), np.uint8)
    segment = memory.add("kernel arguments", arguments, [(0, len(arguments))]).base
    counters = Counters()
    groups = grid[0] * grid[1] * grid[2]
    together = max(1, WAVES // num_warps)
    with np.errstate(all="ignore"):
        for first in range(0, groups, together):
            ids = np.arange(first, min(first + together, groups))
            local = Lds(lds_bytes, len(ids))
            batch = _entry(kernel.program, ids, grid, num_warps, segment, kernargs, memory, local)
            _run(kernel, batch, counters, lockstep, limit)
            counters.workgroups += len(ids)
    return counters


def _entry(program: Program, ids, grid, num_warps: int, segment: int, kernargs: bytes, memory, local) -> Batch:
    """All waves of some workgroups, with the registers that the hardware sets before the first line."""
    slot = np.repeat(np.arange(len(ids)), num_warps)
    inside = np.tile(np.arange(num_warps), len(ids))
    private = program.descriptor["private_segment_fixed_size"]
    wave = ids[slot] * num_warps + inside
    b = Batch.fresh(program.registers, private, wave, slot * local.stride, memory, local)
    b.v[0] = inside[:, None] * LANES + np.arange(LANES)  # work-item id x; y and z stand above it, 0
    place = 0
    asked = program.descriptor
    if asked.get("user_sgpr_private_segment_buffer") or asked.get("user_sgpr_flat_scratch_init"):
        raise UnknownInstruction("a kernel without architected scratch")
    for name, count in USER_REGISTERS:
        if asked.get(f"user_sgpr_{name}"):
            if name == "kernarg_segment_ptr":
                b.set_pair(place, np.uint64(segment))
            place += count
    start = asked.get("user_sgpr_kernarg_preload_offset", 0)
    for k in range(start, start + asked.get("user_sgpr_kernarg_preload_length", 0)):
        word = kernargs[4 * k : 4 * k + 4]
        b.s[:, place] = int.from_bytes(word, "little") if len(word) == 4 else b.s[:, place]
        place += 1
    place = max(place, asked["user_sgpr_count"])
    group = ids[slot]
    coordinates = (group % grid[0], group // grid[0] % grid[1], group // (grid[0] * grid[1]))
    for axis, value in zip("xyz", coordinates, strict=True):
        if asked.get(f"system_sgpr_workgroup_id_{axis}"):
            b.s[:, place] = value
            place += 1
    return b


def _run(kernel: Kernel, whole: Batch, counters: Counters, lockstep: bool, limit: int) -> None:
    ready = [whole] if lockstep else [whole.select([row]) for row in range(whole.count)]
    waiting: list[Batch] = []
    while ready or waiting:
        if not ready:
            ready, waiting = waiting, []
            ready[0].local.watch.epoch += 1
            ready = _met(ready) if lockstep else ready
        behind = min(range(len(ready)), key=lambda n: ready[n].pc) if lockstep else 0
        batch = ready.pop(behind)
        block = kernel.blocks[batch.pc]
        counters.instructions += batch.count * block.size
        if counters.instructions > limit:
            raise Stuck(f"{kernel.program.name} has run {limit} wave instructions")
        ways = _step(kernel, batch, block)
        if ways is flow.END:
            continue
        if ways is flow.BARRIER:
            waiting.append(batch)
            continue
        if len(ways) == 1:
            batch.pc = ways[0][1]
            parts = [batch]
        else:
            parts = []
            for rows, target in ways:
                part = batch.select(rows)
                part.pc = target
                parts.append(part)
        ready[:0] = parts
        if lockstep and len(ready) > 1:
            ready = _met(ready)


def _met(batches: list[Batch]) -> list[Batch]:
    """Joins the batches that stand at the same place."""
    places: dict[int, list[Batch]] = {}
    for batch in batches:
        places.setdefault(batch.pc, []).append(batch)
    return [group[0] if len(group) == 1 else Batch.join(group) for group in places.values()]


def _step(kernel: Kernel, batch: Batch, block: Block):
    """Runs one block; returns where the waves go."""
    batch.pc = block.end
    step = None
    try:
        for step in block.steps:
            step(batch)
        step = block.leave
        return step(batch) if step is not None else [(None, block.end)]
    except CdnaError as error:
        instruction = kernel.origin.get(id(step))
        text = f"{instruction.text} (line {instruction.line})" if instruction else "?"
        error.where = f"\n  in {kernel.program.name}: {text}\n  waves {batch.wave.tolist()}"
        raise
