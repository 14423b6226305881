"""Reads the assembly text that Triton returns as ``asm["amdgcn"]`` into a `Program`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

LABEL = re.compile(r"^([.\w$]+):")
TARGET = re.compile(r"\.amdgcn_target\s+\"[^\"]*(gfx\w+?)(?::[^\"]*)?\"")
DESCRIPTOR = re.compile(r"^\s*\.amdhsa_(\w+)\s+(\S+)", re.MULTILINE)
ARGUMENT = re.compile(r"\.offset:\s+(?P<offset>\d+)\s+\.size:\s+(?P<size>\d+)\s+\.value_kind:\s+(?P<kind>\w+)")


@dataclass(frozen=True)
class Instruction:
    """One line of code: ``v_add_u32_e32 v0, s1, v2`` with its modifiers split off."""

    name: str
    operands: tuple[str, ...]
    modifiers: dict[str, str]
    line: int
    text: str

    def flag(self, name: str) -> bool:
        return name in self.modifiers

    def number(self, name: str, default: int = 0) -> int:
        """The value of an integer modifier such as ``offset:0x10``."""
        return int(self.modifiers[name], 0) if name in self.modifiers else default

    def numbers(self, name: str) -> list[int] | None:
        """The value of a list modifier such as ``op_sel:[0,1]``; None where it is absent."""
        if name not in self.modifiers:
            return None
        return [int(item, 0) for item in self.modifiers[name].strip("[]").split(",")]


@dataclass
class Program:
    """A kernel's code and what its descriptor says about launching it."""

    name: str
    arch: str
    code: list[Instruction]
    labels: dict[str, int]  # name -> index into code
    descriptor: dict[str, int]  # the .amdhsa_ directives
    arguments: list[tuple[int, int, str]] = field(default_factory=list)  # (offset, size in bytes, kind)

    @property
    def vgprs(self) -> int:
        """Architectural vector registers; accumulation registers follow behind them."""
        return self.descriptor["accum_offset"]

    @property
    def registers(self) -> int:
        """All vector registers that a wave may name."""
        return max(self.descriptor["next_free_vgpr"], self.vgprs)

    def mnemonics(self) -> set[str]:
        return {instruction.name for instruction in self.code}


def parse(text: str) -> Program:
    """Parses one kernel. Raises ValueError where the text does not hold exactly one."""
    target = TARGET.search(text)
    descriptor = {key: int(value, 0) for key, value in DESCRIPTOR.findall(text) if _is_number(value)}
    names = re.findall(r"^\s*\.amdhsa_kernel\s+(\S+)", text, re.MULTILINE)
    if target is None or len(names) != 1:
        raise ValueError(f"expected one kernel with a target, found kernels {names}")
    code, labels = _code(text.splitlines(), names[0])
    metadata = text.partition(".amdgpu_metadata")[2]
    arguments = [(int(m["offset"]), int(m["size"]), m["kind"]) for m in ARGUMENT.finditer(metadata)]
    return Program(names[0], target[1], code, labels, descriptor, arguments)


def _code(lines: list[str], name: str) -> tuple[list[Instruction], dict[str, int]]:
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    inside = False
    for number, raw in enumerate(lines, 1):
        line = raw.partition(";")[0].strip()
        if label := LABEL.match(line):
            inside = inside or label[1] == name
            labels[label[1]] = len(code)
            line = line[label.end() :].strip()
        if not inside or not line:
            continue
        if line.startswith(".section"):
            break
        if not line.startswith("."):
            code.append(instruction(line, number))
    return code, labels


def instruction(text: str, line: int = 0) -> Instruction:
    """Splits one line of code into name, operands and modifiers."""
    name, _, rest = " ".join(text.split()).partition(" ")
    pieces = [piece for piece in _split(rest, ",") if piece]
    modifiers: dict[str, str] = {}
    operands: list[str] = []
    for place, piece in enumerate(pieces):
        words = _split(piece, " ")
        if place < len(pieces) - 1 and len(words) > 1:
            raise ValueError(f"line {line}: cannot read {text!r}")
        for word in words:
            key, colon, value = word.partition(":")
            if _is_modifier(word):
                modifiers[key] = value if colon else ""
            else:
                operands.append(word)
    return Instruction(name, tuple(operands), modifiers, line, " ".join(text.split()))


FLAGS = {
    "offen", "idxen", "lds", "glc", "slc", "sc0", "sc1", "nt", "clamp", "gds", "bound_ctrl",
    "row_mirror", "row_half_mirror",
}  # fmt: skip


def _is_modifier(word: str) -> bool:
    return word in FLAGS or re.match(r"[a-z_0-9]+:", word) is not None


def _split(text: str, separator: str) -> list[str]:
    """Splits at separators that stand outside brackets; drops blanks around the pieces."""
    pieces, depth, start = [], 0, 0
    for place, char in enumerate(text):
        depth += (char in "[(") - (char in "])")
        if char == separator and depth == 0:
            pieces.append(text[start:place].strip())
            start = place + 1
    pieces.append(text[start:].strip())
    return [piece for piece in pieces if piece]


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text) is not None
