"""Reading the text, and refusing what is not known."""

import pytest

from . import ops
from .asm import instruction
from .errors import UnknownInstruction
from .machine import Kernel
from .snippet import program, run


@pytest.mark.parametrize(
    ("text", "name", "operands", "modifiers"),
    [
        ("v_add_u32_e32 v0, s1, v2", "v_add_u32_e32", ("v0", "s1", "v2"), {}),
        ("\tds_read_b64\tv[0:1], v2 offset:8", "ds_read_b64", ("v[0:1]", "v2"), {"offset": "8"}),
        ("s_waitcnt vmcnt(0) lgkmcnt(0)", "s_waitcnt", ("vmcnt(0)", "lgkmcnt(0)"), {}),
        (
            "v_mov_b32_dpp v1, v2 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf",
            "v_mov_b32_dpp", ("v1", "v2"), {"quad_perm": "[1,0,3,2]", "row_mask": "0xf", "bank_mask": "0xf"},
        ),
        (
            "buffer_load_dwordx4 v[0:3], v4, s[8:11], 0 offen offset:32", "buffer_load_dwordx4",
            ("v[0:3]", "v4", "s[8:11]", "0"), {"offen": "", "offset": "32"},
        ),
        ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 4), 15", "s_setreg_imm32_b32",
         ("hwreg(HW_REG_MODE, 4, 4)", "15"), {}),
        ("s_endpgm", "s_endpgm", (), {}),
    ],
)  # fmt: skip
def test_instruction(text, name, operands, modifiers):
    found = instruction(text)
    assert (found.name, found.operands, found.modifiers) == (name, operands, modifiers)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("v_frobnicate_b32 v0, v1", "v_frobnicate_b32"),
        ("v_add_u32_e32 v0, v1", "operands"),
        ("v_add_u32_e32 v0, v1, v64", "declares 64"),
        ("v_add_u32_e32 s0, v1, v2", "s0"),
        ("v_mfma_f32_32x32x1_2b_f32 a[0:31], v0, v1, a[0:31]", "several blocks"),
        ("v_mfma_f32_16x16x32_fp8_fp8 v[0:3], v[4:7], v[8:11], 0", "another size"),
        ("v_mov_b32_dpp v0, v1 row_share:3", "row_share"),
        ("buffer_load_dword v0, v1, s[0:3], 0 idxen", "index"),
        ("ds_read_b64_tr_b4 v[0:1], v2", "ds_read_b64_tr_b4"),
        ("s_setreg_imm32_b32 hwreg(HW_REG_TRAPSTS, 0, 4), 15", "TRAPSTS"),
    ],
)
def test_unknown_is_refused_by_name(text, word):
    with pytest.raises(UnknownInstruction) as caught:
        Kernel(program(text))
    assert text.split()[0] in str(caught.value) and word in str(caught.value)


def test_all_unknown_instructions_are_listed_at_once():
    with pytest.raises(UnknownInstruction, match=r"v_one_b32.*v_two_b32"):
        Kernel(program("v_one_b32 v0\nv_mov_b32 v0, 0\nv_two_b32 v0"))


def test_the_wrong_mode_is_refused():
    run("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 4), 15")
    with pytest.raises(UnknownInstruction, match="denormal"):
        run("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0")


def test_registers_start_poisoned():
    batch = run("v_mov_b32_e32 v1, v0")
    assert (batch.v[1] == 0x7FD5A5A5).all()


def test_table_knows_its_encodings():
    for name in ("v_add_f32_e32", "v_add_f32_e64", "v_add_f32_dpp", "v_add_u32_sdwa", "s_barrier", "ds_add_rtn_u32"):
        assert ops.known(name)
    assert not ops.known("v_add_f33")
