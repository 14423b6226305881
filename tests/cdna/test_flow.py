"""Scalars, branches, barriers and the order of waves."""

import numpy as np
import pytest

from .errors import CdnaError, Race, Stuck, Trap
from .snippet import launch, run
from .wave import EXEC

U, U64 = np.uint32, np.uint64


@pytest.mark.parametrize(
    ("text", "a", "b", "expected", "scc"),
    [
        ("s_add_u32 s0, s1, s2", 0xFFFFFFFF, 2, 1, 1),
        ("s_sub_u32 s0, s1, s2", 1, 2, 0xFFFFFFFF, 1),
        ("s_add_i32 s0, s1, s2", 0x7FFFFFFF, 1, 0x80000000, 1),
        ("s_sub_i32 s0, s1, s2", 0x80000000, 1, 0x7FFFFFFF, 1),
        ("s_add_i32 s0, s1, s2", 0xFFFFFFFF, 1, 0, 0),
        ("s_mul_hi_u32 s0, s1, s2", 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFE, None),
        ("s_lshl3_add_u32 s0, s1, s2", 0x20000001, 5, 13, 1),
        ("s_and_b32 s0, s1, s2", 0xF0, 0x0F, 0, 0),
        ("s_andn2_b32 s0, s1, s2", 0xFF, 0x0F, 0xF0, 1),
        ("s_lshr_b32 s0, s1, s2", 0x80, 36, 8, 1),
        ("s_ashr_i32 s0, s1, s2", 0x80000000, 31, 0xFFFFFFFF, 1),
        ("s_bfe_u32 s0, s1, 0x80004", 0xABCD, 0, 0xBC, 1),
        ("s_bfe_i32 s0, s1, 0x10007", 0x80, 0, 0xFFFFFFFF, 1),
        ("s_bfm_b32 s0, s1, s2", 4, 8, 0xF00, None),
        ("s_min_i32 s0, s1, s2", 0xFFFFFFFF, 3, 0xFFFFFFFF, 1),
        ("s_max_u32 s0, s1, s2", 1, 3, 3, 0),
        ("s_bcnt1_i32_b32 s0, s1", 0xFF, 0, 8, 1),
        ("s_flbit_i32_b32 s0, s1", 0x0000FFFF, 0, 16, None),
        ("s_ff1_i32_b32 s0, s1", 0x80, 0, 7, None),
        ("s_sext_i32_i16 s0, s1", 0x18000, 0, 0xFFFF8000, None),
        ("s_movk_i32 s0, 0xff80", 0, 0, 0xFFFFFF80, None),
        ("s_pack_ll_b32_b16 s0, s1, s2", 0x11112222, 0x33334444, 0x44442222, None),
        ("s_absdiff_i32 s0, s1, s2", 3, 10, 7, 1),
        ("s_brev_b32 s0, s1", 1, 0, 0x80000000, None),
        ("s_not_b32 s0, s1", 0xFFFFFFFF, 0, 0, 0),
        ("s_cmp_lt_i32 s1, s2\ns_cselect_b32 s0, 11, 22", 0xFFFFFFFF, 0, 11, 1),
        ("s_cmp_lt_u32 s1, s2\ns_cselect_b32 s0, 11, 22", 0xFFFFFFFF, 0, 22, 0),
        ("s_cmpk_eq_i32 s1, 0xfffe\ns_cselect_b32 s0, 11, 22", 0xFFFFFFFE, 0, 11, 1),
        ("s_cmpk_eq_u32 s1, 0xfffe\ns_cselect_b32 s0, 11, 22", 0xFFFE, 0, 11, 1),
        ("s_bitcmp1_b32 s1, s2\ns_cselect_b32 s0, 11, 22", 0x10, 36, 11, 1),
        ("s_mov_b32 s0, s1\ns_bitset1_b32 s0, s2", 1, 4, 17, None),
        ("s_mov_b32 s0, s1\ns_addk_i32 s0, 0xffff", 1, 0, 0, 0),
    ],
)
def test_scalar(text, a, b, expected, scc):
    state = run(text, s={1: U(a), 2: U(b)}, waves=2)
    assert (state.s[:, 0] == expected).all(), hex(state.s[0, 0])
    assert scc is None or (state.scc == bool(scc)).all()


def test_64_bit_scalars():
    state = run("s_add_u32 s0, s2, s4\ns_addc_u32 s1, s3, s5", s={2: U64(0x1_FFFF_FFFF), 4: U64(1)})
    assert int(state.pair(0)[0]) == 0x2_0000_0000
    state = run("s_sub_u32 s0, s2, s4\ns_subb_u32 s1, s3, s5", s={2: U64(0x2_0000_0000), 4: U64(1)})
    assert int(state.pair(0)[0]) == 0x1_FFFF_FFFF
    state = run("s_lshl_b64 s[0:1], s[2:3], 33\ns_ff1_i32_b64 s4, s[0:1]", s={2: U64(3)})
    assert int(state.pair(0)[0]) == 3 << 33 and state.s[0, 4] == 33
    state = run("s_ashr_i64 s[0:1], s[2:3], 4", s={2: U64(0x8000_0000_0000_0010)})
    assert int(state.pair(0)[0]) == 0xF800_0000_0000_0001
    state = run("s_bfe_u64 s[0:1], s[2:3], 0x100014", s={2: U64(0xABCD_0000_0000) >> U64(12)})
    assert int(state.pair(0)[0]) == 0xABCD
    state = run("s_mov_b64 s[0:1], -1\ns_bcnt1_i32_b64 s2, s[0:1]\ns_flbit_i32_b64 s3, s[4:5]", s={4: U64(1 << 20)})
    assert state.s[0, 2] == 64 and state.s[0, 3] == 43


