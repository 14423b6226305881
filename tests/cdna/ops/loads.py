"""What the memory instructions share: how a mnemonic's suffix maps registers to bytes."""

from __future__ import annotations

import re

import numpy as np

from ..operand import Place
from ..wave import Batch


class Form:
    """A load or store form: bytes in memory, sign, and the half of the register it touches."""

    def __init__(self, suffix: str) -> None:
        self.high = suffix.endswith("_d16_hi")
        self.keep = "_d16" in suffix  # the other half of the register stays
        plain = suffix.removesuffix("_hi").removesuffix("_d16")
        self.signed = plain in ("sbyte", "sshort", "i8", "i16", "short_signed")
        sizes = {"ubyte": 1, "sbyte": 1, "byte": 1, "u8": 1, "i8": 1, "b8": 1,
                 "ushort": 2, "sshort": 2, "short": 2, "u16": 2, "i16": 2, "b16": 2, "dword": 4}  # fmt: skip
        if plain in sizes:
            self.size = sizes[plain]
        elif match := re.fullmatch(r"dwordx(\d+)", plain):
            self.size = 4 * int(match[1])
        elif match := re.fullmatch(r"b(32|64|96|128)", plain):
            self.size = int(match[1]) // 8
        else:
            raise KeyError(plain)

    def write(self, b: Batch, where: Place, lanes, data) -> None:
        """Puts loaded bytes [n, size] into registers of the lanes `lanes` (None: all)."""
        if self.size >= 4:
            words = data.view(np.uint32)
            for k in range(self.size // 4):
                _put(b.v[where.index + k], lanes, words[:, k])
            return
        unsigned = data.view(np.uint8 if self.size == 1 else np.uint16)[:, 0]
        if self.signed:
            value = unsigned.view(np.int8 if self.size == 1 else np.int16).astype(np.int32).view(np.uint32)
        else:
            value = unsigned.astype(np.uint32)
        if self.keep:
            _put(
                b.vh[where.index][:, int(self.high) :: 2],
                lanes,
                (value & np.uint32(0xFFFF)).astype(np.uint16),
            )
        else:
            _put(b.v[where.index], lanes, value)

    def read(self, b: Batch, where: Place, lanes):
        """The bytes [n, size] that a store takes from registers of the lanes `lanes`."""
        if self.size >= 4:
            words = b.v[where.index : where.index + self.size // 4]
            picked = words[:, lanes] if lanes is not None else words.reshape(len(words), -1)
            return np.ascontiguousarray(picked.T).view(np.uint8)
        value = b.v[where.index][lanes] if lanes is not None else b.v[where.index].ravel()
        value = value >> np.uint32(16) if self.high else value
        return value.astype(np.uint8 if self.size == 1 else np.uint16).view(np.uint8).reshape(-1, self.size)


def _put(register, lanes, values) -> None:
    if lanes is None:
        register[...] = values.reshape(register.shape)
    else:
        register[lanes] = values


def active(b: Batch):
    """The lanes that are on, as an index; None where all are."""
    return None if b.full else b.mask


def flat(values, b: Batch, lanes):
    """A per-lane array as [n] over the lanes `lanes`."""
    whole = values if values.shape == b.mask.shape else np.broadcast_to(values, b.mask.shape)
    return whole.ravel() if lanes is None else whole[lanes]
