"""Integer and bit vector arithmetic, one row an instruction: (result, sources, NumPy).

Unsigned arrays wrap in NumPy as the hardware does.
"""

from __future__ import annotations

import numpy as np

from ..valu import Row

U32, U64, I64 = np.uint32, np.uint64, np.int64


def wide(a, b):
    """The 64-bit unsigned product."""
    return np.multiply(a, b, dtype=U64)


def wide_signed(a, b):
    return np.multiply(a, b, dtype=I64)


def low24(a):
    return a & U32(0xFFFFFF)


def low24_signed(a):
    return (a << np.int32(8)) >> np.int32(8)


def shift_left(value, amount):
    bits = value.dtype.itemsize * 8
    return value << (amount & (bits - 1)).astype(value.dtype)


def shift_right(value, amount):
    bits = value.dtype.itemsize * 8
    return value >> (amount & (bits - 1)).astype(value.dtype)


def bfe(value, offset, width):
    """`width` bits from bit `offset`; none where the width is 0."""
    offset, width = offset & U32(31), width & U32(31)
    return np.where(width == 0, U32(0), (value >> offset) & ((U32(1) << width) - U32(1)))


def bfe_signed(value, offset, width):
    offset, width = (offset & U32(31)).astype(I64), (width & U32(31)).astype(I64)
    up = 64 - width
    return np.where(width == 0, 0, (((value.astype(I64) >> offset) << (up & 63)) >> (up & 63)))


def bfm(width, offset):
    return ((U32(1) << (width & U32(31))) - U32(1)) << (offset & U32(31))


def bit_reverse(a):
    a = np.asarray(a, U32)
    for shift, keep in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        a = ((a >> U32(shift)) & U32(keep)) | ((a & U32(keep)) << U32(shift))
    return a


def first_high(a):
    """Zeros above the highest set bit; all ones for 0."""
    length = np.frexp(np.asarray(a, np.float64))[1]
    return np.where(a == 0, -1, 32 - length).astype(np.int32).view(U32)


def first_low(a):
    """Zeros below the lowest set bit; all ones for 0."""
    a = np.asarray(a, U32)
    return np.where(a == 0, -1, np.frexp((a & (~a + U32(1))).astype(np.float64))[1] - 1).astype(np.int32).view(U32)


def first_high_signed(a):
    """Copies of the sign bit below bit 31, counted from the top; all ones for 0 and -1."""
    flipped = np.where(a < 0, ~a, a).astype(U32)
    return first_high(flipped)


def permute_bytes(a, b, selector):
    """Each result byte picks one of the eight bytes of a:b, a sign, 0 or 255."""
    source = (np.asarray(a, U64) << U64(32)) | b
    out = np.zeros(np.broadcast(a, b, selector).shape, U32)
    for place in range(4):
        pick = (selector >> U32(8 * place)) & U32(0xFF)
        byte = (source >> (U64(8) * (pick & U32(7)).astype(U64))) & U64(0xFF)
        sign_bit = U64(16) * (pick.astype(U64) - U64(8)) + U64(15)
        sign = (source >> np.where((pick >= 8) & (pick <= 11), sign_bit, U64(0))) & U64(1)
        byte = np.where(pick <= 7, byte, np.where(pick <= 11, sign * U64(0xFF), U64(0)))
        byte = np.where(pick >= 13, U64(0xFF), byte)
        out |= byte.astype(U32) << U32(8 * place)
    return out


def align_bits(a, b, shift):
    return (((np.asarray(a, U64) << U64(32)) | b) >> (shift & U32(31)).astype(U64)).astype(U32)


def add_saturated(a, b):
    return np.minimum(a.astype(U64) + b, 0xFFFFFFFF)


def absolute_difference(a, b):
    return np.where(a > b, a - b, b - a)


def sum_absolute_bytes(a, b, c):
    total = c
    for place in range(4):
        x, y = ((v >> U32(8 * place)) & U32(0xFF) for v in (a, b))
        total = total + absolute_difference(x, y)
    return total


def mean_bytes(a, b, c):
    out = np.zeros(np.broadcast(a, b, c).shape, U32)
    for place in range(0, 32, 8):
        x, y, r = ((v >> U32(place)) & U32(0xFF) for v in (a, b, c))
        out |= ((x + y + (r & U32(1))) >> U32(1)) << U32(place)
    return out


def bitop3(a, b, c, truth):
    """Any function of three bits: `truth` has its value for each of the 8 inputs abc."""
    out = a & 0 | b & 0 | c & 0
    for case in range(8):
        if truth >> case & 1:
            x, y, z = (v if case & bit else ~v for v, bit in ((a, 4), (b, 2), (c, 1)))
            out = out | (x & y & z)
    return out


def med3(a, b, c):
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


TABLE: dict[str, Row] = {}


def _rows(kind: str, count: int, rows: dict) -> None:
    for name, function in rows.items():
        TABLE[name] = (kind, (kind,) * count, function)


