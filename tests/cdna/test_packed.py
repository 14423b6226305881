"""Packed arithmetic: which half goes where, signs, constants, mixed precision."""

import numpy as np

from .snippet import run

F, H, U = np.float32, np.float16, np.uint32
PAIR = {2: F(1.5), 3: F(-2.0), 4: F(10.0), 5: F(20.0), 6: F(0.5), 7: F(0.25)}


def halves(low: float, high: float):
    return (np.uint32(H(low).view(np.uint16)) | np.uint32(H(high).view(np.uint16)) << np.uint32(16)).astype(U)


def pair(text: str, v=PAIR, **options):
    b = run(text, v=v, **options)
    return float(b.vf[0, 0, 0]), float(b.vf[1, 0, 0])


def both(text: str, v):
    return run(text, v=v).v[0, 0, :1].view(H).tolist()


def test_float_pairs():
    assert pair("v_pk_add_f32 v[0:1], v[2:3], v[4:5]") == (11.5, 18.0)
    assert pair("v_pk_mul_f32 v[0:1], v[2:3], v[4:5]") == (15.0, -40.0)
    assert pair("v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7]") == (15.5, -39.75)


def test_float_pair_selection():
    assert pair("v_pk_mul_f32 v[0:1], v[2:3], v[4:5] op_sel_hi:[1,0]") == (15.0, -20.0)
    assert pair("v_pk_mul_f32 v[0:1], v[2:3], v[4:5] op_sel:[0,1]") == (30.0, -40.0)
    assert pair("v_pk_add_f32 v[0:1], v[2:3], v[4:5] op_sel:[1,0] op_sel_hi:[0,1]") == (8.0, 21.5)
    assert pair("v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7] neg_lo:[1,0,0] neg_hi:[0,0,1]") == (-14.5, -40.25)


def test_float_pair_with_scalars_and_constants():
    assert pair("v_pk_mul_f32 v[0:1], v[2:3], s[4:5] op_sel_hi:[1,0]", s={4: F(3), 5: F(5)}) == (4.5, -6.0)
    assert pair("v_pk_add_f32 v[0:1], v[2:3], 1.0 op_sel_hi:[1,0]") == (2.5, -1.0)


def test_a_pair_may_overwrite_its_source():
    b = run("v_pk_add_f32 v[2:3], v[2:3], v[2:3] op_sel:[1,1] op_sel_hi:[0,0]", v=PAIR)
    assert (b.vf[2] == -4.0).all() and (b.vf[3] == 3.0).all()


def test_move_pair():
    b = run("v_pk_mov_b32 v[0:1], v[2:3], v[4:5] op_sel:[1,0]", v=PAIR)
    assert (b.vf[0] == -2.0).all() and (b.vf[1] == 10.0).all()
    b = run("v_pk_mov_b32 v[0:1], v[2:3], v[4:5] op_sel:[0,1]", v=PAIR)
    assert (b.vf[0] == 1.5).all() and (b.vf[1] == 20.0).all()


def test_half_pairs():
    given = {1: halves(1.5, -2.0), 2: halves(4.0, 8.0), 3: halves(0.5, 0.25)}
    assert both("v_pk_add_f16 v0, v1, v2", given) == [5.5, 6.0]
    assert both("v_pk_fma_f16 v0, v1, v2, v3", given) == [6.5, -15.75]
    assert both("v_pk_mul_f16 v0, v1, v2 op_sel:[1,0] op_sel_hi:[0,1]", given) == [-8.0, 12.0]
    assert both("v_pk_max_f16 v0, v1, v2 neg_lo:[0,1] neg_hi:[0,1]", given) == [1.5, -2.0]
    assert both("v_pk_mul_f16 v0, v1, 2.0 op_sel_hi:[1,0]", given) == [3.0, -4.0]


def test_integer_pairs():
    given = {1: U(0xFFFF0002), 2: U(0x00020003)}
    expected = {
        "v_pk_add_u16 v0, v1, v2": 0x00010005,
        "v_pk_sub_u16 v0, v2, v1 clamp": 0x00000001,
        "v_pk_max_i16 v0, v1, v2": 0x00020003,
        "v_pk_min_u16 v0, v1, v2": 0x00020002,
        "v_pk_mul_lo_u16 v0, v1, v2": 0xFFFE0006,
        "v_pk_lshlrev_b16 v0, v2, v1": 0xFFFC0010,
        "v_pk_ashrrev_i16 v0, v2, v1": 0xFFFF0000,
        "v_pk_add_u16 v0, v1, 5": 0xFFFF0007,
        "v_pk_add_u16 v0, v1, 5 op_sel_hi:[1,0]": 0x00040007,
    }
    for text, result in expected.items():
        assert int(run(text, v=given).v[0, 0, 0]) == result, text


def test_mixed_precision():
    given = {0: U(0xAAAABBBB), 1: halves(1.5, 3.0), 2: F(4.0), 3: F(0.5)}
    b = run("v_fma_mix_f32 v0, v1, v2, v3 op_sel:[1,0,0] op_sel_hi:[1,0,0]", v=given)
    assert (b.vf[0] == 12.5).all()
    b = run("v_fma_mixhi_f16 v0, v1, v2, -v3 op_sel_hi:[1,0,0]", v=given)
    assert (b.v[0] == (int(H(5.5).view(np.uint16)) << 16 | 0xBBBB)).all()
    b = run("v_fma_mixlo_f16 v0, v1, v2, |v3| op_sel_hi:[1,0,0]", v=given)
    assert (b.v[0] == (0xAAAA0000 | int(H(6.5).view(np.uint16)))).all()


def test_dot_products():
    b = run("v_dot4_i32_i8 v0, v1, v2, v3", v={1: U(0x01FF0203), 2: U(0x05040302), 3: U(10)})
    assert (b.vi[0] == 1 * 5 - 4 + 2 * 3 + 3 * 2 + 10).all()
    b = run("v_dot2_f32_f16 v0, v1, v2, v3", v={1: halves(1.5, 2.0), 2: halves(4.0, -1.0), 3: F(0.25)})
    assert (b.vf[0] == 4.25).all()
    b = run("v_dot2c_f32_f16_e32 v0, v1, v2", v={0: F(1), 1: halves(1.5, 2.0), 2: halves(4.0, -1.0)})
    assert (b.vf[0] == 5.0).all()
