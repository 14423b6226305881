"""Movement between lanes against loops over lanes that spell out the rule."""

import numpy as np
import pytest

from .snippet import LANES, run

U = np.uint32
DATA, OLD = (LANES * 3 + 100).astype(U), (LANES + 1000).astype(U)
ROWS = {  # modifier: lane -> source lane or None
    "row_shl:1": lambda l: l + 1 if l % 16 < 15 else None,
    "row_shl:4": lambda l: l + 4 if l % 16 < 12 else None,
    "row_shr:1": lambda l: l - 1 if l % 16 else None,
    "row_shr:8": lambda l: l - 8 if l % 16 >= 8 else None,
    "row_ror:3": lambda l: l // 16 * 16 + (l % 16 - 3) % 16,
    "row_mirror": lambda l: l // 16 * 16 + 15 - l % 16,
    "row_half_mirror": lambda l: l // 8 * 8 + 7 - l % 8,
    "row_newbcast:5": lambda l: l // 16 * 16 + 5,
    "row_bcast:15": lambda l: l // 16 * 16 - 1 if l >= 16 else None,
    "row_bcast:31": lambda l: 31 if l >= 32 else None,
    "quad_perm:[1,0,3,2]": lambda l: l ^ 1,
    "quad_perm:[2,2,0,1]": lambda l: l // 4 * 4 + (2, 2, 0, 1)[l % 4],
    "wave_shr:1": lambda l: l - 1 if l else None,
    "wave_rol:1": lambda l: (l + 1) % 64,
}


@pytest.mark.parametrize("modifier", ROWS)
@pytest.mark.parametrize("on", [(1 << 64) - 1, 0x0F0F_3355_FFFF_7FF1])
@pytest.mark.parametrize("zero", [False, True])
def test_dpp(modifier, on, zero):
    text = f"v_mov_b32_dpp v0, v1 {modifier} row_mask:0xf bank_mask:0xf" + (" bound_ctrl:1" if zero else "")
    b = run(text, v={0: OLD, 1: DATA}, on=on)
    for lane in range(64):
        source = ROWS[modifier](lane)
        there = source is not None and on >> source & 1
        if not on >> lane & 1:
            expected = OLD[lane]
        elif there:
            expected = DATA[source]
        else:
            expected = 0 if zero else OLD[lane]
        assert b.v[0, 0, lane] == expected, lane


def test_dpp_masks_and_arithmetic():
    b = run("v_add_u32_dpp v0, v1, v2 row_shr:1 row_mask:0xa bank_mask:0xc", v={0: OLD, 1: DATA, 2: U(7)})
    for lane in range(64):
        written = lane // 16 in (1, 3) and lane % 16 >= 8
        assert b.v[0, 0, lane] == (DATA[lane - 1] + 7 if written else OLD[lane])


def test_permutes():
    index = np.random.default_rng().integers(0, 256, 64).astype(U) * U(4)
    on = 0xF0FF_FFFF_0000_FFFF
    b = run("ds_bpermute_b32 v0, v1, v2 offset:8", v={0: OLD, 1: index, 2: DATA}, on=on)
    for lane in range(64):
        source = int(index[lane] + 8) // 4 % 64
        expected = (DATA[source] if on >> source & 1 else 0) if on >> lane & 1 else OLD[lane]
        assert b.v[0, 0, lane] == expected
    b = run("ds_permute_b32 v0, v1, v2", v={1: ((LANES * 5 + 3) % 64 * 4).astype(U), 2: DATA})
    for lane in range(64):
        assert b.v[0, 0, (lane * 5 + 3) % 64] == DATA[lane]


def test_permute_may_overwrite_its_address():
    b = run("ds_bpermute_b32 v1, v1, v2", v={1: ((63 - LANES) * 4).astype(U), 2: DATA})
    assert (b.v[1, 0] == DATA[::-1]).all()


@pytest.mark.parametrize(
    ("offset", "rule"),
    [
        ("swizzle(SWAP,16)", lambda l: l ^ 16),
        ("swizzle(SWAP,1)", lambda l: l ^ 1),
        ("swizzle(QUAD_PERM,3,2,1,0)", lambda l: l ^ 3),
        ("swizzle(BROADCAST,8,2)", lambda l: l // 8 * 8 + 2),
        ("swizzle(REVERSE,8)", lambda l: l ^ 7),
        ('swizzle(BITMASK_PERM,"0p1pi")', lambda l: l // 32 * 32 + ((l & 0b01010) | 0b00100 | (~l & 1))),
        ("0x801f", lambda l: l // 4 * 4 + (3, 3, 1, 0)[l % 4]),
    ],
)
def test_swizzle(offset, rule):
    b = run(f"ds_swizzle_b32 v0, v1 offset:{offset}", v={1: DATA})
    assert b.v[0, 0].tolist() == [int(DATA[rule(lane)]) for lane in range(64)]


@pytest.mark.parametrize("width", [16, 32])
def test_row_swap(width):
    b = run(f"v_permlane{width}_swap_b32_e32 v0, v1", arch="gfx950", v={0: LANES, 1: LANES + 100})
    rows = 64 // width
    first, second = b.v[0, 0].reshape(rows, width), b.v[1, 0].reshape(rows, width)
    for row in range(rows):
        lanes = np.arange(row * width, (row + 1) * width)
        # Odd rows of the first register and even rows of the second have changed places.
        assert (first[row] == (lanes - width + 100 if row % 2 else lanes)).all()
        assert (second[row] == (lanes + 100 if row % 2 else lanes + width)).all()


def test_scalar_reads_and_writes():
    on = 0xFFFF_FFFF_FFFF_FF00
    assert run("v_readfirstlane_b32 s0, v1", v={1: DATA}, on=on).s[0, 0] == DATA[8]
    assert run("v_readfirstlane_b32 s0, v1", v={1: DATA}, on=0).s[0, 0] == DATA[0]
    assert run("v_readlane_b32 s0, v1, s2", v={1: DATA}, s={2: U(69)}, on=on).s[0, 0] == DATA[5]
    b = run("v_writelane_b32 v0, s3, 2", v={0: OLD}, s={3: U(5)}, on=0)
    assert b.v[0, 0].tolist() == np.where(LANES == 2, 5, OLD).tolist()


def test_counting_lanes():
    mask = 0x8000_0F0F_F000_0001
    text = "v_mbcnt_lo_u32_b32 v0, s0, 0\nv_mbcnt_hi_u32_b32 v0, s1, v0"
    b = run(text, s={0: np.uint64(mask)})
    assert b.v[0, 0].tolist() == [(mask & ((1 << lane) - 1)).bit_count() for lane in range(64)]


def test_swap_and_select():
    b = run("v_swap_b32 v0, v1", v={0: OLD, 1: DATA}, on=1)
    assert (b.v[0, 0, 0], b.v[1, 0, 0], b.v[0, 0, 1]) == (DATA[0], OLD[0], OLD[1])
    b = run("v_cndmask_b32_e32 v0, v1, v2, vcc", v={1: OLD, 2: DATA}, s={106: np.uint64(0xFF)})
    assert (b.v[0, 0] == np.where(LANES < 8, DATA, OLD)).all()
