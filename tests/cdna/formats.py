"""Number formats that NumPy lacks: the fp8 tables and bfloat16."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

# name: (exponent bits, mantissa bits, bias, codes that are NaN, codes that are infinite)
LAYOUTS: dict[str, tuple[int, int, int, frozenset[int], frozenset[int]]] = {
    "e4m3fn": (4, 3, 7, frozenset({0x7F, 0xFF}), frozenset()),
    "e4m3fnuz": (4, 3, 8, frozenset({0x80}), frozenset()),
    "e5m2": (5, 2, 15, frozenset({0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF}), frozenset({0x7C, 0xFC})),
    "e5m2fnuz": (5, 2, 16, frozenset({0x80}), frozenset()),
}


def fp8(arch: str) -> str:
    """What the instructions of an architecture mean by fp8."""
    return "e4m3fnuz" if arch.startswith("gfx94") else "e4m3fn"


def bf8(arch: str) -> str:
    """What the instructions of an architecture mean by bf8."""
    return "e5m2fnuz" if arch.startswith("gfx94") else "e5m2"


@cache
def table(name: str) -> F32:
    """The value of each of the 256 codes."""
    exponent_bits, mantissa_bits, bias, nans, infinities = LAYOUTS[name]
    out = np.empty(256, np.float32)
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
        mantissa = code & ((1 << mantissa_bits) - 1)
        if code in nans:
            out[code] = np.nan
        elif code in infinities:
            out[code] = sign * np.inf
        elif exponent == 0:
            out[code] = sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            out[code] = sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
    return out


@cache
def table64(name: str) -> NDArray[np.float64]:
    return table(name).astype(np.float64)


def encode(values: F32, name: str, saturate: bool) -> NDArray[np.uint8]:
    """Rounds float32 to the nearest fp8 code, ties to the even code.

    Past the largest value: that value if `saturate`, else infinity or NaN as the format has it.
    """
    values = np.asarray(values, np.float32)
    _, mantissa_bits, _, nans, infinities = LAYOUTS[name]
    codes = np.arange(128)
    finite = np.array([c for c in codes if c not in nans and c not in infinities])
    levels = table(name)[finite].astype(np.float64)
    top = levels[-1]
    size = np.abs(values.astype(np.float64))
    upper = np.searchsorted(levels, np.minimum(size, top)).clip(1, len(levels) - 1)
    low, high = levels[upper - 1], levels[upper]
    middle = (low + high) / 2
    pick_high = (size > middle) | ((size == middle) & (finite[upper] % 2 == 0))
    code = np.where(pick_high, finite[upper], finite[upper - 1])
    # The step above the largest value decides what still rounds down to it.
    step = 2.0 ** (np.floor(np.log2(top)) - mantissa_bits)
    beyond = (size >= top + step / 2) if finite[-1] % 2 else (size > top + step / 2)
    nan_code = max(nans) if name.endswith("fnuz") else 0x7F
    sign = np.signbit(values).astype(np.int64) << 7
    code = code | sign
    if name.endswith("fnuz"):
        code = np.where((code & 0x7F) == 0, 0, code)  # no negative zero
    if not saturate:
        code = np.where(beyond, (0x7C if infinities else nan_code) | sign, code)
    return np.where(np.isnan(values), nan_code, code).astype(np.uint8)


def from_bf16(bits: NDArray[np.uint16]) -> F32:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values: F32) -> NDArray[np.uint16]:
    """Rounds float32 to the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)
