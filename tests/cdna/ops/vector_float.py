"""Floating-point vector arithmetic, one row an instruction: (result, sources, NumPy)."""

from __future__ import annotations

import numpy as np

from ..valu import Row

F32_HALF_STEP = np.uint64(0x10000000)  # a double halfway between two floats
F32_REST = np.uint64(0x1FFFFFFF)


def fma(a, b, c, power=0):
    """(a * b + c) * 2^power of float32 with one rounding.

    The product is exact in float64. The sum is rounded to float64 first; where that lands halfway
    between two floats, the rounding's own error decides.
    """
    product = np.multiply(a, b, dtype=np.float64)
    total = np.asarray(product + c)
    halfway = (total.view(np.uint64) & F32_REST) == F32_HALF_STEP
    if halfway.any():
        part = total - product
        error = (product - (total - part)) + (c - part)
        away = np.where((error > 0) == (total > 0), np.inf, 0) * np.sign(total)
        total = np.where(halfway & (error != 0), np.nextafter(total, away), total)
    if np.any(power):
        total = np.ldexp(total, power)
    return np.asarray(total, np.float32)


def fma16(a, b, c):
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float16)


def fma64(a, b, c, power=0):
    """float64 through the extended type: nearly always the single rounding of the hardware."""
    a, b, c = (np.asarray(x, np.longdouble) for x in (a, b, c))
    return np.ldexp(a * b + c, power).astype(np.float64)


def maximum(a, b):
    """The larger number; a NaN loses against a number; +0 is larger than -0."""
    return np.where(a == b, np.where(np.signbit(a), b, a), np.fmax(a, b))


def minimum(a, b):
    return np.where(a == b, np.where(np.signbit(a), a, b), np.fmin(a, b))


def med3(a, b, c):
    """The middle of three; the smallest where one is NaN."""
    nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    middle = np.fmax(np.fmin(a, b), np.fmin(np.fmax(a, b), c))
    return np.where(nan, np.fmin(np.fmin(a, b), c), middle)


def legacy_mul(a, b):
    return np.where((a == 0) | (b == 0), np.float32(0), a * b)


def fract(a):
    return np.where(np.isinf(a), 0, np.minimum(a - np.floor(a), np.nextafter(a.dtype.type(1), a.dtype.type(0))))


def ldexp(a, n):
    """a * 2^n; n is clipped so that NumPy's C int holds it."""
    return np.ldexp(a, np.clip(n, -3000, 3000).astype(np.int32))


def frexp_mantissa(a):
    return np.where(np.isfinite(a), np.frexp(a)[0], a)


def frexp_exponent(a):
    return np.where(np.isfinite(a), np.frexp(a)[1], 0)


def rsq(a):
    return (1.0 / np.sqrt(a.astype(np.float64))).astype(a.dtype)


def rcp(a):
    return (1.0 / a.astype(np.float64)).astype(a.dtype)


def through64(function):
    """Evaluates in float64 and rounds once: the hardware is within one unit of it."""
    return lambda a: function(np.asarray(a, np.float64)).astype(a.dtype)


def sin_turns(a):
    return np.sin(2 * np.pi * np.asarray(a, np.float64)).astype(a.dtype)


def cos_turns(a):
    return np.cos(2 * np.pi * np.asarray(a, np.float64)).astype(a.dtype)


def div_fixup(quotient, denominator, numerator):
    """The special cases of a division whose ordinary case is already computed.

    A quotient that became NaN on the way from ordinary operands has overflowed.
    """
    sign = np.where(np.signbit(numerator) ^ np.signbit(denominator), -1.0, 1.0)
    out = np.copysign(np.where(np.isnan(quotient), np.inf, quotient), sign)
    inf_n, inf_d, zero_n, zero_d = (
        np.isinf(numerator),
        np.isinf(denominator),
        numerator == 0,
        denominator == 0,
    )
    out = np.where(zero_d | inf_n, np.copysign(np.inf, sign), out)
    out = np.where(inf_d | zero_n, np.copysign(0.0, sign), out)
    invalid = (zero_n & zero_d) | (inf_n & inf_d) | np.isnan(numerator) | np.isnan(denominator)
    return np.where(invalid, np.nan, out).astype(quotient.dtype)


