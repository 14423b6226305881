"""Vector arithmetic against hand-worked values: integers, floats, carries, modifiers, EXEC."""

import numpy as np
import pytest

from .snippet import LANES, run
from .wave import EXEC, VCC

U, F, I = np.uint32, np.float32, np.int32
NAN, INF = F(np.nan), F(np.inf)


def value(text: str, **options):
    """The first lane of v0 after the line, as an unsigned number."""
    return int(run(text, **options).v[0, 0, 0])


def real(text: str, **options) -> float:
    return float(run(text, **options).vf[0, 0, 0])


@pytest.mark.parametrize(
    ("text", "a", "b", "c", "expected"),
    [
        ("v_add_u32_e32 v0, v1, v2", 0xFFFFFFFF, 3, 0, 2),
        ("v_sub_u32_e32 v0, v1, v2", 3, 5, 0, 0xFFFFFFFE),
        ("v_sub_u32_e64 v0, v1, v2 clamp", 3, 5, 0, 0),
        ("v_add_u32_e64 v0, v1, v2 clamp", 0xFFFFFFF0, 0x20, 0, 0xFFFFFFFF),
        ("v_subrev_u32_e32 v0, v1, v2", 3, 5, 0, 2),
        ("v_mul_lo_u32 v0, v1, v2", 0x10001, 0x10001, 0, 0x20001),
        ("v_mul_hi_u32 v0, v1, v2", 0xFFFFFFFF, 0xFFFFFFFF, 0, 0xFFFFFFFE),
        ("v_mul_hi_i32 v0, v1, v2", 0xFFFFFFFF, 2, 0, 0xFFFFFFFF),
        ("v_mul_u32_u24_e32 v0, v1, v2", 0xFF000003, 0x10, 0, 0x30),
        ("v_mad_i32_i24 v0, v1, v2, v3", 0xFFFFFF, 5, 7, 2),
        ("v_mad_u32_u24 v0, v1, v2, v3", 0xFFFFFF, 2, 3, 0x2000001),
        ("v_lshlrev_b32_e32 v0, v1, v2", 33, 3, 0, 6),
        ("v_lshrrev_b32_e32 v0, v1, v2", 4, 0x80000000, 0, 0x08000000),
        ("v_ashrrev_i32_e32 v0, v1, v2", 4, 0x80000000, 0, 0xF8000000),
        ("v_lshl_add_u32 v0, v1, v2, v3", 3, 2, 5, 17),
        ("v_add_lshl_u32 v0, v1, v2, v3", 3, 2, 5, 160),
        ("v_lshl_or_b32 v0, v1, v2, v3", 3, 4, 5, 0x35),
        ("v_xad_u32 v0, v1, v2, v3", 0xF0, 0xFF, 1, 0x10),
        ("v_and_or_b32 v0, v1, v2, v3", 0xF0, 0x3C, 1, 0x31),
        ("v_or3_b32 v0, v1, v2, v3", 1, 2, 4, 7),
        ("v_add3_u32 v0, v1, v2, v3", 0xFFFFFFFF, 1, 4, 4),
        ("v_bfe_u32 v0, v1, v2, v3", 0xABCD, 4, 8, 0xBC),
        ("v_bfe_u32 v0, v1, v2, v3", 0xABCD, 4, 0, 0),
        ("v_bfe_i32 v0, v1, v2, v3", 0xABCD, 4, 8, 0xFFFFFFBC),
        ("v_bfi_b32 v0, v1, v2, v3", 0xFF, 0x12, 0x3456, 0x3412),
        ("v_bfm_b32_e64 v0, v1, v2", 4, 8, 0, 0xF00),
        ("v_alignbit_b32 v0, v1, v2, v3", 0xA, 0xBC000000, 24, 0xABC),
        ("v_alignbyte_b32 v0, v1, v2, v3", 0x11223344, 0xAABBCCDD, 1, 0x44AABBCC),
        ("v_perm_b32 v0, v1, v2, v3", 0x11223344, 0xAABBCCDD, 0x07040300, 0x1144AADD),
        ("v_perm_b32 v0, v1, v2, v3", 0x81223344, 0xAABBCCDD, 0x0C0D0B08, 0x00FFFFFF),
        ("v_med3_i32 v0, v1, v2, v3", 5, 0xFFFFFFFF, 3, 3),
        ("v_min3_u32 v0, v1, v2, v3", 5, 0xFFFFFFFF, 3, 3),
        ("v_max_i32_e32 v0, v1, v2", 0xFFFFFFFF, 0, 0, 0),
        ("v_max_u32_e32 v0, v1, v2", 0xFFFFFFFF, 0, 0, 0xFFFFFFFF),
        ("v_bcnt_u32_b32 v0, v1, v2", 0xF0F0, 100, 0, 108),
        ("v_not_b32_e32 v0, v1", 0xF0F0F0F0, 0, 0, 0x0F0F0F0F),
        ("v_bfrev_b32_e32 v0, v1", 0x1, 0, 0, 0x80000000),
        ("v_bfrev_b32_e32 v0, 1", 0, 0, 0, 0x80000000),
        ("v_ffbh_u32_e32 v0, v1", 0x00010000, 0, 0, 15),
        ("v_ffbh_u32_e32 v0, v1", 0, 0, 0, 0xFFFFFFFF),
        ("v_ffbl_b32_e32 v0, v1", 0x00010000, 0, 0, 16),
        ("v_ffbh_i32_e32 v0, v1", 0xFFFF0000, 0, 0, 16),
        ("v_sad_u32 v0, v1, v2, v3", 3, 10, 100, 107),
        ("v_cndmask_b32_e64 v0, v1, |v2|, s[0:1]", 1, 0x80000005, 0, 5),
    ],
)
def test_integer(text, a, b, c, expected):
    found = value(text, v={1: U(a), 2: U(b), 3: U(c)}, s={0: U(1), 1: U(0)})
    assert found == expected, hex(found)