def test_exec_is_saved_and_restored():
    text = "s_and_saveexec_b64 s[2:3], s[0:1]\nv_mov_b32 v0, 5\ns_xor_b64 s[4:5], exec, s[2:3]\ns_mov_b64 exec, s[2:3]"
    state = run(text, s={0: U64(0xFF)}, v={0: U(0)}, on=0xFFFF)
    assert (state.v[0, 0] == np.where(np.arange(64) < 8, 5, 0)).all()
    assert int(state.pair(4)[0]) == 0xFF00 and int(state.pair(EXEC)[0]) == 0xFFFF
    state = run("s_andn2_saveexec_b64 s[2:3], s[0:1]", s={0: U64(0xFF)}, on=0x0F)
    assert int(state.pair(EXEC)[0]) == 0xF0


LOOP = """
    v_lshrrev_b32_e32 v1, 6, v0
    v_readfirstlane_b32 s2, v1
    s_add_i32 s2, s2, s8
    s_mov_b32 s3, 0
    .LOOP:
    s_cmp_lt_i32 s2, 1
    s_cbranch_scc1 .DONE
    s_add_i32 s3, s3, s2
    s_sub_i32 s2, s2, 1
    s_branch .LOOP
    .DONE:
    s_lshl_b32 s4, s8, 9
    v_lshl_add_u32 v1, v0, 2, s4
    v_mov_b32_e32 v2, s3
    global_store_dword v1, v2, s[0:1]
    s_endpgm
"""


@pytest.mark.parametrize("lockstep", [True, False])
def test_waves_part_and_meet(lockstep):
    """Wave w of group g loops w + g times; 40 groups do not run at once."""
    out = np.zeros((40, 2, 64), U)
    counters = launch(LOOP, out, groups=40, lockstep=lockstep)
    turns = np.arange(40)[:, None] + np.arange(2)
    assert (out == (turns * (turns + 1) // 2)[:, :, None]).all()
    assert counters.workgroups == 40
    assert counters.instructions == int((turns * 5).sum()) + 80 * 11


EXCHANGE = """
    v_lshlrev_b32_e32 v1, 2, v0
    ds_write_b32 v1, v0
    {}
    v_xor_b32_e32 v2, 0x100, v1
    ds_read_b32 v3, v2
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v3, s[0:1]
    s_endpgm
"""


@pytest.mark.parametrize("lockstep", [True, False])
def test_barrier(lockstep):
    out = np.zeros((2, 64), U)
    launch(EXCHANGE.format("s_barrier"), out, lockstep=lockstep)
    assert (out.ravel() == np.arange(128) ^ 64).all()


@pytest.mark.parametrize("lockstep", [True, False])
def test_a_missing_barrier_is_a_race(lockstep):
    out = np.zeros((2, 64), U)
    with pytest.raises(Race) as caught:
        launch(EXCHANGE.format("s_nop 0"), out, lockstep=lockstep)
    # Alone, the first wave reads what nobody has written yet; the second one then overwrites what it read.
    text = (
        "wave 0 reads LDS word 64 that wave 1 has written"
        if lockstep
        else "wave 1 writes LDS word 64 that wave 0 has read"
    )
    assert text in str(caught.value) and ("ds_read_b32" if lockstep else "ds_write_b32") in str(caught.value)


BACK = """
    v_lshlrev_b32_e32 v1, 2, v0
    ds_write_b32 v1, v0
    s_barrier
    v_xor_b32_e32 v2, 0x100, v1
    ds_read_b32 v3, v2
    {}
    ds_write_b32 v1, v3
    s_barrier
    ds_read_b32 v3, v1
    global_store_dword v1, v3, s[0:1]
    s_endpgm
"""


def test_overwriting_what_another_wave_reads_is_a_race():
    out = np.zeros((2, 64), U)
    launch(BACK.format("s_barrier"), out)
    assert (out.ravel() == np.arange(128) ^ 64).all()
    with pytest.raises(Race, match="wave 0 writes LDS word 0 that wave 1 has read"):
        launch(BACK.format("s_nop 0"), out)


def test_the_same_value_from_every_wave_is_none():
    """Compiled code stores what waves hold in common more than once, and each wave reads its own."""
    out = np.zeros((2, 64), U)
    text = """
        v_and_b32_e32 v2, 63, v0
        v_lshlrev_b32_e32 v1, 2, v2
        ds_write_b32 v1, v2
        ds_read_b32 v3, v1
        v_lshlrev_b32_e32 v1, 2, v0
        global_store_dword v1, v3, s[0:1]
        s_endpgm
    """
    launch(text, out)
    assert (out == np.arange(64)).all()


def test_lds_of_workgroups_is_apart():
    out = np.zeros((2, 64), U)
    text = """
        v_lshlrev_b32_e32 v1, 2, v0
        v_mov_b32_e32 v2, s8
        ds_write_b32 v1, v2
        ds_read_b32 v3, v1
        v_lshl_add_u32 v1, s8, 8, v1
        global_store_dword v1, v3, s[0:1]
        s_endpgm
    """
    launch(text, out, waves=1, groups=2)
    assert (out == [[0], [1]]).all()


def test_an_endless_loop_ends():
    with pytest.raises(Stuck, match="1000"):
        launch(".AGAIN:\ns_branch .AGAIN\ns_endpgm", np.zeros(64, U), limit=1000)


def test_errors_name_the_line():
    with pytest.raises(Trap, match=r"s_trap 2 \(line 3\)"):
        launch("s_nop 0\ns_trap 2\ns_endpgm", np.zeros(64, U))
    with pytest.raises(CdnaError, match=r"in k: ds_read_b32 v1, v0 \(line 2\)\s+waves \[0, 1\]"):
        launch("ds_read_b32 v1, v0\ns_endpgm", np.zeros(64, U), lds=128)
