"""The 8-bit formats code by code, and bfloat16, against torch and hand-worked values."""

import numpy as np
import pytest
import torch

from .formats import LAYOUTS, bf8, encode, fp8, from_bf16, table, to_bf16
from .snippet import run

DTYPES = {name: getattr(torch, f"float8_{name}") for name in LAYOUTS}
CODES = np.arange(256, dtype=np.uint32)


@pytest.mark.parametrize("name", LAYOUTS)
def test_table(name):
    expected = torch.arange(256, dtype=torch.uint8).view(DTYPES[name]).float().numpy()
    np.testing.assert_array_equal(table(name), expected)
    signs = np.signbit(table(name)) == np.signbit(expected)
    assert (signs | np.isnan(expected)).all()


def test_hand_worked_codes():
    fn, fnuz = table("e4m3fn"), table("e4m3fnuz")
    assert fn[[0x38, 0x7E, 0x01, 0xB8]].tolist() == [1.0, 448.0, 2.0**-9, -1.0]
    assert fnuz[[0x38, 0x7F, 0x01, 0x40]].tolist() == [0.5, 240.0, 2.0**-10, 1.0]
    assert np.isnan(fn[[0x7F, 0xFF]]).all() and np.isnan(fnuz).nonzero()[0].tolist() == [0x80]
    assert fn[0x80] == 0 and np.signbit(fn[0x80])
    numbers = ~np.isnan(fn) & ~np.isnan(fnuz)
    assert (fn[numbers] == 2 * fnuz[numbers]).all()


@pytest.mark.parametrize("name", LAYOUTS)
def test_encode(name):
    top = torch.finfo(DTYPES[name]).max
    own = table(name)[~np.isnan(table(name)) & ~np.isinf(table(name))]
    steps = np.concatenate([own, (own[:-1] + own[1:]) / 2, np.nextafter(own, np.float32(1e9))])
    random = np.random.default_rng().normal(0, top / 8, 4000).astype(np.float32)
    values = np.concatenate([steps, random, random * 1e-4]).astype(np.float32)
    values = values[np.abs(values) <= top]
    expected = torch.from_numpy(values).to(DTYPES[name]).view(torch.uint8).numpy()
    np.testing.assert_array_equal(encode(values, name, saturate=False), expected)
    assert table(name)[encode(np.float32([1e9, -1e9]), name, saturate=True)].tolist() == [top, -top]
    assert np.isnan(table(name)[encode(np.float32([np.nan]), name, saturate=True)]).all()


def test_bf16():
    values = np.random.default_rng().integers(0, 2**32, 20000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    expected = torch.from_numpy(values.copy()).bfloat16()
    got = from_bf16(to_bf16(values))
    np.testing.assert_array_equal(got, expected.float().numpy())


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_unpack_instructions(arch):
    """Every code through v_cvt_f32_fp8 and v_cvt_pk_f32_fp8, in every place of a register."""
    for kind, name in (("fp8", fp8(arch)), ("bf8", bf8(arch))):
        for first in range(0, 256, 64):
            codes = CODES[first : first + 64]
            word = codes | (255 - codes) << 8 | codes << 16 | (255 - codes) << 24
            text = f"""
                v_cvt_f32_{kind}_e32 v1, v0
                v_cvt_f32_{kind}_sdwa v2, v0 src0_sel:BYTE_1
                v_cvt_pk_f32_{kind}_e32 v[4:5], v0
                v_cvt_pk_f32_{kind}_sdwa v[6:7], v0 src0_sel:WORD_1
            """
            b = run(text, arch=arch, v={0: word.astype(np.uint32)})
            low, high = table(name)[codes], table(name)[255 - codes]
            for register, expected in ((1, low), (2, high), (4, low), (5, high), (6, low), (7, high)):
                np.testing.assert_array_equal(b.vf[register, 0], expected)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_pack_instructions(arch):
    values = np.linspace(-230, 230, 64, dtype=np.float32)
    text = "v_cvt_pk_fp8_f32 v2, v0, v1\nv_cvt_pk_fp8_f32 v2, v1, -v0 op_sel:[0,0,1]"
    b = run(text, arch=arch, v={0: values, 1: values / 7})
    codes = [encode(x, fp8(arch), False).astype(np.uint32) for x in (values, values / 7, values / 7, -values)]
    assert (b.v[2, 0] == codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24).all()


def test_pack_past_the_top_is_nan():
    b = run("v_cvt_pk_fp8_f32 v2, v0, v1", v={0: np.float32(1000), 1: np.float32(240)})
    assert (b.v[2] & 0xFFFF == 0x7F80).all()


def test_scaled_conversions():
    b = run(
        "v_cvt_scalef32_pk_f32_fp8 v[2:3], v0, v1\nv_cvt_scalef32_pk_fp8_f32 v4, v2, v3, v1 op_sel:[0,0,0,1]",
        arch="gfx950",
        v={0: np.uint32(0x3840), 1: np.float32(4.0), 4: np.uint32(0)},
    )
    assert (b.vf[2] == 8.0).all() and (b.vf[3] == 4.0).all()
    assert (b.v[4] == 0x38400000).all()
