"""Runs a few lines of assembly on registers and memory of a test's choosing."""

from __future__ import annotations

import numpy as np

from .asm import Program, _code
from .machine import Counters, Kernel, execute
from .memory import Memory
from .ops.local import Lds
from .wave import EXEC, Batch

DESCRIPTOR = {"accum_offset": 64, "next_free_vgpr": 128, "private_segment_fixed_size": 64, "user_sgpr_count": 8}
LANES = np.arange(64)


def program(text: str, arch: str = "gfx942", **descriptor: int) -> Program:
    """A kernel of these lines with 64 vector and 64 accumulation registers and 64 bytes of scratch."""
    code, labels = _code(["k:", *text.strip().splitlines()], "k")
    return Program("k", arch, code, labels, DESCRIPTOR | descriptor)


def run(
    text: str,
    *,
    arch: str = "gfx942",
    v: dict | None = None,
    s: dict | None = None,
    on: int | None = None,
    waves: int = 1,
    lds: int = 1024,
    memory: Memory | None = None,
) -> Batch:
    """Executes straight code and returns the registers.

    Args:
        v: {register: value a lane}; float arrays are stored as their bits, 64-bit ones in two registers.
        s: {register: value}, likewise.
        on: the 64 bits of EXEC.
    """
    kernel = Kernel(program(text, arch))
    batch = Batch.fresh(128, 64, np.arange(waves), np.zeros(waves, int), memory or Memory(), Lds(lds, 1))
    for index, value in (v or {}).items():
        for k, words in enumerate(_words(value)):
            batch.v[index + k] = words
    for index, value in (s or {}).items():
        for k, words in enumerate(_words(value)):
            batch.s[:, index + k] = words
    if on is not None:
        batch.set_pair(EXEC, np.uint64(on))
    with np.errstate(all="ignore"):
        for step in kernel.blocks[0].steps:
            step(batch)
    return batch


def _words(value):
    value = np.asarray(value)
    if value.dtype.kind == "i" and value.dtype.itemsize == 8:
        value = value.astype(np.uint64) & 0xFFFFFFFF if value.min() >= -(2**31) and value.max() < 2**32 else value
        value = value.astype(np.uint32) if value.max() < 2**32 else value
    if value.dtype.itemsize == 8:
        bits = value.view(np.uint64)
        return [(bits & 0xFFFFFFFF).astype(np.uint32), (bits >> np.uint64(32)).astype(np.uint32)]
    return [value.view(f"u{value.dtype.itemsize}")]


def mapped(*arrays: np.ndarray) -> tuple[Memory, list[int]]:
    """An address space that holds the arrays' bytes, and where each begins."""
    memory = Memory()
    data = [array.reshape(-1).view(np.uint8) for array in arrays]
    return memory, [memory.add(f"array {k}", d, [(0, len(d))]).base for k, d in enumerate(data)]


def launch(text: str, out: np.ndarray, *, waves: int = 2, groups: int = 1, lds: int = 1024, **options) -> Counters:
    """Executes whole workgroups; the address of `out` arrives in s[0:1], the workgroup in s8."""
    memory = Memory()
    data = out.reshape(-1).view(np.uint8)
    base = memory.add("out", data, [(0, len(data))]).base
    descriptor = {"user_sgpr_kernarg_preload_length": 2, "system_sgpr_workgroup_id_x": 1}
    kernel = Kernel(program(text, **descriptor))
    return execute(kernel, (groups, 1, 1), waves, lds, base.to_bytes(8, "little"), memory, **options)
