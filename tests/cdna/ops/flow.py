"""Branches, barriers and the instructions that only pace or configure the hardware.

A flow builder returns a function of a Batch that says where its waves go: a list of (boolean a wave,
program counter), or one of the words BARRIER and END.
"""

from __future__ import annotations

import numpy as np

from ..errors import Trap, UnknownInstruction
from ..operand import scalar, scalar_writer
from ..wave import EXEC, VCC

BARRIER, END = "barrier", "end"
CONDITIONS = {
    "s_cbranch_scc0": lambda b: ~b.scc, "s_cbranch_scc1": lambda b: b.scc,
    "s_cbranch_vccz": lambda b: b.pair(VCC) == 0, "s_cbranch_vccnz": lambda b: b.pair(VCC) != 0,
    "s_cbranch_execz": lambda b: b.pair(EXEC) == 0, "s_cbranch_execnz": lambda b: b.pair(EXEC) != 0,
}  # fmt: skip
# Waits, priorities and cache control change nothing here: memory is always up to date.
IGNORED = {
    "s_waitcnt", "s_waitcnt_vscnt", "s_waitcnt_depctr", "s_nop", "s_sleep", "s_setprio", "s_sethalt",
    "s_icache_inv", "s_dcache_inv", "s_dcache_wb", "s_dcache_inv_vol", "s_ttracedata", "s_incperflevel",
    "buffer_inv", "buffer_wbl2", "buffer_wbinvl1", "buffer_wbinvl1_vol",
}  # fmt: skip


def branch(ins, program):
    target = program.labels[ins.operands[0]]
    return lambda b: [(None, target)]


def conditional(ins, program):
    target, condition = program.labels[ins.operands[0]], CONDITIONS[ins.name]

    def run(b):
        taken = condition(b)
        if taken.all():
            return [(None, target)]
        if not taken.any():
            return [(None, b.pc)]
        return [(taken, target), (~taken, b.pc)]

    return run


def barrier(ins, program):
    return lambda b: BARRIER


def end(ins, program):
    return lambda b: END


def trap(ins, program):
    def run(b):
        raise Trap("the kernel trapped, as a failed device assertion does")

    return run


FLOW = {"s_branch": branch, "s_barrier": barrier, "s_endpgm": end, "s_trap": trap}
FLOW |= dict.fromkeys(CONDITIONS, conditional)


def ignored(ins, program):
    return None


def clock(ins, program):
    """s_memtime, s_memrealtime: time stands still."""
    put = scalar_writer(ins.operands[0], "u64", program)
    return lambda b: put(b, np.zeros(b.count, np.uint64))


def set_mode(ins, program):
    """Only the rounding and denormal modes that arithmetic here has anyway, and the exception bits."""
    register = ins.operands[0].replace(" ", "")
    if not register.startswith("hwreg(HW_REG_MODE"):
        raise UnknownInstruction(f"a write to {register}")
    value = scalar(ins.operands[1], "u32", program)
    bits = register.removesuffix(")").split(",")
    offset, width = (int(bits[1]), int(bits[2])) if len(bits) > 2 else (0, 32)

    def run(b):
        for place in range(width):
            wanted = 1 if 4 <= offset + place <= 7 else 0
            if offset + place < 8 and ((value(b) >> np.uint32(place)) & 1 != wanted).any():
                raise UnknownInstruction("a rounding or denormal mode other than the default")

    return run


BUILDERS = dict.fromkeys(IGNORED, ignored)
BUILDERS |= {"s_memtime": clock, "s_memrealtime": clock}
BUILDERS |= {"s_setreg_imm32_b32": set_mode, "s_setreg_b32": set_mode}
