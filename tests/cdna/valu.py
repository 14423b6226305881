"""Builds a vector instruction from its table row: reads sources, applies modifiers, writes under EXEC.

A row is (result type, source types, function of NumPy arrays). The result type `mask` is a comparison.
Encodings with sub-dword selection (SDWA) and lane movement (DPP) are handled here for all rows alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .asm import Instruction, Program
from .dpp import Dpp
from .errors import UnknownInstruction
from .operand import BITS, DTYPE, place, vector, vector_writer
from .wave import EXEC

Row = tuple[str, tuple[str, ...], Callable]
SUFFIX = re.compile(r"_(e32|e64|sdwa|dpp|e64_dpp)$")
SIGNED = {"u16": "i16", "u32": "i32"}


def base_name(name: str) -> str:
    """The mnemonic without its encoding."""
    return SUFFIX.sub("", name)


def build(instruction: Instruction, row: Row, program: Program):
    """A function of a Batch that executes the instruction."""
    kind, kinds, function = row
    operands = instruction.operands
    if len(operands) != len(kinds) + 1:
        raise UnknownInstruction(f"{len(operands)} operands where {len(kinds) + 1} are known")
    sdwa = instruction.name.endswith("_sdwa")
    dpp = Dpp(instruction) if instruction.name.endswith("_dpp") else None
    select = instruction.numbers("op_sel") or []
    gets = []
    for k, (text, source) in enumerate(zip(operands[1:], kinds, strict=True)):
        half = select[k] if k < len(select) else 0
        wanted = instruction.modifiers.get(f"src{k}_sel") if sdwa else None
        gets.append(_source(text, source, program, half, wanted, dpp if k == 0 else None))
    function = _scaled(function, instruction, kind)
    if kind == "mask":
        return _comparison(instruction, gets, function, program)
    put = _destination(instruction, kind, program, select[len(kinds)] if len(select) > len(kinds) else None)
    if dpp is not None:
        return lambda b: put(b, function(*[get(b) for get in gets]), dpp.written(b))
    if len(gets) == 1:
        (first,) = gets
        return lambda b: put(b, function(first(b)))
    if len(gets) == 2:
        first, second = gets
        return lambda b: put(b, function(first(b), second(b)))
    return lambda b: put(b, function(*[get(b) for get in gets]))


def _comparison(instruction: Instruction, gets, function, program: Program):
    target = place(instruction.operands[0], program)
    if target is None or target.kind != "s":
        raise UnknownInstruction(f"{instruction.operands[0]!r} cannot hold a comparison")
    index, also_exec = target.index, instruction.name.startswith("v_cmpx")

    def run(b) -> None:
        bits = function(*[get(b) for get in gets])
        b.set_bits(index, bits if b.full else bits & b.mask)
        if also_exec:
            b.set_bits(EXEC, b.bits(index))

    return run


def _source(text: str, kind: str, program: Program, half: int, wanted: str | None, dpp: Dpp | None):
    negative = absolute = extended = False
    if text.startswith("-") and not text[1:2].isdigit():
        negative, text = True, text[1:]
    if match := re.fullmatch(r"neg\((.*)\)", text):
        negative, text = True, match[1]
    if match := re.fullmatch(r"sext\((.*)\)", text):
        extended, text = True, match[1]
    if match := re.fullmatch(r"\|(.*)\||abs\((.*)\)", text):
        absolute, text = True, match[1] or match[2]
    if wanted in (None, "DWORD"):
        get = vector(text, kind, program, half)
    else:
        get = _selected(text, kind, program, wanted, extended)
    if dpp is not None:
        plain = get
        get = lambda b: dpp.read(b, plain(b))  # noqa: E731
    return signed(get, kind, absolute, negative)


def signed(get, kind: str, absolute: bool, negative: bool):
    """Adds |x| and -x to a reader. Where a float passes through as bits, they act on its sign bit."""
    if not (absolute or negative):
        return get
    if kind == "u32":
        keep, flip = np.uint32(0x7FFFFFFF if absolute else 0xFFFFFFFF), np.uint32(negative << 31)
        return lambda b: (get(b) & keep) ^ flip
    if not kind.startswith("f"):
        raise UnknownInstruction(f"sign modifier on an operand of type {kind}")
    if not absolute:
        return lambda b: np.negative(get(b))
    return lambda b: np.negative(np.abs(get(b))) if negative else np.abs(get(b))


def _selected(text: str, kind: str, program: Program, wanted: str, extended: bool):
    """A byte or a word of a register, widened to the operand's type."""
    get = vector(text, "u32", program)
    width, shift = _field(wanted)
    signed = np.int8 if width == 8 else np.int16
    bits = BITS[kind]

    def read(b):
        value = (get(b) >> np.uint32(shift)) & np.uint32((1 << width) - 1)
        if extended:
            value = value.astype(signed).astype(np.int32).view(np.uint32)
        return value.astype(f"u{bits // 8}").view(DTYPE[kind])

    return read


