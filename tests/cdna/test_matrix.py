"""Matrix instructions against three loops over rows, columns and k that spell out where each element lies."""

import numpy as np
import pytest

from .formats import bf8, fp8, from_bf16, table
from .snippet import run

RNG = np.random.default_rng()
# name, M, N, K, element, architectures
FORMS = [
    ("v_mfma_f32_16x16x32_fp8_fp8", 16, 32, ("fp8", "fp8"), ("gfx942", "gfx950")),
    ("v_mfma_f32_16x16x32_bf8_fp8", 16, 32, ("bf8", "fp8"), ("gfx942", "gfx950")),
    ("v_mfma_f32_32x32x16_fp8_fp8", 32, 16, ("fp8", "fp8"), ("gfx942", "gfx950")),
    ("v_mfma_f32_32x32x16_fp8_bf8", 32, 16, ("fp8", "bf8"), ("gfx942", "gfx950")),
    ("v_mfma_f32_16x16x16_f16", 16, 16, ("f16", "f16"), ("gfx942", "gfx950")),
    ("v_mfma_f32_32x32x8_f16", 32, 8, ("f16", "f16"), ("gfx942", "gfx950")),
    ("v_mfma_f32_16x16x16_bf16", 16, 16, ("bf16", "bf16"), ("gfx942", "gfx950")),
    ("v_mfma_f32_32x32x8_bf16", 32, 8, ("bf16", "bf16"), ("gfx942", "gfx950")),
    ("v_mfma_f32_16x16x4_f32", 16, 4, ("f32", "f32"), ("gfx942", "gfx950")),
    ("v_mfma_f32_32x32x2_f32", 32, 2, ("f32", "f32"), ("gfx942", "gfx950")),
    ("v_mfma_i32_16x16x32_i8", 16, 32, ("i8", "i8"), ("gfx942", "gfx950")),
    ("v_mfma_i32_32x32x16_i8", 32, 16, ("i8", "i8"), ("gfx942", "gfx950")),
    ("v_mfma_f32_16x16x32_f16", 16, 32, ("f16", "f16"), ("gfx950",)),
    ("v_mfma_f32_32x32x16_f16", 32, 16, ("f16", "f16"), ("gfx950",)),
    ("v_mfma_f32_16x16x32_bf16", 16, 32, ("bf16", "bf16"), ("gfx950",)),
    ("v_mfma_f32_32x32x16_bf16", 32, 16, ("bf16", "bf16"), ("gfx950",)),
    ("v_mfma_f32_16x16x128_f8f6f4", 16, 128, ("fp8", "fp8"), ("gfx950",)),
    ("v_mfma_f32_32x32x64_f8f6f4", 32, 64, ("fp8", "fp8"), ("gfx950",)),
    ("v_mfma_f32_32x32x64_f8f6f4 cbsz:1", 32, 64, ("bf8", "fp8"), ("gfx950",)),
    ("v_mfma_f32_16x16x128_f8f6f4 blgp:1", 16, 128, ("fp8", "bf8"), ("gfx950",)),
]
CASES = [(arch, *form[:4]) for form in FORMS for arch in form[4]]