@pytest.mark.parametrize("truth", [0x00, 0xFF, 0x6C, 0x36, 0xF8, 0xE8, 0x96])
def test_every_function_of_three_bits(truth):
    b = run(f"v_bitop3_b32 v0, v1, v2, v3 bitop3:{truth:#x}", v={1: U(0xF0), 2: U(0xCC), 3: U(0xAA)})
    assert int(b.v[0, 0, 0]) & 0xFF == truth


@pytest.mark.parametrize(
    ("text", "a", "b", "c", "expected"),
    [
        ("v_add_f32_e32 v0, v1, v2", 1.5, 2.25, 0, 3.75),
        ("v_sub_f32_e64 v0, -v1, |v2|", 1.5, -2.25, 0, -3.75),
        ("v_mul_f32_e64 v0, v1, v2 mul:2", 1.5, 2.0, 0, 6.0),
        ("v_mul_f32_e64 v0, v1, v2 div:2", 1.5, 2.0, 0, 1.5),
        ("v_add_f32_e64 v0, v1, v2 clamp", 1.5, 2.0, 0, 1.0),
        ("v_add_f32_e64 v0, v1, v2 clamp", np.nan, 2.0, 0, 0.0),
        ("v_fma_f32 v0, v1, v2, -v3", 3.0, 5.0, 1.0, 14.0),
        ("v_max_f32_e32 v0, v1, v2", np.nan, 2.0, 0, 2.0),
        ("v_maximum3_f32 v0, v1, v2, v3", np.nan, 2.0, 1.0, np.nan),
        ("v_max3_f32 v0, v1, v2, v3", 1.0, np.nan, 3.0, 3.0),
        ("v_med3_f32 v0, v1, v2, v3", 9.0, -1.0, 3.0, 3.0),
        ("v_med3_f32 v0, v1, v2, v3", np.nan, 7.0, 3.0, 3.0),
        ("v_rndne_f32_e32 v0, v1", 2.5, 0, 0, 2.0),
        ("v_fract_f32_e32 v0, v1", -0.25, 0, 0, 0.75),
        ("v_exp_f32_e32 v0, v1", -3.0, 0, 0, 0.125),
        ("v_log_f32_e32 v0, v1", 0.125, 0, 0, -3.0),
        ("v_rcp_f32_e32 v0, v1", 4.0, 0, 0, 0.25),
        ("v_rcp_f32_e32 v0, v1", 0.0, 0, 0, np.inf),
        ("v_rsq_f32_e32 v0, v1", 16.0, 0, 0, 0.25),
        ("v_frexp_mant_f32_e32 v0, v1", 12.0, 0, 0, 0.75),
        ("v_sin_f32_e32 v0, v1", 0.25, 0, 0, 1.0),
        ("v_mul_legacy_f32 v0, v1, v2", 0.0, np.inf, 0, 0.0),
        ("v_fmac_f32_e32 v0, v1, v2", 3.0, 4.0, 0, 112.0),
        ("v_div_fixup_f32 v0, v1, v2, v3", 5.0, 0.0, -1.0, -np.inf),
        ("v_cvt_f32_ubyte1_e32 v0, v1", 0, 0, 0, 0.0),
    ],
)
def test_float(text, a, b, c, expected):
    found = real(text, v={0: F(100), 1: F(a), 2: F(b), 3: F(c)})
    assert found == expected or (np.isnan(found) and np.isnan(expected)), found