def _field(name: str) -> tuple[int, int]:
    """(bits, shift) of a sub-dword selection."""
    part, number = name.split("_")
    width = 8 if part == "BYTE" else 16
    return width, int(number) * width


def _destination(instruction: Instruction, kind: str, program: Program, half: int | None):
    wanted = instruction.modifiers.get("dst_sel", "DWORD")
    text = instruction.operands[0]
    if wanted == "DWORD" or not instruction.name.endswith("_sdwa"):
        return vector_writer(text, kind, program, half)
    width, shift = _field(wanted)
    unused = instruction.modifiers["dst_unused"]
    get, put = vector(text, "u32", program), vector_writer(text, "u32", program)
    field = np.uint32(((1 << width) - 1) << shift)

    def write(b, value, mask=None) -> None:
        value = np.asarray(value, DTYPE[kind])
        bits = value.view(f"u{value.dtype.itemsize}").astype(np.uint32)
        bits = (bits << np.uint32(shift)) & field
        if unused == "UNUSED_PRESERVE":
            bits = bits | (get(b) & ~field)
        elif unused == "UNUSED_SEXT":
            up = np.uint32(32 - width - shift)
            bits = ((bits << up).view(np.int32) >> np.int32(up)).view(np.uint32)
        put(b, bits, mask)

    return write


def _scaled(function: Callable, instruction: Instruction, kind: str) -> Callable:
    """Adds the output modifiers: a factor, then a clamp to [0, 1]."""
    factor = {"2": 2.0, "4": 4.0}.get(instruction.modifiers.get("mul", ""))
    factor = 0.5 if instruction.modifiers.get("div") == "2" else factor
    clamp = instruction.flag("clamp")
    if factor is None and not clamp:
        return function
    if not kind.startswith("f"):
        return saturated(function, instruction.name, kind)

    def scaled(*values):
        out = function(*values)
        out = out if factor is None else out * out.dtype.type(factor)
        # A clamped NaN is 0 (the DX10 rule, which the kernel descriptor turns on).
        return np.where(np.isnan(out), 0, np.clip(out, 0, 1)).astype(out.dtype) if clamp else out

    return scaled


SATURATING = re.compile(r"v_(pk_)?(add|sub|subrev|add_nc|sub_nc)_[ui](16|32)(_|$)")


def saturated(function: Callable, name: str, kind: str) -> Callable:
    """An integer sum or difference that stops at the ends of its type instead of wrapping."""
    if not SATURATING.match(name):
        raise UnknownInstruction("clamp on an integer result other than a sum")
    ends = np.iinfo(DTYPE[kind])

    def clamped(*values):
        wide = function(*(np.asarray(value, np.int64) for value in values))
        return np.clip(wide, ends.min, ends.max).astype(DTYPE[kind])

    return clamped
