"""LDS: widths, pairs, transposed loads, bounds, poison."""

import numpy as np
import pytest

from .errors import MemoryFault
from .snippet import LANES, run

U = np.uint32
STEP4, STEP8, STEP16 = (LANES.astype(U) * U(n) for n in (4, 8, 16))


def test_widths():
    given = {0: STEP16, 1: LANES, 2: LANES + 100, 3: LANES + 200, 4: LANES + 300}
    text = """
        ds_write_b128 v0, v[1:4]
        ds_read_b96 v[8:10], v0
        ds_read_b64 v[12:13], v0 offset:8
        ds_read_u8 v14, v0 offset:4
        ds_read_u16_d16_hi v15, v0
    """
    b = run(text, v=given | {15: U(0xFFFF)})
    assert (b.v[8:11, 0] == np.stack([LANES, LANES + 100, LANES + 200])).all()
    assert (b.v[12:14, 0] == np.stack([LANES + 200, LANES + 300])).all()
    assert (b.v[14, 0] == LANES + 100).all() and (b.v[15, 0] == (LANES << 16 | 0xFFFF)).all()


def test_signed_and_partial():
    text = """
        ds_write_b32 v0, v1
        ds_write_b8 v0, v2 offset:1
        ds_write_b16_d16_hi v0, v3 offset:2
        ds_read_i8 v4, v0 offset:1
        ds_read_i16 v5, v0 offset:2
        ds_read_b32 v6, v0
    """
    b = run(text, v={0: STEP4, 1: U(0x11111111), 2: U(0xFFFFFF80), 3: U(0x9ABC0000)})
    assert (b.vi[4] == -128).all() and (b.v[5] == 0xFFFF9ABC).all() and (b.v[6] == 0x9ABC8011).all()


def test_pairs():
    text = """
        ds_write2_b32 v0, v1, v2 offset0:1 offset1:3
        ds_read2_b32 v[4:5], v0 offset0:3 offset1:1
    """
    b = run(text, v={0: STEP16, 1: LANES, 2: LANES + 100})
    assert (b.v[4, 0] == LANES + 100).all() and (b.v[5, 0] == LANES).all()
    text = """
        ds_write2st64_b64 v0, v[2:3], v[4:5] offset1:1
        ds_read_b64 v[6:7], v0 offset:512
        ds_read2st64_b64 v[0:3], v0 offset1:1
    """
    b = run(text, v={0: STEP8, 2: LANES, 3: LANES + 1, 4: LANES + 2, 5: LANES + 3})
    assert (b.v[0:4, 0] == np.stack([LANES + n for n in range(4)])).all()  # also over its own address
    assert (b.v[6, 0] == LANES + 2).all()


@pytest.mark.parametrize("bits", [16, 8])
def test_transposed_loads(bits):
    """A row-major block of 16 columns; after the load each of 16 lanes holds one column from top to bottom."""
    rows = 64 // bits
    kind = np.dtype(f"u{bits // 8}")
    blocks = np.random.default_rng().integers(0, 256, (4, rows, 16)).astype(kind)  # one block for each 16 lanes
    words = blocks.reshape(64, 8 // kind.itemsize).view(U)
    b = run(f"ds_write_b64 v0, v[2:3]\nds_read_b64_tr_b{bits} v[4:5], v0", arch="gfx950",
            v={0: STEP8, 2: words[:, 0].copy(), 3: words[:, 1].copy()})  # fmt: skip
    found = np.ascontiguousarray(b.v[4:6, 0].T).view(kind)  # [64, rows]
    for lane in range(64):
        assert found[lane].tolist() == blocks[lane // 16, :, lane % 16].tolist()


def test_bounds_and_poison():
    assert (run("ds_read_b32 v1, v0", v={0: STEP4}).v[1] == 0x7FD5A5A5).all()
    run("ds_read_b64 v[2:3], v0", v={0: U(1016)})
    with pytest.raises(MemoryFault, match="LDS address 1020, of 1024"):
        run("ds_read_b64 v[2:3], v0", v={0: U(1020)})
    with pytest.raises(MemoryFault):
        run("ds_write_b32 v0, v1", v={0: np.int32(-4), 1: U(0)})
    run("ds_write_b32 v0, v1", v={0: np.where(LANES == 3, 4096, 0).astype(U), 1: U(0)}, on=~(1 << 3) & (1 << 64) - 1)


def test_histogram_counts_every_lane():
    b = run("ds_write_b32 v0, v1\nds_add_u32 v2, v3", v={0: STEP4, 1: U(0), 2: (LANES % 3 * 4).astype(U), 3: U(2)})
    assert b.local.data.view(U)[:4].tolist() == [44, 42, 42, 0]