def elements(kind: str, arch: str, share: int):
    """(register words [n, 64], values [64, share]): `share` random elements in each lane."""
    if kind in ("fp8", "bf8"):
        values = table(fp8(arch) if kind == "fp8" else bf8(arch))
        codes = RNG.choice(np.flatnonzero(np.isfinite(values) & (np.abs(values) <= 16)), (64, share)).astype(np.uint8)
        return codes.view(np.uint32).T, values[codes].astype(float)
    whole = RNG.integers(-9, 10, (64, share))
    if kind == "i8":
        return whole.astype(np.int8).view(np.uint32).T, whole.astype(float)
    if kind == "f16":
        return whole.astype(np.float16).view(np.uint32).T, whole.astype(float)
    if kind == "bf16":
        bits = (whole.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return bits.view(np.uint32).T, from_bf16(bits).astype(float)
    return whole.astype(np.float32).view(np.uint32).T, whole.astype(float)


def fill(first: int, words) -> dict:
    return {first + k: np.ascontiguousarray(row) for k, row in enumerate(words)}


def where(size: int, register: int, lane: int) -> tuple[int, int]:
    """(row, column) that a lane's result register holds."""
    if size == 16:
        return 4 * (lane // 16) + register, lane % 16
    return 8 * (register // 4) + 4 * (lane // 32) + register % 4, lane % 32


@pytest.mark.parametrize(("arch", "name", "size", "depth", "kinds"), CASES)
@pytest.mark.parametrize("accumulators", ["v", "a"])
def test_layout(arch, name, size, depth, kinds, accumulators):
    groups, count = 64 // size, size * size // 64
    share = depth // groups
    (words_a, a), (words_b, b) = (elements(kind, arch, share) for kind in kinds)
    old = RNG.integers(-5, 6, (count, 64))
    integer = "i32" in name
    start = 32 if accumulators == "v" else 0
    mnemonic, _, modifier = name.partition(" ")
    na, nb = len(words_a), len(words_b)
    text = (
        f"{mnemonic} {accumulators}[{start}:{start + count - 1}], v[0:{na - 1}], v[{na}:{na + nb - 1}], "
        f"{accumulators}[{start}:{start + count - 1}] {modifier}"
    )
    base = start if accumulators == "v" else 64
    given = fill(0, words_a) | fill(na, words_b) | fill(base, old.astype(np.int32 if integer else np.float32))
    state = run(text.replace("v[0:0]", "v0").replace(f"v[{na}:{na}]", f"v{na}"), arch=arch, v=given, on=0x5555)
    got = (state.vi if integer else state.vf)[base : base + count, 0]
    for register in range(count):
        for lane in range(64):
            row, column = where(size, register, lane)
            total = float(old[register, lane])
            for k in range(depth):
                block, place = divmod(k, share)
                total += a[block * size + row, place] * b[block * size + column, place]
            assert got[register, lane] == np.float32(total), (register, lane)


def test_constant_accumulator_and_waves_apart():
    """Two waves with their own operands; a constant stands for a matrix that holds it everywhere."""
    one, two = np.float16([1, 1]).view(np.uint32)[0], np.float16([2, 2]).view(np.uint32)[0]
    b = run("v_mfma_f32_16x16x16_f16 v[8:11], v[0:1], v[2:3], 1.0", waves=2,
            v={r: np.repeat(np.uint32([[one], [two]]), 64, axis=1) for r in range(4)})  # fmt: skip
    assert (b.vf[8:12, 0] == 17).all() and (b.vf[8:12, 1] == 65).all()


def test_sixteen_blocks():
    a = RNG.integers(-4, 5, (64, 4)).astype(np.float16)
    b = RNG.integers(-4, 5, (64, 4)).astype(np.float16)
    state = run("v_mfma_f32_4x4x4_16b_f16 v[8:11], v[0:1], v[2:3], 0",
                v=fill(0, a.view(np.uint32).T) | fill(2, b.view(np.uint32).T))  # fmt: skip
    for register in range(4):
        for lane in range(64):
            block, column = divmod(lane, 4)
            expected = a[block * 4 + register].astype(float) @ b[block * 4 + column].astype(float)
            assert state.vf[8 + register, 0, lane] == expected


def test_nan_codes_stay_in_their_row():
    codes = np.full((64, 8), 0x38, np.uint8)
    codes[5, 3] = 0x80  # fnuz's one NaN: row 5
    words = codes.view(np.uint32).T
    ones = np.full((64, 8), 0x40, np.uint8).view(np.uint32).T
    b = run("v_mfma_f32_16x16x32_fp8_fp8 v[8:11], v[0:1], v[2:3], 0", v=fill(0, words) | fill(2, ones))
    for register in range(4):
        for lane in range(64):
            row, _ = where(16, register, lane)
            found = b.vf[8 + register, 0, lane]
            assert np.isnan(found) if row == 5 else found == 32 * 0.5
    b = run("v_mfma_f32_16x16x32_fp8_fp8 v[8:11], v[0:1], v[2:3], 0", arch="gfx950", v=fill(0, words) | fill(2, ones))
    assert not np.isnan(b.vf[8:12]).any()  # the same byte is -0 there
