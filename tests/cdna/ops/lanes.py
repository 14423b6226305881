"""Vector instructions that move values between lanes, or between lanes and scalar registers."""

from __future__ import annotations

import numpy as np

from ..errors import UnknownInstruction
from ..operand import place, scalar, scalar_writer, vector, vector_writer
from ..wave import LANES
from .vector_int import bitop3

LANE = np.arange(LANES)


def read_first_lane(ins, program):
    """The value of the first lane that is on; of lane 0 where none is."""
    get, put = vector(ins.operands[1], "u32", program), scalar_writer(ins.operands[0], "u32", program)

    def run(b):
        value = np.broadcast_to(get(b), b.mask.shape)
        put(b, value[:, 0] if b.full else value[np.arange(b.count), b.mask.argmax(axis=1)])

    return run


def read_lane(ins, program):
    get, lane = vector(ins.operands[1], "u32", program), scalar(ins.operands[2], "u32", program)
    put = scalar_writer(ins.operands[0], "u32", program)
    return lambda b: put(b, np.broadcast_to(get(b), b.mask.shape)[np.arange(b.count), lane(b) & 63])


def write_lane(ins, program):
    """One lane of a register, whatever EXEC is."""
    value, lane = (scalar(text, "u32", program) for text in ins.operands[1:3])
    target = place(ins.operands[0], program)

    def run(b):
        b.v[target.index, np.arange(b.count), lane(b) & 63] = value(b)

    return run


def count_below(ins, program):
    """v_mbcnt_lo/hi d, mask, c: bits of the mask at lower lanes, in the lower or upper 32, plus c."""
    mask, addend = (vector(text, "u32", program) for text in ins.operands[1:3])
    put = vector_writer(ins.operands[0], "u32", program)
    reach = np.clip(LANE - (32 if "_hi_" in ins.name else 0), 0, 32)
    below = ((1 << reach) - 1).astype(np.uint32)
    return lambda b: put(b, np.bitwise_count(mask(b) & below) + addend(b))


def swap_rows(ins, program):
    """v_permlane16_swap / 32_swap d, s: odd rows (halves) of d change places with even ones of s."""
    first, second = (place(text, program) for text in ins.operands[:2])
    width = 16 if "permlane16" in ins.name else 32
    odd = LANE[(LANE // width) % 2 == 1]

    def run(b):
        if not b.full:
            raise UnknownInstruction("a row swap with lanes off")
        kept = b.v[first.index][:, odd].copy()
        b.v[first.index][:, odd] = b.v[second.index][:, odd - width]
        b.v[second.index][:, odd - width] = kept

    return run


def swap(ins, program):
    first, second = (place(text, program) for text in ins.operands[:2])

    def run(b):
        kept = b.v[first.index].copy()
        np.copyto(b.v[first.index], b.v[second.index], where=b.mask)
        np.copyto(b.v[second.index], kept, where=b.mask)

    return run


def any_of_three(ins, program):
    """v_bitop3: the function of three bits whose truth table is the modifier."""
    kind = "u16" if "_b16" in ins.name else "u32"
    gets = [vector(text, kind, program) for text in ins.operands[1:4]]
    put, truth = vector_writer(ins.operands[0], kind, program), ins.number("bitop3")
    return lambda b: put(b, bitop3(*[get(b) for get in gets], truth))


BUILDERS = {
    "v_readfirstlane_b32": read_first_lane, "v_readlane_b32": read_lane, "v_writelane_b32": write_lane,
    "v_mbcnt_lo_u32_b32": count_below, "v_mbcnt_hi_u32_b32": count_below, "v_swap_b32": swap,
    "v_permlane16_swap_b32": swap_rows, "v_permlane32_swap_b32": swap_rows,
    "v_bitop3_b32": any_of_three, "v_bitop3_b16": any_of_three,
    "v_nop": lambda ins, program: lambda b: None,
}  # fmt: skip
