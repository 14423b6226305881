"""Conversions from and to the 8-bit float formats, whose meaning depends on the architecture."""

from __future__ import annotations

import numpy as np

from ..errors import UnknownInstruction
from ..formats import bf8, encode, fp8, table, to_bf16
from ..operand import vector, vector_writer

U32 = np.uint32


def _format(name: str, arch: str) -> str:
    return fp8(arch) if "_fp8" in name else bf8(arch)


def unpack_one(ins, program):
    """v_cvt_f32_fp8: byte 0, or the one that src0_sel or byte_sel names."""
    values = table(_format(ins.name, program.arch))
    select = ins.modifiers.get("src0_sel", "BYTE_0")
    if not select.startswith("BYTE_"):
        raise UnknownInstruction(f"source selection {select}")
    shift = U32(8 * ins.number("byte_sel", int(select[5:])))
    if ins.numbers("op_sel"):
        raise UnknownInstruction("op_sel of a single fp8 conversion")
    get, put = vector(ins.operands[1], "u32", program), vector_writer(ins.operands[0], "f32", program)
    return lambda b: put(b, values[(get(b) >> shift) & U32(0xFF)])


def unpack_two(ins, program):
    """v_cvt_pk_f32_fp8: both bytes of the lower or upper half, to two registers."""
    values = table(_format(ins.name, program.arch))
    upper = ins.modifiers.get("src0_sel") == "WORD_1" or (ins.numbers("op_sel") or [0])[0]
    shift = U32(16 if upper else 0)
    get, put = vector(ins.operands[1], "u32", program), vector_writer(ins.operands[0], "u64", program)

    def run(b):
        bits = get(b) >> shift
        low = values[bits & U32(0xFF)].view(U32).astype(np.uint64)
        high = values[(bits >> U32(8)) & U32(0xFF)].view(U32).astype(np.uint64)
        put(b, low | high << np.uint64(32))

    return run


def pack_two(ins, program):
    """v_cvt_pk_fp8_f32: two floats to two bytes of one half; the other half stays."""
    name = _format(ins.name, program.arch)
    upper = (ins.numbers("op_sel") or [0, 0, 0])[2]
    first, second = (_float(text, program) for text in ins.operands[1:3])
    put = vector_writer(ins.operands[0], "u16", program, upper)

    def run(b):
        low, high = np.broadcast_arrays(encode(first(b), name, False), encode(second(b), name, False))
        put(b, low.astype(np.uint16) | (high.astype(np.uint16) << np.uint16(8)))

    return run


def _float(text: str, program):
    if text.startswith("-") and not text[1:2].isdigit():
        inner = _float(text[1:], program)
        return lambda b: -inner(b)
    if text.startswith("|"):
        bare = vector(text.strip("|"), "f32", program)
        return lambda b: np.abs(bare(b))
    return vector(text, "f32", program)


def scaled_unpack_two(ins, program):
    """v_cvt_scalef32_pk_{f32,f16,bf16}_fp8: two bytes times a power of two given as a float."""
    values = table(_format(ins.name, program.arch))
    upper = (ins.numbers("op_sel") or [0])[0]
    shift = U32(16 if upper else 0)
    target = ins.name.split("_pk_")[1].split("_")[0]
    get, scale = vector(ins.operands[1], "u32", program), _float(ins.operands[2], program)
    put = vector_writer(ins.operands[0], "u64" if target == "f32" else "u32", program)

    def run(b):
        bits, factor = get(b) >> shift, power(scale(b))
        pair = [values[(bits >> U32(n)) & U32(0xFF)] * factor for n in (0, 8)]
        if target == "f32":
            low, high = (np.asarray(x, np.float32).view(U32).astype(np.uint64) for x in pair)
            put(b, low | high << np.uint64(32))
        else:
            low, high = (to_bf16(x) if target == "bf16" else x.astype(np.float16).view(np.uint16) for x in pair)
            put(b, low.astype(U32) | high.astype(U32) << U32(16))

    return run


def scaled_pack_two(ins, program):
    """v_cvt_scalef32_pk_fp8_{f32,f16,bf16}: values divided by a power of two, to one half."""
    name = _format(ins.name, program.arch)
    upper = (ins.numbers("op_sel") or [0, 0, 0, 0])[-1]
    source = ins.name.split("_")[-1] if not ins.name.endswith(("_e64", "_e32")) else ins.name.split("_")[-2]
    put = vector_writer(ins.operands[0], "u16", program, upper)
    scale = _float(ins.operands[-1], program)
    if source == "f32":
        first, second = (_float(text, program) for text in ins.operands[1:3])
    else:
        both = vector(ins.operands[1], "u32", program)

        def widen(bits):
            if source == "bf16":
                return (bits << U32(16)).view(np.float32)
            return bits.astype(np.uint16).view(np.float16).astype(np.float32)

        first = lambda b: widen(both(b) & U32(0xFFFF))  # noqa: E731
        second = lambda b: widen(both(b) >> U32(16))  # noqa: E731

    def run(b):
        factor = power(scale(b))
        low, high = (encode(get(b) / factor, name, False) for get in (first, second))
        low, high = np.broadcast_arrays(low, high)
        put(b, low.astype(np.uint16) | high.astype(np.uint16) << np.uint16(8))

    return run


def power(scale):
    """Only the exponent of a scale counts."""
    return np.ldexp(np.float32(1), np.frexp(np.asarray(scale, np.float32))[1] - 1).astype(np.float32)


BUILDERS = {}
for _kind in ("fp8", "bf8"):
    BUILDERS |= {
        f"v_cvt_f32_{_kind}": unpack_one,
        f"v_cvt_pk_f32_{_kind}": unpack_two,
        f"v_cvt_pk_{_kind}_f32": pack_two,
    }
    for _other in ("f32", "f16", "bf16"):
        BUILDERS[f"v_cvt_scalef32_pk_{_other}_{_kind}"] = scaled_unpack_two
        BUILDERS[f"v_cvt_scalef32_pk_{_kind}_{_other}"] = scaled_pack_two
