"""Turns the text of an operand into a function that reads it from, or writes it to, a `Batch`.

Vector readers return something that broadcasts to [waves, 64]; scalar readers give [waves]. A type is
one of u32 i32 f32, u16 i16 f16, u64 i64 f64, and `mask` (a scalar pair as one boolean a lane).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .asm import Program
from .errors import UnknownInstruction
from .wave import EXEC, M0, VCC, Batch

Reader = Callable[[Batch], Any]
DTYPE = {
    "u8": np.uint8, "u16": np.uint16, "i16": np.int16, "f16": np.float16,
    "u32": np.uint32, "i32": np.int32, "f32": np.float32,
    "u64": np.uint64, "i64": np.int64, "f64": np.float64,
}  # fmt: skip
BITS = {name: np.dtype(kind).itemsize * 8 for name, kind in DTYPE.items()}
NAMED = {
    "vcc": VCC,
    "vcc_lo": VCC,
    "vcc_hi": VCC + 1,
    "exec": EXEC,
    "exec_lo": EXEC,
    "exec_hi": EXEC + 1,
    "m0": M0,
}
REGISTER = re.compile(r"^([vas]|ttmp)(?:(\d+)|\[(\d+)(?::(\d+))?\])$")
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


class Place:
    """A register operand: kind "v" or "s", first index, number of 32-bit registers."""

    def __init__(self, kind: str, index: int, count: int) -> None:
        self.kind, self.index, self.count = kind, index, count


def place(text: str, program: Program) -> Place | None:
    """The registers that `text` names, or None for a constant."""
    if text in NAMED:
        return Place("s", NAMED[text], 2 if text in ("vcc", "exec") else 1)
    match = REGISTER.match(text)
    if match is None:
        return None
    kind = match[1]
    first = int(match[2] or match[3])
    count = int(match[4]) - first + 1 if match[4] else 1
    if kind == "s" or kind == "ttmp":
        return Place("s", first + (108 if kind == "ttmp" else 0), count)
    limit = program.vgprs if kind == "v" else program.registers - program.vgprs
    if first + count > limit:
        raise UnknownInstruction(f"{text}: the kernel declares {limit} registers of kind {kind}")
    return Place("v", first + (program.vgprs if kind == "a" else 0), count)


def constant(text: str, kind: str):
    """A literal or inline constant as the bits that an operand of type `kind` sees."""
    dtype, bits = DTYPE[kind], BITS[kind]
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text):
        value = int(text, 0)
        if kind == "f64" and text.startswith("0x"):
            value <<= 32  # a 32-bit literal is the upper half of a double
        return np.array(value & ((1 << bits) - 1), f"u{bits // 8}").view(dtype)[()]
    if re.fullmatch(r"-?\d+\.\d+(e[-+]?\d+)?", text):
        value = 1 / (2 * np.pi) if text == "0.15915494" else float(text)
        floating = {16: np.float16, 32: np.float32, 64: np.float64}[bits]
        return np.array(value, floating).view(dtype)[()]
    raise UnknownInstruction(f"operand {text!r} is neither a register nor a number")


def vector(text: str, kind: str, program: Program, half: int = 0) -> Reader:
    """Reads one value a lane. `half` picks the upper 16 bits for a 16-bit type."""
    if text == "src_scc":
        return lambda b: b.scc[:, None].astype(DTYPE[kind])
    where = place(text, program)
    if where is None:
        value = constant(text, kind)
        return lambda b: value
    i, dtype = where.index, DTYPE.get(kind)
    if kind == "mask":
        return lambda b: b.bits(i)
    if where.kind == "v":
        if BITS[kind] == 32:
            return {"u32": lambda b: b.v[i], "i32": lambda b: b.vi[i], "f32": lambda b: b.vf[i]}[kind]
        if BITS[kind] == 16:
            return lambda b: b.vh[i][:, half::2].view(dtype) if kind == "u16" else _as16(b.vh[i][:, half::2], dtype)
        return lambda b: (b.v[i] | (b.v[i + 1].astype(np.uint64) << HALF)).view(dtype)
    if BITS[kind] == 32:
        return lambda b: b.s.view(dtype)[:, i : i + 1]
    if BITS[kind] == 16:
        return lambda b: np.ascontiguousarray(b.s.view(dtype)[:, 2 * i + half : 2 * i + half + 1])
    return lambda b: np.ascontiguousarray(b.pair(i)).view(dtype)[:, None]


def _as16(halves, dtype):
    return np.ascontiguousarray(halves).view(dtype)


def scalar(text: str, kind: str, program: Program) -> Reader:
    """Reads one value a wave, [waves]."""
    if text in ("src_scc", "scc"):
        return lambda b: b.scc.astype(DTYPE[kind])
    if text in ("src_vccz", "vccz"):
        return lambda b: (b.pair(VCC) == 0).astype(DTYPE[kind])
    if text in ("src_execz", "execz"):
        return lambda b: (b.pair(EXEC) == 0).astype(DTYPE[kind])
    where = place(text, program)
    dtype = DTYPE[kind]
    if where is None:
        value = constant(text, kind)
        return lambda b: np.full(b.count, value)
    i = where.index
    if where.kind == "v":
        raise UnknownInstruction(f"vector register {text} in a scalar instruction")
    if BITS[kind] == 64:
        return lambda b: np.ascontiguousarray(b.pair(i)).view(dtype)
    return lambda b: b.s.view(dtype)[:, i]


def scalar_writer(text: str, kind: str, program: Program) -> Callable[[Batch, Any], None]:
    """Writes one value a wave."""
    where = place(text, program)
    if where is None or where.kind != "s":
        raise UnknownInstruction(f"{text!r} cannot be written by a scalar instruction")
    i, unsigned = where.index, np.uint64 if BITS[kind] == 64 else np.uint32

    def write(b: Batch, value) -> None:
        value = np.asarray(value, DTYPE[kind]).view(unsigned)
        if unsigned is np.uint64:
            b.set_pair(i, value)
        else:
            b.s[:, i] = value
            if i >= EXEC:
                b.exec_changed()

    return write


def vector_writer(text: str, kind: str, program: Program, half: int | None = None):
    """Writes one value a lane where EXEC is on, or where `mask` says.

    A 16-bit result clears the register's upper half, unless `half` (0 or 1) says which half to replace.
    """
    where = place(text, program)
    if where is None or where.kind != "v":
        raise UnknownInstruction(f"{text!r} cannot be written by a vector instruction")
    i, dtype = where.index, DTYPE[kind]

    def put(b: Batch, index: int, value, mask) -> None:
        if mask is None and b.full:
            b.v[index] = value
        else:
            np.copyto(b.v[index], value, where=b.mask if mask is None else mask)

    def write32(b: Batch, value, mask=None) -> None:
        put(b, i, np.asarray(value, dtype).view(np.uint32), mask)

    def write16(b: Batch, value, mask=None) -> None:
        bits = np.asarray(value, dtype).view(np.uint16)
        if half is None:
            put(b, i, bits.astype(np.uint32), mask)
        else:
            np.copyto(b.vh[i][:, half::2], bits, where=b.mask if mask is None else mask)

    def write64(b: Batch, value, mask=None) -> None:
        bits = np.asarray(value, dtype).view(np.uint64)
        put(b, i, (bits & LOW).astype(np.uint32), mask)
        put(b, i + 1, (bits >> HALF).astype(np.uint32), mask)

    return {16: write16, 32: write32, 64: write64}[BITS[kind]]
