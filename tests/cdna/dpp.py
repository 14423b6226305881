"""Data-parallel primitives: a vector operand read from another lane of the same wave."""

from __future__ import annotations

import re

import numpy as np

from .asm import Instruction
from .errors import UnknownInstruction
from .wave import LANES

LANE = np.arange(LANES)
ROW, PLACE = LANE & ~15, LANE & 15


def _within_row(source):
    return ROW + source, (source >= 0) & (source < 16)


# name: n -> (source lane of each lane, where it exists)
MOVES = {
    "row_shl": lambda n: _within_row(PLACE + n),
    "row_shr": lambda n: _within_row(PLACE - n),
    "row_ror": lambda n: _within_row((PLACE - n) % 16),
    "row_newbcast": lambda n: _within_row(np.full(LANES, n)),
    "row_mirror": lambda _: _within_row(15 - PLACE),
    "row_half_mirror": lambda _: _within_row((PLACE & 8) + 7 - (PLACE & 7)),
    "wave_shl": lambda n: (LANE + n, LANE + n < LANES),
    "wave_shr": lambda n: (LANE - n, LANE - n >= 0),
    "wave_rol": lambda n: ((LANE + n) % LANES, LANE >= 0),
    "wave_ror": lambda n: ((LANE - n) % LANES, LANE >= 0),
    # Lane 15 of each row to the whole next row; lane 31 to the upper half.
    "row_bcast:15": lambda _: (ROW - 1, ROW > 0),
    "row_bcast:31": lambda _: (np.full(LANES, 31), LANE >= 32),
}


class Dpp:
    """The lane movement of one instruction.

    source  int [64]   lane to read
    exists  bool [64]  whether there is such a lane
    allowed bool [64]  lanes that row_mask and bank_mask let be written
    zero               a lane without source reads 0; otherwise it is not written
    """

    def __init__(self, instruction: Instruction) -> None:
        self.source, self.exists = _movement(instruction)
        self.source = np.where(self.exists, self.source, 0)
        rows, banks = instruction.number("row_mask", 15), instruction.number("bank_mask", 15)
        self.allowed = ((rows >> (LANE >> 4)) & 1 & (banks >> ((LANE & 15) >> 2))).astype(bool)
        # Assemblers print the set bit as bound_ctrl:1, older ones as bound_ctrl:0.
        self.zero = instruction.flag("bound_ctrl")

    def present(self, b):
        """bool [waves, 64]: lanes whose source exists and is on."""
        return self.exists if b.full else self.exists & b.mask[:, self.source]

    def read(self, b, value):
        """The moved operand; 0 where the source is missing."""
        if value.shape[-1] != LANES:
            return value
        return np.where(self.present(b), value[:, self.source], value.dtype.type(0))

    def written(self, b):
        """bool [waves, 64]: lanes that the instruction writes."""
        mask = b.mask & self.allowed
        return mask if self.zero else mask & self.present(b)


def _movement(instruction: Instruction):
    if "quad_perm" in instruction.modifiers:
        order = np.array(instruction.numbers("quad_perm"))
        return (LANE & ~3) + order[LANE & 3], LANE >= 0
    for key, value in instruction.modifiers.items():
        if f"{key}:{value}" in MOVES:
            return MOVES[f"{key}:{value}"](0)
        if key in MOVES:
            return MOVES[key](int(value, 0) if re.fullmatch(r"\d+|0x[0-9a-f]+", value) else 0)
    raise UnknownInstruction(f"data-parallel movement in {instruction.text!r}")