def test_zeros_are_ordered_by_maximum_and_minimum():
    zero = {1: F(-0.0), 2: F(0.0)}
    assert value("v_max_f32_e32 v0, v1, v2", v=zero) == value("v_max_f32_e32 v0, v2, v1", v=zero) == 0
    assert value("v_min_f32_e32 v0, v1, v2", v=zero) == value("v_min_f32_e32 v0, v2, v1", v=zero) == 0x80000000


def test_fma_rounds_once():
    """(1 + 2^-12)^2 - (1 + 2^-11) is 2^-24 exactly; a product rounded first loses it."""
    a, c = F(1 + 2**-12), F(-(1 + 2**-11))
    assert real("v_fma_f32 v0, v1, v1, v2", v={1: a, 2: c}) == 2.0**-24
    # A sum in float64 that lands halfway between two floats: the part below it decides.
    big, tiny = F(2**24 + 2), F(2**-60)
    assert real("v_fma_f32 v0, v1, 1.0, v2", v={1: big, 2: tiny}) == 2**24 + 2
    assert real("v_fma_f32 v0, v1, v2, v3", v={1: F(1 + 2**-23), 2: F(2**24), 3: F(1 + 2**-23)}) == 2**24 + 4
    assert real("v_fma_f32 v0, v1, v2, v3", v={1: F(2**24), 2: F(1), 3: F(1 + 2**-23)}) == 2**24 + 2
    assert real("v_fma_f32 v0, v1, v2, v3", v={1: F(2**24), 2: F(1), 3: F(1)}) == 2**24


def test_denormals_are_kept():
    assert value("v_mul_f32_e32 v0, v1, v2", v={1: F(2**-100), 2: F(2**-49)}) == 1


@pytest.mark.parametrize(
    ("text", "given", "expected"),
    [
        ("v_cvt_i32_f32_e32 v0, v1", F(-2.9), U(0xFFFFFFFE)),
        ("v_cvt_i32_f32_e32 v0, v1", F(1e20), U(0x7FFFFFFF)),
        ("v_cvt_u32_f32_e32 v0, v1", F(-5), U(0)),
        ("v_cvt_u32_f32_e32 v0, v1", NAN, U(0)),
        ("v_cvt_f32_i32_e32 v0, v1", I(-7), F(-7).view(U)),
        ("v_cvt_f32_u32_e32 v0, v1", U(0xFFFFFFFF), F(2**32).view(U)),
        ("v_cvt_f32_ubyte2_e32 v0, v1", U(0x00C80000), F(200).view(U)),
        ("v_cvt_f16_f32_e32 v0, v1", F(65520), U(0x7C00)),
        ("v_cvt_f32_f16_e32 v0, v1", U(0xFFFF3C00), F(1).view(U)),
        ("v_cvt_pkrtz_f16_f32 v0, v1, 1.0", F(65519), U(0x3C007BFF)),
        ("v_cvt_pk_bf16_f32 v0, v1, v1", F(1.00390625), U(0x3F803F80)),
        ("v_cvt_flr_i32_f32_e32 v0, v1", F(-2.1), U(0xFFFFFFFD)),
    ],
)
def test_conversion(text, given, expected):
    assert value(text, v={1: given}) == int(expected)


