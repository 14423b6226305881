"""Vector instructions with a second result or a hidden operand: carries, wide products, division steps."""

from __future__ import annotations

import numpy as np

from ..errors import UnknownInstruction
from ..operand import DTYPE, place, vector, vector_writer
from ..valu import build
from ..wave import VCC
from .vector_float import ACCUMULATE, fma, fma64
from .vector_float import TABLE as FLOAT

U64 = np.uint64


def _pair(text: str, program) -> int:
    where = place(text, program)
    if where is None or where.kind != "s":
        raise UnknownInstruction(f"{text!r} cannot hold a carry")
    return where.index


def carried(ins, program):
    """v_add_co_u32 d, carry, a, b and v_addc_co_u32 d, carry, a, b, carry-in; also sub and subrev."""
    put, out = vector_writer(ins.operands[0], "u32", program), _pair(ins.operands[1], program)
    first, second = (vector(text, "u32", program) for text in ins.operands[2:4])
    carry_in = vector(ins.operands[4], "mask", program) if len(ins.operands) > 4 else None
    if "rev" in ins.name:
        first, second = second, first
    subtract = "sub" in ins.name

    def run(b):
        x, y = np.asarray(first(b), np.int64), np.asarray(second(b), np.int64)
        c = 0 if carry_in is None else carry_in(b).astype(np.int64)
        total = x - y - c if subtract else x + y + c
        carry = (total < 0) | (total > 0xFFFFFFFF)
        put(b, total & 0xFFFFFFFF)
        b.set_bits(out, carry & b.mask)

    return run


def wide_mad(ins, program):
    """v_mad_u64_u32 d, carry, a, b, c: 32 x 32 + 64 bits. The carry is 0 for the signed form's users."""
    kind = "u" if "u64" in ins.name else "i"
    put, out = vector_writer(ins.operands[0], "u64", program), _pair(ins.operands[1], program)
    first, second = (vector(text, f"{kind}32", program) for text in ins.operands[2:4])
    addend = vector(ins.operands[4], "u64", program)
    wide = U64 if kind == "u" else np.int64

    def run(b):
        c = addend(b)
        total = np.multiply(first(b), second(b), dtype=wide).astype(U64) + c
        put(b, total)
        b.set_bits(out, np.broadcast_to(total < c, b.mask.shape) & b.mask)

    return run


def accumulate(ins, program):
    """v_fmac d, a, b: d = a * b + d."""
    name = next(key for key in ACCUMULATE if ins.name.startswith(key))
    again = type(ins)(ins.name, (*ins.operands, ins.operands[0]), ins.modifiers, ins.line, ins.text)
    return build(again, FLOAT[ACCUMULATE[name]], program)


def div_scale(ins, program):
    """d, flag, s, denominator, numerator: s scaled where the quotient could leave the normal range.

    The flag tells v_div_fmas to undo it.
    """
    kind = ins.name.split("_")[3]
    power, far, tiny = (64, 96, -104) if kind == "f32" else (128, 768, -970)
    put, out = vector_writer(ins.operands[0], kind, program), _pair(ins.operands[1], program)
    which, denominator, numerator = (_signed(text, kind, program) for text in ins.operands[2:5])
    normal = np.finfo(DTYPE[kind]).smallest_normal

    def run(b):
        s, d, n = np.broadcast_arrays(which(b), denominator(b), numerator(b))
        up, down, is_d, is_n = np.ldexp(s, power), np.ldexp(s, -power), s == d, s == n
        exponent_d, exponent_n = (np.frexp(x)[1] - 1 for x in (d, n))
        small_inverse, small_quotient = np.abs(1 / d) < normal, np.abs(n / d) < normal
        rules = [  # (case, scaled, flag): the first that holds
            ((n == 0) | (d == 0), np.full_like(s, np.nan), False),
            (exponent_n - exponent_d >= far, np.where(is_d, up, s), True),
            (np.abs(d) < normal, up, False),
            (small_inverse & small_quotient, np.where(is_d, down, s), True),
            (small_inverse, down, False),
            (small_quotient, np.where(is_n, up, s), True),
            (exponent_n <= tiny, up, False),
        ]
        cases = [case for case, _, _ in rules]
        put(b, np.select(cases, [scaled for _, scaled, _ in rules], s))
        flag = np.select(cases, [np.full(s.shape, flag) for _, _, flag in rules], False)
        b.set_bits(out, np.broadcast_to(flag, b.mask.shape) & b.mask)

    return run


def div_fmas(ins, program):
    """a * b + c, then the scale of v_div_scale undone where VCC is set."""
    kind = ins.name.split("_")[3]
    put = vector_writer(ins.operands[0], kind, program)
    gets = [_signed(text, kind, program) for text in ins.operands[1:4]]
    multiply, power = (fma, 64) if kind == "f32" else (fma64, 128)

    def run(b):
        a, x, c = (get(b) for get in gets)
        undo = np.where(np.frexp(c)[1] - 1 > 0, power, -power)
        put(b, multiply(a, x, c, np.where(b.bits(VCC), undo, 0)))

    return run


def _signed(text: str, kind: str, program):
    if text.startswith("-") and not text[1:2].isdigit():
        get = _signed(text[1:], kind, program)
        return lambda b: -get(b)
    if text.startswith("|"):
        bare = vector(text.strip("|"), kind, program)
        return lambda b: np.abs(bare(b))
    return vector(text, kind, program)


BUILDERS = {f"v_{name}_co_u32": carried for name in ("add", "addc", "sub", "subb", "subrev", "subbrev")}
BUILDERS |= {"v_mad_u64_u32": wide_mad, "v_mad_i64_i32": wide_mad}
BUILDERS |= dict.fromkeys(ACCUMULATE, accumulate)
BUILDERS |= {f"v_div_scale_{kind}": div_scale for kind in ("f32", "f64")}
BUILDERS |= {f"v_div_fmas_{kind}": div_fmas for kind in ("f32", "f64")}
