"""From Triton's launch arguments to an execution: kernel arguments packed, tensors mapped."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from .machine import Counters, Kernel, execute
from .memory import Memory, Storage

SCALARS = {
    "i1": "<b", "i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q",
    "u1": "<B", "u8": "<B", "u16": "<H", "u32": "<I", "u64": "<Q",
    "fp16": "<e", "fp32": "<f", "f32": "<f", "fp64": "<d",
}  # fmt: skip


@dataclass
class Mapping:
    """The tensors of one launch in a fresh address space."""

    memory: Memory = field(default_factory=Memory)
    storages: dict[int, Storage] = field(default_factory=dict)  # real base -> storage

    def address(self, name: str, tensor: Any) -> int:
        """The fake address of a tensor's first element; its extent becomes accessible."""
        start = tensor.data_ptr()
        if tensor.numel() == 0 or start == 0:
            return 0
        base, data = _bytes(tensor)
        storage = self.storages.get(base)
        if storage is None:
            storage = self.storages[base] = self.memory.add(name, data, [])
        elif name not in storage.name:
            storage.name += f"/{name}"
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in steps)
        offset = start - base
        storage.allow(offset, offset + extent * tensor.element_size())
        return storage.base + offset


def _bytes(tensor: torch.Tensor):
    """(address, uint8 array) of the whole storage behind a CPU tensor, without a copy."""
    if tensor.device.type != "cpu":
        raise ValueError(f"the executor reads CPU tensors, not {tensor.device}")
    storage = tensor.untyped_storage()
    block = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    return storage.data_ptr(), np.frombuffer(block, np.uint8)


def pack(program, grid, num_warps: int, values: list[tuple[str, str, Any]], mapping: Mapping) -> bytes:
    """The kernel argument segment: (name, Triton type, value) in order, null scratch pointers, hidden values.

    What nobody defines is poison, so a kernel that reads it goes astray visibly.
    """
    out = bytearray(b"\xa5" * program.descriptor["kernarg_size"])
    hidden = hidden_values(grid, num_warps)
    plain = [argument for argument in program.arguments if not argument[2].startswith("hidden_")]
    if len(values) > len(plain):
        raise ValueError(f"{program.name} takes {len(plain)} arguments, got {len(values)}")
    for (offset, size, _), (name, kind, value) in zip_longest(plain, values, fillvalue=("scratch", "*i8", None)):
        word = encoded(name, kind, value, mapping)
        if len(word) > size:
            raise ValueError(f"{program.name}: argument {name} of type {kind} does not fit {size} bytes")
        out[offset : offset + len(word)] = word
    for offset, size, kind in program.arguments:
        if kind in hidden:
            out[offset : offset + size] = hidden[kind].to_bytes(size, "little")
    return bytes(out)


def hidden_values(grid, num_warps: int) -> dict[str, int]:
    """What the runtime appends to a launch's arguments, as the metadata calls it."""
    sizes = {"x": 64 * num_warps, "y": 1, "z": 1}
    values = {f"hidden_block_count_{axis}": count for axis, count in zip("xyz", grid, strict=True)}
    for axis, size in sizes.items():
        values |= {f"hidden_group_size_{axis}": size, f"hidden_remainder_{axis}": 0, f"hidden_global_offset_{axis}": 0}
    return values | {"hidden_grid_dims": 3 if grid[2] > 1 else 2 if grid[1] > 1 else 1}


def encoded(name: str, kind: str, value, mapping: Mapping) -> bytes:
    """One argument's bytes. Raises ValueError for a type that the executor lacks."""
    if kind.startswith("*"):
        return struct.pack("<Q", 0 if value is None else mapping.address(name, value))
    if kind == "bf16":
        return struct.pack("<f", value)[2:]
    if kind not in SCALARS:
        raise ValueError(f"argument {name} has type {kind}, which the executor lacks")
    return struct.pack(SCALARS[kind], value)


def launch(kernel: Kernel, grid, num_warps: int, lds_bytes: int, values, lockstep: bool) -> Counters:
    """Executes a kernel on CPU tensors."""
    mapping = Mapping()
    arguments = pack(kernel.program, grid, num_warps, values, mapping)
    return execute(kernel, grid, num_warps, lds_bytes, arguments, mapping.memory, lockstep)
