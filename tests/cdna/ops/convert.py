"""Conversions between number types. Saturating, as the hardware's are; NaN becomes integer 0."""

from __future__ import annotations

import numpy as np

from ..formats import to_bf16
from ..valu import Row

U32 = np.uint32


def saturate(low: int, high: int, rounding=np.trunc):
    """float -> integer within [low, high]."""

    def convert(a):
        a = rounding(np.asarray(a, np.float64))
        return np.where(np.isnan(a), 0, np.clip(a, low, high)).astype(np.int64)

    return convert


def half_up(a):
    return np.floor(a + 0.5)


def join16(low, high):
    """Two 16-bit patterns in one register."""
    low, high = np.broadcast_arrays(np.asarray(low).view(np.uint16), np.asarray(high).view(np.uint16))
    return low.astype(U32) | (high.astype(U32) << U32(16))


def toward_zero16(a):
    """float32 -> float16, cut off instead of rounded; finite numbers stay finite."""
    a = np.asarray(a, np.float32)
    out = a.astype(np.float16)
    over = (np.abs(out.astype(np.float32)) > np.abs(a)) & np.isfinite(a)
    return np.where(over, np.nextafter(out, np.float16(0)), out).astype(np.float16)


def short(a):
    return np.clip(a, -32768, 32767).astype(np.int16)


def byte_of(place: int):
    return lambda a: ((a >> U32(8 * place)) & U32(0xFF)).astype(np.float32)


def to_byte(value, place, old):
    """Puts a rounded 0..255 into byte `place` of `old`."""
    shift = (place & U32(3)) * U32(8)
    byte = saturate(0, 255, np.rint)(value).astype(U32)
    return (old & ~(U32(0xFF) << shift)) | (byte << shift)


def normalised(scale: float, low: float):
    def convert(a):
        a = np.asarray(a, np.float64)
        return np.rint(np.where(np.isnan(a), 0, np.clip(a, low, 1)) * scale).astype(np.int64).astype(np.int16)

    return convert


I32_RANGE, U32_RANGE = (-(2**31), 2**31 - 1), (0, 2**32 - 1)
signed16, unsigned16 = normalised(32767, -1), normalised(65535, 0)
TABLE: dict[str, Row] = {
    "v_cvt_f32_i32": ("f32", ("i32",), lambda a: a.astype(np.float32)),
    "v_cvt_f32_u32": ("f32", ("u32",), lambda a: a.astype(np.float32)),
    "v_cvt_f64_i32": ("f64", ("i32",), lambda a: a.astype(np.float64)),
    "v_cvt_f64_u32": ("f64", ("u32",), lambda a: a.astype(np.float64)),
    "v_cvt_f64_f32": ("f64", ("f32",), lambda a: a.astype(np.float64)),
    "v_cvt_f32_f64": ("f32", ("f64",), lambda a: a.astype(np.float32)),
    "v_cvt_f32_f16": ("f32", ("f16",), lambda a: a.astype(np.float32)),
    "v_cvt_f16_f32": ("f16", ("f32",), lambda a: a.astype(np.float16)),
    "v_cvt_f16_u16": ("f16", ("u16",), lambda a: a.astype(np.float16)),
    "v_cvt_f16_i16": ("f16", ("i16",), lambda a: a.astype(np.float16)),
    "v_cvt_i32_f32": ("i32", ("f32",), saturate(*I32_RANGE)),
    "v_cvt_u32_f32": ("u32", ("f32",), saturate(*U32_RANGE)),
    "v_cvt_i32_f64": ("i32", ("f64",), saturate(*I32_RANGE)),
    "v_cvt_u32_f64": ("u32", ("f64",), saturate(*U32_RANGE)),
    "v_cvt_i16_f16": ("i16", ("f16",), saturate(-32768, 32767)),
    "v_cvt_u16_f16": ("u16", ("f16",), saturate(0, 65535)),
    "v_cvt_rpi_i32_f32": ("i32", ("f32",), saturate(*I32_RANGE, half_up)),
    "v_cvt_flr_i32_f32": ("i32", ("f32",), saturate(*I32_RANGE, np.floor)),
    "v_cvt_pkrtz_f16_f32": ("u32", ("f32", "f32"), lambda a, b: join16(toward_zero16(a), toward_zero16(b))),
    "v_cvt_pk_f16_f32": ("u32", ("f32",
    "f32"), lambda a, b: join16(a.astype(np.float16), b.astype(np.float16))),
    "v_cvt_pk_bf16_f32": ("u32", ("f32", "f32"), lambda a, b: join16(to_bf16(a), to_bf16(b))),
    "v_cvt_pk_u16_u32": ("u32", ("u32",
    "u32"), lambda a, b: np.minimum(a, 65535) | np.minimum(b, 65535) << U32(16)),
    "v_cvt_pk_i16_i32": ("u32", ("i32", "i32"), lambda a, b: join16(short(a), short(b))),
    "v_cvt_pknorm_i16_f32": ("u32", ("f32", "f32"), lambda a, b: join16(signed16(a), signed16(b))),
    "v_cvt_pknorm_u16_f32": ("u32", ("f32", "f32"), lambda a, b: join16(unsigned16(a), unsigned16(b))),
    "v_cvt_pk_u8_f32": ("u32", ("f32", "u32", "u32"), to_byte),
    "v_pack_b32_f16": ("u32", ("f16", "f16"), join16),
}  # fmt: skip
TABLE |= {f"v_cvt_f32_ubyte{place}": ("f32", ("u32",), byte_of(place)) for place in range(4)}