TABLE: dict[str, Row] = {}


def _typed(name: str, count: int, function, kinds: str = "f16 f32 f64") -> None:
    for kind in kinds.split():
        TABLE[f"{name}_{kind}"] = (kind, (kind,) * count, function)


_typed("v_add", 2, np.add)
_typed("v_sub", 2, np.subtract, "f16 f32")
_typed("v_subrev", 2, lambda a, b: b - a, "f16 f32")
_typed("v_mul", 2, np.multiply)
_typed("v_max", 2, maximum)
_typed("v_min", 2, minimum)
_typed("v_maximum", 2, np.maximum, "f16 f32")
_typed("v_minimum", 2, np.minimum, "f16 f32")
_typed("v_max3", 3, lambda a, b, c: maximum(maximum(a, b), c), "f16 f32")
_typed("v_min3", 3, lambda a, b, c: minimum(minimum(a, b), c), "f16 f32")
_typed("v_maximum3", 3, lambda a, b, c: np.maximum(np.maximum(a, b), c), "f16 f32")
_typed("v_minimum3", 3, lambda a, b, c: np.minimum(np.minimum(a, b), c), "f16 f32")
_typed("v_med3", 3, med3, "f16 f32")
_typed("v_rcp", 1, rcp)
_typed("v_rsq", 1, rsq)
_typed("v_sqrt", 1, through64(np.sqrt))
_typed("v_exp", 1, through64(np.exp2), "f16 f32")
_typed("v_log", 1, through64(np.log2), "f16 f32")
_typed("v_sin", 1, sin_turns, "f16 f32")
_typed("v_cos", 1, cos_turns, "f16 f32")
_typed("v_floor", 1, np.floor)
_typed("v_ceil", 1, np.ceil)
_typed("v_trunc", 1, np.trunc)
_typed("v_rndne", 1, np.rint)
_typed("v_fract", 1, fract)
_typed("v_frexp_mant", 1, frexp_mantissa)
_typed("v_div_fixup", 3, div_fixup)
TABLE |= {
    "v_fma_f32": ("f32", ("f32",) * 3, fma),
    "v_mad_f32": ("f32", ("f32",) * 3, lambda a, b, c: a * b + c),
    "v_fma_f16": ("f16", ("f16",) * 3, fma16),
    "v_mad_f16": ("f16", ("f16",) * 3, lambda a, b, c: a * b + c),
    "v_fma_f64": ("f64", ("f64",) * 3, fma64),
    "v_mul_legacy_f32": ("f32", ("f32", "f32"), legacy_mul),
    "v_rcp_iflag_f32": ("f32", ("f32",), rcp),
    "v_exp_legacy_f32": ("f32", ("f32",), through64(np.exp2)),
    "v_log_legacy_f32": ("f32", ("f32",), through64(np.log2)),
    "v_ldexp_f32": ("f32", ("f32", "i32"), ldexp),
    "v_ldexp_f64": ("f64", ("f64", "i32"), ldexp),
    "v_ldexp_f16": ("f16", ("f16", "i16"), ldexp),
    "v_frexp_exp_i32_f32": ("i32", ("f32",), frexp_exponent),
    "v_frexp_exp_i32_f64": ("i32", ("f64",), frexp_exponent),
    "v_frexp_exp_i16_f16": ("i16", ("f16",), frexp_exponent),
}
# Rows whose result register is also the addend; operands d, a, b (and the constant of the k forms).
ACCUMULATE = {
    "v_fmac_f32": "v_fma_f32", "v_mac_f32": "v_mad_f32", "v_fmac_f16": "v_fma_f16",
    "v_mac_f16": "v_mad_f16", "v_fmac_f64": "v_fma_f64",
}  # fmt: skip
# a * constant + b and a * b + constant keep their operands in the order of the text.
TABLE |= {
    f"v_{name}{form}_{kind}": TABLE[f"v_{full}_{kind}"]
    for name, full in (("fma", "fma"), ("mad", "mad"))
    for form in ("mk", "ak")
    for kind in ("f16", "f32")
}
