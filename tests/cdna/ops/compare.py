"""Vector comparisons: every condition for every type, and the test for classes of numbers."""

from __future__ import annotations

import numpy as np

from ..valu import Row

# name: (for numbers, negated forms are true for NaN)
CONDITIONS = {
    "f": lambda a, b: np.zeros(np.broadcast(a, b).shape, bool),
    "lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "t": lambda a, b: np.ones(np.broadcast(a, b).shape, bool),
}  # fmt: skip
INTEGER = CONDITIONS | {"ne": np.not_equal}
FLOAT = CONDITIONS | {
    "lg": lambda a, b: (a < b) | (a > b),
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nge": lambda a, b: ~(a >= b), "ngt": lambda a, b: ~(a > b), "nle": lambda a, b: ~(a <= b),
    "nlt": lambda a, b: ~(a < b), "neq": np.not_equal, "nlg": lambda a, b: ~((a < b) | (a > b)),
    "tru": CONDITIONS["t"],
}  # fmt: skip


def classes(a, wanted):
    """Whether a number is in one of the classes whose bits `wanted` has set, in the order of `found`."""
    kind = np.finfo(a.dtype)
    negative, size = np.signbit(a), np.abs(a)
    quiet_bit = {2: 0x200, 4: 0x400000, 8: 0x8000000000000}[a.dtype.itemsize]
    quiet = (np.asarray(a).view(f"u{a.dtype.itemsize}") & quiet_bit) != 0
    nan, zero, infinite = np.isnan(a), size == 0, np.isinf(a)
    subnormal = ~zero & (size < kind.smallest_normal)
    normal = ~(nan | zero | infinite | subnormal)
    found = [
        nan & ~quiet, nan & quiet, negative & infinite, negative & normal, negative & subnormal,
        negative & zero, ~negative & zero, ~negative & subnormal, ~negative & normal, ~negative & infinite,
    ]  # fmt: skip
    out = np.zeros(np.broadcast(a, wanted).shape, bool)
    for bit, member in enumerate(found):
        out |= member & ((wanted >> np.uint32(bit)) & np.uint32(1)).astype(bool)
    return out


TABLE: dict[str, Row] = {}
for _prefix in ("v_cmp", "v_cmpx"):
    for _kind in ("i16", "u16", "i32", "u32", "i64", "u64"):
        for _name, _function in INTEGER.items():
            TABLE[f"{_prefix}_{_name}_{_kind}"] = ("mask", (_kind, _kind), _function)
    for _kind in ("f16", "f32", "f64"):
        for _name, _function in FLOAT.items():
            TABLE[f"{_prefix}_{_name}_{_kind}"] = ("mask", (_kind, _kind), _function)
        TABLE[f"{_prefix}_class_{_kind}"] = ("mask", (_kind, "u32"), classes)
