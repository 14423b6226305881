"""Matrix instructions. EXEC does not matter to them.

With g = 64 / M groups of lanes, lane l gives row l mod M of A (column l mod N of B) for the k values of
block l div M. Results lie in M*N/64 registers. Products are summed in float64 and rounded once: exact
for the 8-bit formats. What the hardware does inside one instruction is not public.
"""

from __future__ import annotations

import re

import numpy as np

from ..errors import UnknownInstruction
from ..formats import bf8, fp8, from_bf16, table64
from ..operand import constant, place
from ..wave import LANES

NAME = re.compile(r"v_mfma_(f32|i32)_(\d+)x(\d+)x(\d+)_?((?:\d+b_)?)(\w+?)(?:_e64)?$")
LANE = np.arange(LANES)


def result_index(m: int, n: int):
    """(row, column), each [registers, 64], of every element of the result."""
    register = np.arange(m * n // LANES)[:, None]
    row = 4 * (LANE // m) + register % 4 + (8 * (register // 4) if m == 32 else 0)
    return row, np.broadcast_to(LANE % n, row.shape)


def _decoder(kind: str, arch: str):
    """(bytes an element, bytes [..., bytes] -> float64 or int64)"""
    if kind in ("fp8", "bf8"):
        values = table64(fp8(arch) if kind == "fp8" else bf8(arch))
        return 1, lambda raw: values.take(raw)
    if kind == "i8":
        return 1, lambda raw: raw.view(np.int8).astype(np.float64)
    if kind == "f16":
        return 2, lambda raw: raw.view(np.float16).astype(np.float64)
    if kind == "bf16":
        return 2, lambda raw: from_bf16(raw.view(np.uint16)).astype(np.float64)
    if kind == "f32":
        return 4, lambda raw: raw.view(np.float32).astype(np.float64)
    if kind == "xf32":
        return (
            4,
            lambda raw: (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64),
        )
    raise UnknownInstruction(f"matrix elements of type {kind}")


def _kinds(ins, text: str) -> tuple[str, str]:
    if text == "f8f6f4":
        formats = {0: "fp8", 1: "bf8"}
        a, b = ins.number("cbsz"), ins.number("blgp")
        if a not in formats or b not in formats:
            raise UnknownInstruction(f"matrix element format {a} x {b}")
        return formats[a], formats[b]
    if any(ins.number(key) for key in ("cbsz", "abid", "blgp")):
        raise UnknownInstruction("a matrix instruction with broadcast or permutation")
    if match := re.fullmatch(r"(fp8|bf8)_(fp8|bf8)", text):
        return match[1], match[2]
    text = text.removesuffix("_1k").removesuffix("1k")
    return text, text


def matrix(ins, program):
    """d, a, b, c: d = a @ b + c."""
    match = NAME.match(ins.name)
    if match is None:
        raise UnknownInstruction(f"matrix form {ins.name}")
    m, n, k = (int(match[i]) for i in (2, 3, 4))
    integer = match[1] == "i32"
    kind_a, kind_b = _kinds(ins, match[6])
    if m == 4:
        blocks = 16
    elif match[5]:
        raise UnknownInstruction("matrix instruction of several blocks")
    else:
        blocks = 1
    size_a, decode_a = _decoder(kind_a, program.arch)
    size_b, decode_b = _decoder(kind_b, program.arch)
    groups = LANES // (m * blocks)
    d, a, b_, c = (place(text, program) for text in ins.operands[:4])
    share = k // groups  # k values a lane
    for where, size in ((a, size_a), (b_, size_b)):
        if where is None or where.count * 4 != share * size:
            raise UnknownInstruction(f"{ins.name} with operands of another size")
    start = constant(ins.operands[3], "i32" if integer else "f32") if c is None else None
    registers = blocks * m * n // LANES
    row, column = result_index(m, n) if blocks == 1 else (None, None)

    def arrange(product):
        """[waves, registers, 64] of the matrices' elements."""
        if blocks == 1:
            return product[:, row, column]
        # Lane 4 * block + column holds the column, one register a row.
        return product.transpose(0, 2, 1, 3).reshape(len(product), 4, LANES)

    def operand(b, where, size, decode, transposed):
        words = b.v[where.index : where.index + where.count].transpose(1, 2, 0)  # [waves, 64, words]
        values = decode(np.ascontiguousarray(words).view(np.uint8) if size == 1 else np.ascontiguousarray(words))
        if blocks == 1:
            values = values.reshape(b.count, groups, m, share)
            order = (0, 1, 3, 2) if transposed else (0, 2, 1, 3)
            values = values.transpose(order)
            return values.reshape((b.count, k, n) if transposed else (b.count, m, k))
        values = values.reshape(b.count, blocks, 4, share)
        return values.swapaxes(-1, -2) if transposed else values

    def run(b):
        left = operand(b, a, size_a, decode_a, False)
        right = operand(b, b_, size_b, decode_b, True)
        product = left @ right
        product = arrange(product).transpose(1, 0, 2)
        source = b.vi if integer else b.vf
        old = source[c.index : c.index + registers] if start is None else start
        total = product + old
        if integer:
            total = total.astype(np.int64).astype(np.int32)
        target = b.vi if integer else b.vf
        target[d.index : d.index + registers] = total

    return run


def find(name: str):
    """The builder for a mnemonic of this family, else None."""
    return matrix if name.startswith("v_mfma_") else None