def test_constants_take_the_type_of_their_operand():
    assert value("v_mov_b32_e32 v0, 1.0") == 0x3F800000
    assert value("v_mov_b32_e32 v0, -1") == 0xFFFFFFFF
    assert value("v_add_f16_e32 v0, 1.0, v1", v={1: U(0x4000)}) == 0x4200
    assert real("v_add_f32_e32 v0, 0x3fc00000, v1", v={1: F(1)}) == 2.5
    b = run("v_add_f64 v[0:1], v[2:3], 0.5", v={2: np.float64(1.25)})
    assert (b.v[1] == np.float64(1.75).view(np.uint64) >> np.uint64(32)).all()


def test_64_bit_addresses():
    """The two ways to add a 32-bit offset to a 64-bit base; a carry crosses the halves."""
    base, step = np.uint64(0x1_FFFF_FFF0), U(0x20)
    b = run("v_lshl_add_u64 v[0:1], v[2:3], 0, s[0:1]", v={2: base}, s={0: step, 1: U(0)})
    assert (b.v[0] == 0x10).all() and (b.v[1] == 2).all()
    b = run("v_add_co_u32_e32 v0, vcc, v2, v4\nv_addc_co_u32_e32 v1, vcc, 0, v3, vcc", v={2: base, 4: step})
    assert (b.v[0] == 0x10).all() and (b.v[1] == 2).all() and not b.bits(VCC).any()
    b = run("v_mad_u64_u32 v[0:1], s[2:3], v2, v3, v[4:5]", v={2: U(0x80000001), 3: U(4), 4: np.uint64(5)})
    assert (b.v[0] == 9).all() and (b.v[1] == 2).all()
    b = run("v_mad_i64_i32 v[0:1], s[2:3], v2, v3, v[4:5]", v={2: I(-3), 3: I(5), 4: np.uint64(1)})
    assert (b.vi[0] == -14).all() and (b.vi[1] == -1).all()
    b = run("v_lshlrev_b64 v[0:1], 3, v[2:3]\nv_ashrrev_i64 v[4:5], 4, v[2:3]", v={2: np.uint64(0x9000_0000_4000_0010)})
    assert (b.v[0] == 0x80).all() and (b.v[1] == 0x80000002).all() and (b.v[5] == 0xF9000000).all()


def test_borrow():
    b = run(
        "v_sub_co_u32_e32 v0, vcc, v1, v2\nv_subb_co_u32_e32 v3, vcc, v4, v5, vcc",
        v={1: U(1), 2: U(2), 4: U(7), 5: U(3)},
    )
    assert (b.v[0] == 0xFFFFFFFF).all() and (b.v[3] == 3).all()


def test_exec_guards_writes_and_comparisons():
    b = run("v_mov_b32_e32 v0, 7\nv_cmp_gt_u32_e64 s[4:5], 32, v1", v={0: LANES, 1: LANES}, on=0xFFFF_0000_FFFF_0000)
    on = (LANES % 32) >= 16
    assert (b.v[0, 0] == np.where(on, 7, LANES)).all()
    assert int(b.pair(4)[0]) == 0xFFFF_0000


