"""Scalar arithmetic on one value a wave: (result, sources, NumPy, what SCC becomes)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..operand import scalar, scalar_writer
from ..wave import EXEC
from .vector_int import bfe, bfe_signed, bfm, bit_reverse, first_high, first_high_signed, first_low

U32, U64 = np.uint32, np.uint64
Row = tuple[str, tuple[str, ...], Callable, str | None]
LOGIC = {
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b, "orn2": lambda a, b: a | ~b, "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b), "xnor": lambda a, b: ~(a ^ b),
}  # fmt: skip


def shift(function):
    return lambda a, n: function(a, (n & n.dtype.type(a.dtype.itemsize * 8 - 1)).astype(a.dtype))


left, right = shift(np.left_shift), shift(np.right_shift)


def field(a, where):
    return bfe(a, where, (where >> U32(16)) & U32(0x7F))


def field64(a, where):
    offset, width = (where & U32(63)).astype(U64), ((where >> U32(16)) & U32(0x7F)).astype(U64)
    keep = np.where(width >= 64, ~U64(0), (U64(1) << (width & U64(63))) - U64(1))
    return (a >> offset) & keep


def field_signed64(a, where):
    offset, width = (where & U32(63)).astype(np.int64), ((where >> U32(16)) & U32(0x7F)).astype(np.int64)
    up = np.clip(64 - width, 0, 63)
    return np.where(width == 0, 0, ((a >> offset) << up) >> up)


def ones64(width, offset):
    width, offset = ((n & U32(63)).astype(U64) for n in (width, offset))
    return ((U64(1) << width) - U64(1)) << offset


def low_bit64(a):
    low = a & (~a + U64(1))
    return np.where(a == 0, -1, np.frexp(low.astype(np.float64))[1] - 1)


def high_zeros64(a):
    upper, lower = (a >> U64(32)).astype(U32), (a & U64(0xFFFFFFFF)).astype(U32)
    return np.where(upper != 0, first_high(upper), np.where(lower == 0, U32(0xFFFFFFFF), first_high(lower) + U32(32)))


def quads(a):
    """One bit for each group of four bits that has any set."""
    out = np.zeros_like(a)
    for place in range(a.dtype.itemsize * 2):
        out |= ((a >> a.dtype.type(4 * place)) & a.dtype.type(15) != 0).astype(a.dtype) << a.dtype.type(place)
    return out


def whole_quads(a):
    out = np.zeros_like(a)
    for place in range(0, a.dtype.itemsize * 8, 4):
        four = a.dtype.type(15) << a.dtype.type(place)
        out |= np.where(a & four, four, a.dtype.type(0))
    return out


TABLE: dict[str, Row] = {
    "s_mov_b32": ("u32", ("u32",), lambda a: a, None), "s_mov_b64": ("u64", ("u64",), lambda a: a, None),
    "s_movk_i32": ("i32", ("u32",), lambda a: a.astype(np.int16), None),
    "s_brev_b32": ("u32", ("u32",), bit_reverse, None),
    "s_sext_i32_i8": ("i32", ("u32",), lambda a: a.astype(np.int8), None),
    "s_sext_i32_i16": ("i32", ("u32",), lambda a: a.astype(np.int16), None),
    "s_ff1_i32_b32": ("u32", ("u32",), first_low, None),
    "s_ff0_i32_b32": ("u32", ("u32",), lambda a: first_low(~a), None),
    "s_ff1_i32_b64": ("i32", ("u64",), low_bit64, None),
    "s_ff0_i32_b64": ("i32", ("u64",), lambda a: low_bit64(~a), None),
    "s_flbit_i32_b32": ("u32", ("u32",), first_high, None),
    "s_flbit_i32_b64": ("u32", ("u64",), high_zeros64, None),
    "s_flbit_i32": ("u32", ("i32",), first_high_signed, None),
    "s_bfm_b32": ("u32", ("u32", "u32"), bfm, None),
    "s_bfm_b64": ("u64", ("u32", "u32"), ones64, None),
    "s_mul_i32": ("u32", ("u32", "u32"), np.multiply, None),
    "s_mul_hi_u32": ("u32", ("u32", "u32"), lambda a, b: np.multiply(a, b, dtype=U64) >> U64(32), None),
    "s_mul_hi_i32": ("i32", ("i32", "i32"), lambda a, b: np.multiply(a, b, dtype=np.int64) >> 32, None),
    "s_pack_ll_b32_b16": ("u32", ("u32", "u32"), lambda a, b: (a & U32(0xFFFF)) | (b << U32(16)), None),
    "s_pack_lh_b32_b16": ("u32", ("u32",
    "u32"), lambda a, b: (a & U32(0xFFFF)) | (b & U32(0xFFFF0000)), None),
    "s_pack_hh_b32_b16": ("u32", ("u32", "u32"), lambda a, b: (a >> U32(16)) | (b & U32(0xFFFF0000)), None),
    "s_add_u32": ("u32", ("u32", "u32"), np.add, "carry"), "s_sub_u32": ("u32", ("u32", "u32"), np.subtract,
    "borrow"),
    "s_add_i32": ("i32", ("i32", "i32"), np.add, "overflow+"),
    "s_sub_i32": ("i32", ("i32",
    "i32"), np.subtract, "overflow-"),
    "s_absdiff_i32": ("u32", ("i32", "i32"), lambda a, b: np.abs(a.astype(np.int64) - b) & 0xFFFFFFFF,
    "nonzero"),
    "s_abs_i32": ("u32", ("i32",), lambda a: np.abs(a.astype(np.int64)), "nonzero"),
    "s_lshl_b32": ("u32", ("u32", "u32"), left, "nonzero"), "s_lshl_b64": ("u64", ("u64", "u32"), left,
    "nonzero"),
    "s_lshr_b32": ("u32", ("u32", "u32"), right, "nonzero"), "s_lshr_b64": ("u64", ("u64", "u32"), right,
    "nonzero"),
    "s_ashr_i32": ("i32", ("i32", "u32"), right, "nonzero"), "s_ashr_i64": ("i64", ("i64", "u32"), right,
    "nonzero"),
    "s_bfe_u32": ("u32", ("u32", "u32"), field, "nonzero"), "s_bfe_u64": ("u64", ("u64", "u32"), field64,
    "nonzero"),
    "s_bfe_i32": ("i32", ("i32", "u32"), lambda a, w: bfe_signed(a, w, (w >> U32(16)) & U32(0x7F)),
    "nonzero"),
    "s_bfe_i64": ("i64", ("i64", "u32"), field_signed64, "nonzero"),
    "s_min_i32": ("i32", ("i32", "i32"), np.minimum, "first"), "s_min_u32": ("u32", ("u32",
    "u32"), np.minimum, "first"),
    "s_max_i32": ("i32", ("i32", "i32"), np.maximum, "first"), "s_max_u32": ("u32", ("u32",
    "u32"), np.maximum, "first"),
    "s_bcnt1_i32_b32": ("u32", ("u32",), np.bitwise_count, "nonzero"),
    "s_bcnt1_i32_b64": ("u32", ("u64",), np.bitwise_count, "nonzero"),
    "s_bcnt0_i32_b32": ("u32", ("u32",), lambda a: np.bitwise_count(~a), "nonzero"),
    "s_bcnt0_i32_b64": ("u32", ("u64",), lambda a: np.bitwise_count(~a), "nonzero"),
}  # fmt: skip
for _bits in ("32", "64"):
    for _name, _function in LOGIC.items():
        TABLE[f"s_{_name}_b{_bits}"] = (f"u{_bits}", (f"u{_bits}",) * 2, _function, "nonzero")
    TABLE[f"s_not_b{_bits}"] = (f"u{_bits}", (f"u{_bits}",), np.invert, "nonzero")
    TABLE[f"s_quadmask_b{_bits}"] = (f"u{_bits}", (f"u{_bits}",), quads, "nonzero")
    TABLE[f"s_wqm_b{_bits}"] = (f"u{_bits}", (f"u{_bits}",), whole_quads, "nonzero")
for _n in range(1, 5):
    TABLE[f"s_lshl{_n}_add_u32"] = (
        "u32", ("u32", "u32"), lambda a, b, n=_n: (a.astype(U64) << U64(n)) + b, "wide")  # fmt: skip
CONDITIONS = {
    "eq": np.equal,
    "lg": np.not_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
}
# SCC after an instruction, from the sources and the result
FLAGS = {
    "nonzero": lambda x, r: r != 0,
    "first": lambda x, r: x[0] == r,
    "carry": lambda x, r: r < x[0],
    "borrow": lambda x, r: x[1] > x[0],
    "wide": lambda x, r: r > 0xFFFFFFFF,
    "overflow+": lambda x, r: ((x[0] ^ r) & (x[1] ^ r)) < 0,
    "overflow-": lambda x, r: ((x[0] ^ x[1]) & (x[0] ^ r)) < 0,
}


def from_table(ins, program):
    kind, kinds, function, flag = TABLE[ins.name]
    gets = [scalar(text, source, program) for text, source in zip(ins.operands[1:], kinds, strict=True)]
    put = scalar_writer(ins.operands[0], kind, program)
    becomes = FLAGS[flag] if flag else None

    def run(b):
        values = [get(b) for get in gets]
        result = function(*values)
        if becomes is not None:
            b.scc = becomes(values, result)
        put(b, result)

    return run


def compare(ins, program):
    """s_cmp_*, s_cmpk_*: only SCC."""
    _, condition, kind = ins.name.replace("cmpk", "cmp").split("_")[-3:]
    first, second = (scalar(text, kind, program) for text in ins.operands)
    function = CONDITIONS[condition]
    extend = "cmpk" in ins.name and kind == "i32"  # the text shows 16 bits of the constant

    def run(b):
        b.scc = function(first(b), second(b).astype(np.int16) if extend else second(b))

    return run


def test_bit(ins, program):
    wide = ins.name.endswith("64")
    value, bit = (
        scalar(ins.operands[0], "u64" if wide else "u32", program),
        scalar(ins.operands[1], "u32", program),
    )
    wanted = 1 if "bitcmp1" in ins.name else 0

    def run(b):
        b.scc = (value(b).astype(U64) >> (bit(b) & U32(63 if wide else 31)).astype(U64)) & U64(1) == wanted

    return run


def set_bit(ins, program):
    kind = "u64" if ins.name.endswith("64") else "u32"
    old, bit = scalar(ins.operands[0], kind, program), scalar(ins.operands[1], "u32", program)
    put, on = scalar_writer(ins.operands[0], kind, program), "bitset1" in ins.name

    def run(b):
        one = old(b).dtype.type(1) << (bit(b) & U32(63 if kind == "u64" else 31)).astype(old(b).dtype)
        put(b, old(b) | one if on else old(b) & ~one)

    return run


def with_carry(ins, program):
    """s_addc_u32, s_subb_u32: SCC in and out."""
    first, second = (scalar(text, "u32", program) for text in ins.operands[1:])
    put, subtract = scalar_writer(ins.operands[0], "u32", program), "subb" in ins.name

    def run(b):
        x, y = first(b).astype(np.int64), second(b).astype(np.int64)
        total = x - y - b.scc if subtract else x + y + b.scc
        b.scc = (total < 0) | (total > 0xFFFFFFFF)
        put(b, total & 0xFFFFFFFF)

    return run


def short_constant(ins, program):
    """s_addk_i32, s_mulk_i32, s_cmovk_i32: a register and a 16-bit constant."""
    old, value = scalar(ins.operands[0], "i32", program), scalar(ins.operands[1], "i32", program)
    put, name = scalar_writer(ins.operands[0], "i32", program), ins.name

    def run(b):
        x, y = old(b).copy(), value(b).astype(np.int16).astype(np.int32)
        if name == "s_addk_i32":
            b.scc = FLAGS["overflow+"]((x, y), x + y)
            put(b, x + y)
        else:
            put(b, x * y if name == "s_mulk_i32" else np.where(b.scc, y, x))

    return run


def choose(ins, program):
    """s_cselect: by SCC; s_cmov: only where SCC is set."""
    kind = "u64" if ins.name.endswith("64") else "u32"
    texts = ins.operands[1:] if len(ins.operands) == 3 else (ins.operands[1], ins.operands[0])
    yes, no = (scalar(text, kind, program) for text in texts)
    put = scalar_writer(ins.operands[0], kind, program)
    return lambda b: put(b, np.where(b.scc, yes(b), no(b)))


def save_exec(ins, program):
    """d = EXEC; EXEC = source (op) EXEC; also the form that leaves the new EXEC in d."""
    name = ins.name.removeprefix("s_").split("_")[0]
    swapped = name.endswith("n1")  # andn1: ~source & EXEC
    function = LOGIC[name.replace("n1", "n2")]
    source, put = scalar(ins.operands[1], "u64", program), scalar_writer(ins.operands[0], "u64", program)
    writes_result = "wrexec" in ins.name

    def run(b):
        old, value = b.pair(EXEC).copy(), source(b).copy()
        new = function(old, value) if swapped else function(value, old)
        put(b, new if writes_result else old)
        b.set_pair(EXEC, new)
        b.scc = new != 0

    return run


BUILDERS = dict.fromkeys(TABLE, from_table)
for _condition in CONDITIONS:
    for _kind in ("i32", "u32", "u64"):
        BUILDERS[f"s_cmp_{_condition}_{_kind}"] = BUILDERS[f"s_cmpk_{_condition}_{_kind}"] = compare
for _name in LOGIC:
    BUILDERS[f"s_{_name}_saveexec_b64"] = save_exec
for _name in ("andn1", "orn1"):
    BUILDERS[f"s_{_name}_saveexec_b64"] = save_exec
BUILDERS |= {"s_andn1_wrexec_b64": save_exec, "s_andn2_wrexec_b64": save_exec}
for _bits in ("32", "64"):
    BUILDERS |= {f"s_bitcmp{n}_b{_bits}": test_bit for n in (0, 1)} | {f"s_bitset{n}_b{_bits}": set_bit for n in (0, 1)}
    BUILDERS |= {f"s_cselect_b{_bits}": choose, f"s_cmov_b{_bits}": choose}
BUILDERS |= dict.fromkeys(("s_addc_u32", "s_subb_u32"), with_carry)
BUILDERS |= dict.fromkeys(("s_addk_i32", "s_mulk_i32", "s_cmovk_i32"), short_constant)
