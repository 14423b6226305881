"""The table from mnemonic to meaning.

Three sorts of entry: a row (result type, source types, NumPy function) for plain vector arithmetic; a
builder (instruction, program) -> function of a Batch for the rest; a flow builder that ends a block.
"""

from __future__ import annotations

from ..errors import UnknownInstruction
from ..valu import base_name, build
from . import (
    buffer,
    carry,
    compare,
    convert,
    convert_fp8,
    flow,
    global_memory,
    lanes,
    local,
    matrix,
    packed,
    scalar,
    vector_float,
    vector_int,
)  # fmt: skip

ROWS = vector_float.TABLE | vector_int.TABLE | compare.TABLE | convert.TABLE
BUILDERS = (
    carry.BUILDERS | convert_fp8.BUILDERS | packed.BUILDERS | lanes.BUILDERS | scalar.BUILDERS | flow.BUILDERS
    | global_memory.BUILDERS | buffer.BUILDERS | local.BUILDERS
)  # fmt: skip
# Builders that read the modifiers of the _dpp and _sdwa encodings themselves.
TAKES_MODIFIERS = (carry.accumulate, convert_fp8.unpack_one, convert_fp8.unpack_two)


def known(name: str) -> bool:
    """Whether the table has this mnemonic."""
    return _find(name) is not None or name in flow.FLOW


def _find(name: str):
    base = base_name(name)
    if base in ROWS:
        return ROWS[base]
    return BUILDERS.get(base) or BUILDERS.get(name) or matrix.find(name) or local.find(name)


def decode(instruction, program):
    """A function of a Batch; None for what changes nothing. Raises UnknownInstruction by name."""
    found = _find(instruction.name)
    try:
        if found is None:
            raise UnknownInstruction("no such row in the table")
        if isinstance(found, tuple):
            return build(instruction, found, program)
        if instruction.name.endswith(("_dpp", "_sdwa")) and found not in TAKES_MODIFIERS:
            raise UnknownInstruction("lane movement or sub-dword selection is known for plain rows only")
        return found(instruction, program)
    except (UnknownInstruction, KeyError, ValueError, AttributeError, IndexError) as error:
        raise UnknownInstruction(
            f"unknown instruction {instruction.name}: {error} (line {instruction.line}: {instruction.text})"
        ) from error
