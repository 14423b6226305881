"""From Triton's launch arguments to an execution: kernel arguments packed, tensors mapped."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, field
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


def pack(program, values: list[tuple[str, str, Any]], mapping: Mapping) -> bytes:
    """The kernel argument segment for (name, Triton type, value) in order; hidden pointers are null."""
    out = bytearray(program.descriptor["kernarg_size"])
    if len(values) > len(program.arguments):
        raise ValueError(f"{program.name} takes {len(program.arguments)} arguments, got {len(values)}")
    for (offset, size), (name, kind, value) in zip(program.arguments, values, strict=False):
        if kind.startswith("*"):
            word = struct.pack("<Q", 0 if value is None else mapping.address(name, value))
        elif kind == "bf16":
            word = struct.pack("<f", value)[2:]
        elif kind in SCALARS:
            word = struct.pack(SCALARS[kind], value)
        else:
            raise ValueError(f"{program.name}: argument {name} has type {kind}, which the executor lacks")
        if len(word) > size:
            raise ValueError(f"{program.name}: argument {name} of type {kind} does not fit {size} bytes")
        out[offset : offset + len(word)] = word
    return bytes(out)


def launch(kernel: Kernel, grid, num_warps: int, lds_bytes: int, values, lockstep: bool) -> Counters:
    """Executes a kernel on CPU tensors."""
    mapping = Mapping()
    arguments = pack(kernel.program, values, mapping)
    return execute(kernel, grid, num_warps, lds_bytes, arguments, mapping.memory, lockstep)