_rows("u32", 1, {
    "v_mov_b32": lambda a: a, "v_accvgpr_read_b32": lambda a: a, "v_accvgpr_write_b32": lambda a: a,
    "v_accvgpr_mov_b32": lambda a: a, "v_not_b32": np.invert, "v_bfrev_b32": bit_reverse,
    "v_ffbh_u32": first_high, "v_ffbl_b32": first_low,
})  # fmt: skip
_rows("u32", 2, {
    "v_add_u32": np.add, "v_sub_u32": np.subtract, "v_subrev_u32": lambda a, b: b - a,
    "v_and_b32": np.bitwise_and, "v_or_b32": np.bitwise_or, "v_xor_b32": np.bitwise_xor,
    "v_xnor_b32": lambda a, b: ~(a ^ b),
    "v_lshlrev_b32": lambda n, a: shift_left(a, n), "v_lshrrev_b32": lambda n, a: shift_right(a, n),
    "v_min_u32": np.minimum, "v_max_u32": np.maximum, "v_bfm_b32": bfm,
    "v_mul_lo_u32": np.multiply, "v_mul_hi_u32": lambda a, b: wide(a, b) >> U64(32),
    "v_mul_u32_u24": lambda a, b: low24(a) * low24(b),
    "v_mul_hi_u32_u24": lambda a, b: wide(low24(a), low24(b)) >> U64(32),
    "v_bcnt_u32_b32": lambda a, b: np.bitwise_count(a).astype(U32) + b,
})  # fmt: skip
_rows("u32", 3, {
    "v_add3_u32": lambda a, b, c: a + b + c, "v_or3_b32": lambda a, b, c: a | b | c,
    "v_and_or_b32": lambda a, b, c: a & b | c, "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_lshl_add_u32": lambda a, n, c: shift_left(a, n) + c,
    "v_add_lshl_u32": lambda a, b, n: shift_left(a + b, n),
    "v_lshl_or_b32": lambda a, n, c: shift_left(a, n) | c, "v_bfi_b32": lambda m, a, b: (m & a) | (~m & b),
    "v_bfe_u32": bfe, "v_perm_b32": permute_bytes, "v_alignbit_b32": align_bits,
    "v_alignbyte_b32": lambda a, b, n: align_bits(a, b, (n & U32(3)) * U32(8)),
    "v_min3_u32": lambda a, b, c: np.minimum(np.minimum(a, b), c),
    "v_max3_u32": lambda a, b, c: np.maximum(np.maximum(a, b), c), "v_med3_u32": med3,
    "v_mad_u32_u24": lambda a, b, c: low24(a) * low24(b) + c,
    "v_sad_u32": lambda a, b, c: absolute_difference(a, b) + c, "v_sad_u8": sum_absolute_bytes,
    "v_lerp_u8": mean_bytes,
})  # fmt: skip
_rows("i32", 1, {"v_ffbh_i32": lambda a: first_high_signed(a).view(np.int32)})
_rows("i32", 2, {
    "v_min_i32": np.minimum, "v_max_i32": np.maximum,
    "v_ashrrev_i32": lambda n, a: shift_right(a, n), "v_add_i32": np.add, "v_sub_i32": np.subtract,
    "v_mul_hi_i32": lambda a, b: wide_signed(a, b) >> 32,
    "v_mul_i32_i24": lambda a, b: low24_signed(a) * low24_signed(b),
    "v_mul_hi_i32_i24": lambda a, b: wide_signed(low24_signed(a), low24_signed(b)) >> 32,
})  # fmt: skip
_rows("i32", 3, {
    "v_min3_i32": lambda a, b, c: np.minimum(np.minimum(a, b), c),
    "v_max3_i32": lambda a, b, c: np.maximum(np.maximum(a, b), c), "v_med3_i32": med3,
    "v_mad_i32_i24": lambda a, b, c: low24_signed(a) * low24_signed(b) + c,
})  # fmt: skip
for _sign, _kind in (("u", "u16"), ("i", "i16")):
    _rows(_kind, 2, {f"v_min_{_kind}": np.minimum, f"v_max_{_kind}": np.maximum, f"v_add_{_kind}": np.add,
                     f"v_sub_{_kind}": np.subtract})  # fmt: skip
    _rows(_kind, 3, {f"v_med3_{_kind}": med3, f"v_mad_{_kind}": lambda a, b, c: a * b + c,
                     f"v_min3_{_kind}": lambda a, b, c: np.minimum(np.minimum(a, b), c),
                     f"v_max3_{_kind}": lambda a, b, c: np.maximum(np.maximum(a, b), c)})  # fmt: skip
_rows("u16", 2, {
    "v_mul_lo_u16": np.multiply, "v_subrev_u16": lambda a, b: b - a,
    "v_lshlrev_b16": lambda n, a: shift_left(a, n), "v_lshrrev_b16": lambda n, a: shift_right(a, n),
})  # fmt: skip
TABLE |= {
    "v_ashrrev_i16": ("i16", ("u16", "i16"), lambda n, a: shift_right(a, n)),
    "v_bfe_i32": ("i32", ("i32", "u32", "u32"), bfe_signed),
    "v_mov_b64": ("u64", ("u64",), lambda a: a),
    "v_lshlrev_b64": ("u64", ("u32", "u64"), lambda n, a: shift_left(a, n)),
    "v_lshrrev_b64": ("u64", ("u32", "u64"), lambda n, a: shift_right(a, n)),
    "v_ashrrev_i64": ("i64", ("u32", "i64"), lambda n, a: shift_right(a, n)),
    "v_lshl_add_u64": ("u64", ("u64", "u32", "u64"), lambda a, n, c: shift_left(a, n) + c),
    "v_cndmask_b32": ("u32", ("u32", "u32", "mask"), lambda a, b, m: np.where(m, b, a)),
    "v_mad_u32_u16": ("u32", ("u16", "u16", "u32"), lambda a, b, c: a.astype(U32) * b.astype(U32) + c),
    "v_mad_i32_i16": ("i32", ("i16", "i16",
    "i32"), lambda a, b, c: a.astype(np.int32) * b.astype(np.int32) + c),
    "v_sad_u16": ("u32", ("u32",) * 3, lambda a, b, c: absolute_difference(a & U32(65535), b & U32(65535))
                  + absolute_difference(a >> U32(16), b >> U32(16)) + c),
}  # fmt: skip
