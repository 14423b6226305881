"""Packed vector arithmetic (v_pk_*), mixed-precision fused multiply-add and dot products.

`op_sel` picks, for the lower result, which half each source gives; `op_sel_hi` for the upper result.
"""

from __future__ import annotations

import numpy as np

from ..errors import UnknownInstruction
from ..operand import constant, place, vector, vector_writer
from ..valu import saturated
from .vector_float import fma, fma16, maximum, minimum

U32, U64 = np.uint32, np.uint64
HALVES = {
    "v_pk_add_f16": ("f16", np.add), "v_pk_mul_f16": ("f16", np.multiply), "v_pk_fma_f16": ("f16", fma16),
    "v_pk_max_f16": ("f16", maximum), "v_pk_min_f16": ("f16", minimum),
    "v_pk_maximum3_f16": ("f16", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_pk_minimum3_f16": ("f16", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_pk_add_u16": ("u16", np.add), "v_pk_sub_u16": ("u16", np.subtract),
    "v_pk_mul_lo_u16": ("u16", np.multiply),
    "v_pk_mad_u16": ("u16", lambda a, b, c: a * b + c), "v_pk_max_u16": ("u16", np.maximum),
    "v_pk_min_u16": ("u16", np.minimum), "v_pk_lshlrev_b16": ("u16", lambda n, a: a << (n & 15)),
    "v_pk_lshrrev_b16": ("u16", lambda n, a: a >> (n & 15)),
    "v_pk_add_i16": ("i16", np.add), "v_pk_sub_i16": ("i16", np.subtract),
    "v_pk_max_i16": ("i16", np.maximum),
    "v_pk_min_i16": ("i16", np.minimum), "v_pk_mad_i16": ("i16", lambda a, b, c: a * b + c),
    "v_pk_ashrrev_i16": ("i16", lambda n, a: a >> (n & 15)),
}  # fmt: skip
SINGLES = {
    "v_pk_add_f32": ("f32", np.add), "v_pk_mul_f32": ("f32", np.multiply), "v_pk_fma_f32": ("f32", fma),
    "v_pk_mov_b32": ("u32", None),
}  # fmt: skip


def _choice(ins, key: str, count: int, default: int) -> list[int]:
    return (ins.numbers(key) or []) + [default] * (count - len(ins.numbers(key) or []))


def _negated(get, negative: int):
    return (lambda b: np.negative(get(b))) if negative else get


def halves(ins, program):
    """Two 16-bit results from the halves of one register each."""
    kind, function = HALVES[ins.name.removesuffix("_e64")]
    count = len(ins.operands) - 1
    if ins.flag("clamp"):
        function = saturated(function, ins.name, kind)
    lanes = []
    for key, default, neg in (("op_sel", 0, "neg_lo"), ("op_sel_hi", 1, "neg_hi")):
        chosen, signs = _choice(ins, key, count, default), _choice(ins, neg, count, 0)
        lanes.append([
            _negated(_half(text, kind, program, half), sign)
            for text, half, sign in zip(ins.operands[1:], chosen, signs, strict=True)
        ])  # fmt: skip
    put = vector_writer(ins.operands[0], "u32", program)

    def run(b):
        low, high = (np.asarray(function(*[get(b) for get in gets])).view(np.uint16) for gets in lanes)
        put(b, low.astype(U32) | high.astype(U32) << U32(16))

    return run


def _half(text: str, kind: str, program, half: int):
    if place(text, program) is not None:
        return vector(text, kind, program, half)
    # A constant is 32 bits wide: an inline number stands in its lower half.
    if "." in text:
        value = constant(text, kind) if not half else np.zeros((), np.uint16).view(constant(text, kind).dtype)[()]
    else:
        bits = int(constant(text, "u32")) >> 16 * half & 0xFFFF
        value = np.array(bits, np.uint16).view(constant("0", kind).dtype)[()]
    return lambda b: value


def singles(ins, program):
    """Two 32-bit results from register pairs."""
    kind, function = SINGLES[ins.name.removesuffix("_e64")]
    count = len(ins.operands) - 1
    low, high = _choice(ins, "op_sel", count, 0), _choice(ins, "op_sel_hi", count, 1)
    neg_low, neg_high = _choice(ins, "neg_lo", count, 0), _choice(ins, "neg_hi", count, 0)
    if function is None:  # v_pk_mov_b32: the lower result from source 0, the upper one from source 1
        low, high = [low[0]], [low[1]]
        sources = [[ins.operands[1]], [ins.operands[2]]]
        function = lambda a: a  # noqa: E731
    else:
        sources = [list(ins.operands[1:])] * 2
    gets = [
        [_negated(_single(t, kind, program, h), n) for t, h, n in zip(texts, chosen, signs, strict=False)]
        for texts, chosen, signs in zip(sources, (low, high), (neg_low, neg_high), strict=True)
    ]
    target = place(ins.operands[0], program)
    puts = [vector_writer(_register(target, half, program), kind, program) for half in (0, 1)]

    def run(b):
        results = [function(*[get(b) for get in part]) for part in gets]
        for put, result in zip(puts, results, strict=True):
            put(b, result)

    return run


def _single(text: str, kind: str, program, half: int):
    where = place(text, program)
    if where is None:
        return vector(text, kind, program)  # both halves see the constant
    if where.count != 2:
        raise UnknownInstruction(f"{text} is not a register pair")
    return vector(_register(where, half, program), kind, program)


def _register(where, half: int, program) -> str:
    index = where.index + half
    if where.kind == "v":
        return f"v{index}" if index < program.vgprs else f"a{index - program.vgprs}"
    return {106: "vcc_lo", 107: "vcc_hi"}.get(index, f"s{index}")


def mixed(ins, program):
    """v_fma_mix*: sources are float32, or halves of a register where op_sel_hi says so."""
    select, wide = _choice(ins, "op_sel", 3, 0), _choice(ins, "op_sel_hi", 3, 0)
    signs, sizes = _choice(ins, "neg_lo", 3, 0), _choice(ins, "neg_hi", 3, 0)
    gets = []
    for k, text in enumerate(ins.operands[1:]):
        if text.startswith("-"):
            signs[k], text = 1, text[1:]
        if text.startswith("|"):
            sizes[k], text = 1, text.strip("|")
        get = vector(text, "f16", program, select[k]) if wide[k] else vector(text, "f32", program)
        gets.append((get, sizes[k], signs[k]))
    name = ins.name.removesuffix("_e64")
    kind = "f32" if name == "v_fma_mix_f32" else "f16"
    put = vector_writer(ins.operands[0], kind, program, {"v_fma_mixlo_f16": 0, "v_fma_mixhi_f16": 1}.get(name))
    clamp = ins.flag("clamp")

    def run(b):
        values = []
        for get, size, sign in gets:
            value = np.asarray(get(b), np.float32)
            value = np.abs(value) if size else value
            values.append(-value if sign else value)
        out = fma(*values)
        put(b, np.clip(out, 0, 1) if clamp else out)

    return run


DOTS = {  # name: (bits of an element, signed or floating, result)
    "v_dot2_f32_f16": (16, "f", "f32"), "v_dot2c_f32_f16": (16, "f", "f32"), "v_dot2_f32_bf16": (16, "b",
    "f32"),
    "v_dot2c_f32_bf16": (16, "b", "f32"),
    "v_dot2_i32_i16": (16, "i", "i32"), "v_dot2_u32_u16": (16, "u", "u32"), "v_dot4_i32_i8": (8, "i", "i32"),
    "v_dot4c_i32_i8": (8, "i", "i32"), "v_dot4_u32_u8": (8, "u", "u32"),
}  # fmt: skip


def dot(ins, program):
    """Sum of the products of a register's parts, plus the third source."""
    bits, sort, kind = DOTS[ins.name.removesuffix("_e64").removesuffix("_e32")]
    if ins.numbers("op_sel") or set(ins.numbers("op_sel_hi") or [1]) != {1} or ins.flag("clamp"):
        raise UnknownInstruction("a dot product with a selection or a clamp")
    operands = ins.operands if len(ins.operands) == 4 else (*ins.operands, ins.operands[0])
    first, second = (vector(text, "u32", program) for text in operands[1:3])
    addend, put = vector(operands[3], kind, program), vector_writer(operands[0], kind, program)

    def part(value, place):
        value = (value >> U32(place)) & U32((1 << bits) - 1)
        if sort == "b":
            return (value << U32(16)).view(np.float32).astype(np.float64)
        dtype = f"{sort}{bits // 8}"
        wide = np.float64 if sort == "f" else np.int64
        return value.astype(f"u{bits // 8}").view(dtype).astype(wide)

    def run(b):
        x, y = np.asarray(first(b)), np.asarray(second(b))
        total = sum(part(x, n) * part(y, n) for n in range(0, 32, bits)) + addend(b)
        put(b, total if sort in "fb" else total & 0xFFFFFFFF if kind == "u32" else total.astype(np.int32))

    return run


BUILDERS = dict.fromkeys(HALVES, halves) | dict.fromkeys(SINGLES, singles) | dict.fromkeys(DOTS, dot)
BUILDERS |= dict.fromkeys(("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16"), mixed)