def test_comparison_writes_exec_too():
    b = run("v_cmpx_lt_i32_e32 vcc, -1, v0\nv_mov_b32_e32 v0, 9", v={0: np.where(LANES < 5, -1, 3).astype(I)})
    assert (b.vi[0, 0] == np.where(LANES < 5, -1, 9)).all() and int(b.pair(EXEC)[0]) == (1 << 64) - 32


@pytest.mark.parametrize(
    ("condition", "expected"),
    [("lt", 0), ("gt", 0), ("nlt", 1), ("nge", 1), ("neq", 1), ("eq", 0), ("lg", 0), ("u", 1), ("o", 0), ("nlg", 1)],
)
def test_comparison_with_nan(condition, expected):
    b = run(f"v_cmp_{condition}_f32_e32 vcc, v0, v1", v={0: NAN, 1: F(1)})
    assert b.bits(VCC).all() == bool(expected)


def test_classes():
    numbers = np.array([np.nan, -np.inf, -1, -1e-40, -0.0, 0.0, 1e-40, 1, np.inf], np.float32)
    for place, number in enumerate(numbers, 1):
        for bit in range(10):
            b = run("v_cmp_class_f32_e64 s[0:1], v0, v1", v={0: number, 1: U(1 << bit)})
            assert b.bits(0).all() == (bit == place)


def test_division_steps():
    """n / d the way compilers spell it, where the quotient's scale must be undone and where not."""
    text = """
        v_div_scale_f32 v3, s[0:1], v2, v2, v1
        v_div_scale_f32 v4, vcc, v1, v2, v1
        v_rcp_f32_e32 v5, v3
        v_fma_f32 v6, -v3, v5, 1.0
        v_fmac_f32_e32 v5, v6, v5
        v_mul_f32_e32 v6, v4, v5
        v_fma_f32 v7, -v3, v6, v4
        v_fmac_f32_e32 v6, v7, v5
        v_fma_f32 v7, -v3, v6, v4
        v_div_fmas_f32 v7, v7, v5, v6
        v_div_fixup_f32 v0, v7, v2, v1
    """
    rng = np.random.default_rng()
    n, d = (F(10) ** rng.uniform(-44, 38, 64).astype(F) for _ in "nd")
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(run(text, v={1: n, 2: d}).vf[0, 0], n / d)


def test_sub_dword_selection():
    word = U(0x80FF7F01)
    text = "v_add_u32_sdwa v0, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:{} src1_sel:DWORD"
    for place, expected in enumerate((0x01, 0x7F, 0xFF, 0x80)):
        assert value(text.format(f"BYTE_{place}"), v={1: word, 2: U(0)}) == expected
    assert value(text.format("WORD_1").replace("v1, v2", "sext(v1), v2"), v={1: word, 2: U(0)}) == 0xFFFF80FF
    text = "v_or_b32_sdwa v0, v1, v2 dst_sel:BYTE_1 dst_unused:{} src0_sel:BYTE_0 src1_sel:BYTE_0"
    given = {0: U(0x11223344), 1: U(0x80), 2: U(0x01)}
    assert value(text.format("UNUSED_PAD"), v=given) == 0x8100
    assert value(text.format("UNUSED_PRESERVE"), v=given) == 0x11228144
    assert value(text.format("UNUSED_SEXT"), v=given) == 0xFFFF8100


def test_16_bit_results_clear_the_upper_half():
    given = {0: U(0xABCD1234), 1: U(0xFFFF0003), 2: U(0xFFFFFFFF)}
    assert value("v_add_u16_e32 v0, v1, v2", v=given) == 2
    assert value("v_max_i16_e32 v0, v1, v2", v=given) == 3
    assert value("v_mad_u16 v0, v1, v1, v2 op_sel:[0,0,1,1]", v=given) == 0x00081234


def test_accumulation_registers_are_others():
    b = run("v_accvgpr_write_b32 a3, v3\nv_mov_b32_e32 v3, 1\nv_accvgpr_read_b32 v0, a3", v={3: LANES})
    assert (b.v[0, 0] == LANES).all() and (b.v[3] == 1).all()
