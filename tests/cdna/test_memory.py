"""Global memory, buffers, scratch, scalar loads: addresses, bounds, widths, atomics, faults."""

import numpy as np
import pytest

from .errors import MemoryFault
from .snippet import LANES, mapped, run

U, U64 = np.uint32, np.uint64
ALL = (1 << 64) - 1


def resource(base: int, size: int) -> dict:
    """A raw buffer descriptor in s[8:11]."""
    return {8: U(base & 0xFFFFFFFF), 9: U(base >> 32), 10: U(size), 11: U(0x27000)}


def test_widths_and_signs():
    data = np.arange(4096, dtype=np.uint8) * np.uint8(37)
    memory, (base,) = mapped(data)
    address = base + LANES.astype(U64) * U64(16)
    names = {"ubyte": np.uint8, "sbyte": np.int8, "ushort": np.uint16, "sshort": np.int16, "dword": np.uint32}
    for suffix, kind in names.items():
        b = run(f"global_load_{suffix} v0, v[2:3], off offset:4", v={2: address}, memory=memory)
        expected = data.view(kind)[(LANES * 16 + 4) // np.dtype(kind).itemsize].astype(np.int64) & 0xFFFFFFFF
        assert (b.v[0, 0] == expected).all(), suffix
    for count in (2, 3, 4):
        b = run(f"global_load_dwordx{count} v[4:{3 + count}], v[2:3], off", v={2: address}, memory=memory)
        assert (b.v[4 : 4 + count, 0] == data.view(U).reshape(-1, 4)[:64, :count].T).all()
    old = {2: address, 0: U(0xAAAABBBB)}
    b = run("global_load_short_d16 v0, v[2:3], off", v=old, memory=memory)
    assert (b.v[0, 0] == 0xAAAA0000 | data.view(np.uint16)[LANES * 8].astype(U)).all()
    b = run("global_load_ubyte_d16_hi v0, v[2:3], off", v=old, memory=memory)
    assert (b.v[0, 0] == 0x0000BBBB | data[LANES * 16].astype(U) << 16).all()


def test_unaligned_access():
    data = np.arange(512, dtype=np.uint8)
    memory, (base,) = mapped(data)
    text = "global_load_dword v0, v1, s[0:1] offset:3"
    b = run(text, v={1: U(2) * LANES.astype(U)}, s={0: U64(base)}, memory=memory)
    expected = [int.from_bytes(data[3 + 2 * lane : 7 + 2 * lane].tobytes(), "little") for lane in range(64)]
    assert b.v[0, 0].tolist() == expected


def test_64_bit_address_arithmetic():
    """A 32-bit unsigned offset beside a scalar base, and a negative instruction offset."""
    data = np.arange(64, dtype=U)
    memory, (base,) = mapped(data)
    start = {0: U64(base - 0xFFFF_FF00)}
    b = run("global_load_dword v0, v1, s[0:1]", v={1: U(0xFFFF_FF00) + LANES.astype(U) * U(4)}, s=start, memory=memory)
    # The offset is unsigned: 0xffffff00 is not -256.
    assert (b.v[0, 0] == data).all()
    given = {1: LANES.astype(U) * U(4) % U(200) + U(8)}
    b = run("global_load_dword v0, v1, s[0:1] offset:-8", v=given, s={0: U64(base)},
            memory=memory)  # fmt: skip
    assert (b.v[0, 0] == data[LANES * 4 % 200 // 4]).all()


def test_stores_follow_exec_and_the_last_lane_wins():
    data = np.zeros(64, U)
    memory, (base,) = mapped(data)
    run(
        "global_store_dword v0, v1, s[0:1]",
        v={0: LANES.astype(U) * U(4), 1: LANES},
        s={0: U64(base)},
        on=0xF0,
        memory=memory,
    )
    assert data.tolist() == [lane if 4 <= lane < 8 else 0 for lane in range(64)]
    run("global_store_byte v0, v1, s[0:1]", v={0: U(8), 1: LANES}, s={0: U64(base)}, memory=memory)
    assert data[2] == 63
    run("global_store_short_d16_hi v0, v1, s[0:1]", v={0: U(12), 1: U(0xABCD0000)}, s={0: U64(base)}, memory=memory)
    assert data[3] == 0xABCD


@pytest.mark.parametrize("offset", [-4, -1, 253, 256, 1 << 31, -(1 << 31), 1 << 32, 1 << 40])
@pytest.mark.parametrize("text", ["global_load_dword v4, v[2:3], off", "global_store_dword v[2:3], v4, off"])
def test_faults(offset, text):
    memory, (base,) = mapped(np.zeros(64, U))
    address = np.full(64, base, np.int64)
    address[17] += offset
    with pytest.raises(MemoryFault, match="no tensor"):
        run(text, v={2: address.view(U64), 4: U(0)}, memory=memory)
    run(text, v={2: address.view(U64), 4: U(0)}, on=ALL ^ 1 << 17, memory=memory)  # a lane that is off reads nothing


def test_fault_names_the_tensor():
    memory, (_, base) = mapped(np.zeros(64, U), np.zeros(16, U))
    with pytest.raises(MemoryFault, match=r"array 1, byte 64, allowed \[0, 64\)"):
        run("global_load_dword v4, v[2:3], off", v={2: np.full(64, base + 64, U64)}, memory=memory)


def test_windows_within_a_storage():
    """Two views of one storage: between them nothing may be touched."""
    memory, (base,) = mapped(np.arange(64, dtype=U))
    memory.storages[0].windows = []
    memory.storages[0].allow(128, 160)
    memory.storages[0].allow(0, 32)
    for place, allowed in ((0, True), (28, True), (32, False), (124, False), (128, True), (156, True), (160, False)):
        address = {2: np.full(64, base + place, U64)}
        if allowed:
            assert (run("global_load_dword v0, v[2:3], off", v=address, memory=memory).v[0] == place // 4).all()
        else:
            with pytest.raises(MemoryFault):
                run("global_load_dword v0, v[2:3], off", v=address, memory=memory)


@pytest.mark.parametrize(
    ("size", "records", "last"),  # the last lane that is in bounds, of lanes `size` bytes apart
    [(4, 256, 63), (4, 255, 62), (4, 100, 24), (4, 0, -1), (16, 1024, 63), (16, 1023, 62), (16, 40, 1), (1, 3, 2)],
)
def test_buffer_bounds(size, records, last):
    data = np.arange(1, 1025, dtype=np.uint8)
    memory, (base,) = mapped(data)
    suffix = {1: "ubyte", 4: "dword", 16: "dwordx4"}[size]
    target = "v[4:7]" if size == 16 else "v4"
    text = f"buffer_load_{suffix} {target}, v0, s[8:11], 0 offen"
    b = run(text, v={0: LANES.astype(U) * U(size)}, s=resource(base, records), memory=memory)
    found = b.v[4, 0] & (0xFF if size == 1 else 0xFFFFFFFF)
    expected = data.view(np.uint8 if size == 1 else U)[LANES * max(size // 4, 1)]
    assert (found == np.where(last >= LANES, expected, 0)).all()
    store = f"buffer_store_{suffix.lstrip('u')} {target}, v0, s[8:11], 0 offen"
    run(
        store,
        v={0: LANES.astype(U) * U(size)} | {r: U(0) for r in range(4, 8)},
        s=resource(base, records),
        memory=memory,
    )
    assert (data[: (last + 1) * size] == 0).all()
    assert (data[(last + 1) * size :] == np.arange(1, 1025, dtype=np.uint8)[(last + 1) * size :]).all()


def test_buffer_offset_beyond_2_gib_vanishes():
    """What Triton relies on: a masked lane's offset is 0x80000000 and passes no bound."""
    memory, (base,) = mapped(np.full(64, 9, U))
    offsets = np.where(LANES % 2, U(0x80000000), LANES.astype(U) * U(4)).astype(U)
    text = "buffer_load_dword v4, v0, s[8:11], 0 offen"
    b = run(text, v={0: offsets}, s=resource(base, 0x7FFFFFFE), memory=memory)
    assert b.v[4, 0].tolist() == [0 if lane % 2 else 9 for lane in range(64)]


def test_buffer_within_its_bound_but_outside_the_tensor_faults():
    memory, (base,) = mapped(np.full(64, 9, U))
    with pytest.raises(MemoryFault):
        run("buffer_load_dword v4, v0, s[8:11], 0 offen", v={0: U(256)}, s=resource(base, 0x7FFFFFFE), memory=memory)


def test_buffer_scalar_and_instruction_offset():
    data = np.arange(64, dtype=U)
    memory, (base,) = mapped(data)
    text = "buffer_load_dword v4, off, s[8:11], s3 offset:16"
    b = run(text, s=resource(base, 256) | {3: U(40)}, memory=memory)
    assert (b.v[4] == 14).all()
    assert (run(text, s=resource(base, 56) | {3: U(40)}, memory=memory).v[4] == 0).all()


def test_loads_to_lds():
    data = np.arange(256, dtype=U)
    memory, (base,) = mapped(data)
    m0 = {124: U(64)}
    address = base + (63 - LANES).astype(U64) * U64(4)
    b = run("global_load_lds_dword v[2:3], off", v={2: address}, s=m0, memory=memory)
    assert (b.local.data.view(U)[16:80] == 63 - LANES).all()
    b = run("buffer_load_dword v0, s[8:11], 0 offen offset:8 lds", v={0: LANES.astype(U) * U(4)},
            s=resource(base, 200) | m0, memory=memory)  # fmt: skip
    expected = np.where(LANES * 4 + 12 <= 200, LANES + 2, 0)
    assert (b.local.data.view(U)[18:82] == expected).all()
    b = run("buffer_load_dwordx4 v0, s[8:11], 0 offen lds", arch="gfx950", lds=1 << 17,
            v={0: LANES.astype(U) * U(16)}, s=resource(base, 1024) | {124: U(0x10000)}, memory=memory)  # fmt: skip
    assert (b.local.data.view(U)[0x4000 : 0x4000 + 256] == data).all()


def test_scalar_loads():
    data = np.arange(64, dtype=U)
    memory, (base,) = mapped(data)
    b = run("s_load_dwordx4 s[4:7], s[0:1], 0x10\ns_load_dwordx2 s[12:13], s[0:1], s2 offset:0x4",
            s={0: U64(base), 2: U(8)}, memory=memory)  # fmt: skip
    assert b.s[0, 4:8].tolist() == [4, 5, 6, 7] and b.s[0, 12:14].tolist() == [3, 4]
    b = run("s_buffer_load_dwordx2 s[4:5], s[8:11], 0xc", s=resource(base, 16), memory=memory)
    assert b.s[0, 4:6].tolist() == [3, 0]
    with pytest.raises(MemoryFault):
        run("s_load_dwordx2 s[4:5], s[0:1], 0xfc", s={0: U64(base)}, memory=memory)


def test_a_scalar_load_may_widen_to_its_dword():
    memory, (base,) = mapped(np.arange(64, dtype=np.uint8))
    memory.storages[0].windows = [(0, 5)]
    assert run("s_load_dword s4, s[0:1], 0x4", s={0: U64(base)}, memory=memory).s[0, 4] & 0xFF == 4
    with pytest.raises(MemoryFault):
        run("s_load_dword s4, s[0:1], 0x8", s={0: U64(base)}, memory=memory)


def test_scratch_belongs_to_a_lane():
    text = "scratch_store_dwordx2 off, v[0:1], off offset:16\nscratch_load_dword v4, off, s2 offset:4"
    b = run(text, v={0: LANES, 1: LANES + 100}, s={2: U(16)}, waves=2)
    assert (b.v[4] == LANES + 100).all()
    with pytest.raises(MemoryFault, match="scratch"):
        run("scratch_load_dword v4, off, off offset:64")


ATOMICS = [  # name, start, operands of four lanes on one address, values seen, end
    ("add", 10, [1, 2, 3, 4], [10, 11, 13, 16], 20),
    ("sub", 10, [1, 2, 3, 4], [10, 9, 7, 4], 0),
    ("smax", 0xFFFFFFFF, [0xFFFFFFF0, 5, 3, 9], [0xFFFFFFFF, 0xFFFFFFFF, 5, 5], 9),
    ("smin", 3, [7, 0xFFFFFFFE, 1, 2], [3, 3, 0xFFFFFFFE, 0xFFFFFFFE], 0xFFFFFFFE),
    ("umax", 5, [4, 0xFFFFFFFE, 1, 2], [5, 5, 0xFFFFFFFE, 0xFFFFFFFE], 0xFFFFFFFE),
    ("umin", 5, [4, 0xFFFFFFFE, 1, 2], [5, 4, 4, 1], 1),
    ("and", 0xFF, [0xF0, 0x3C, 0xFF, 0x18], [0xFF, 0xF0, 0x30, 0x30], 0x10),
    ("or", 1, [2, 4, 4, 8], [1, 3, 7, 7], 15),
    ("xor", 1, [1, 3, 3, 8], [1, 0, 3, 0], 8),
    ("swap", 1, [2, 3, 4, 5], [1, 2, 3, 4], 5),
    ("inc", 1, [2, 2, 2, 9], [1, 2, 0, 1], 2),
    ("dec", 1, [5, 5, 5, 5], [1, 0, 5, 4], 3),
]
LOCAL_NAMES = {"smax": "max_{}_i32", "smin": "min_{}_i32", "umax": "max_{}_u32", "umin": "min_{}_u32",
               "and": "and_{}_b32", "or": "or_{}_b32", "xor": "xor_{}_b32", "swap": "wrxchg_{}_b32"}  # fmt: skip


@pytest.mark.parametrize(("name", "start", "operands", "seen", "end"), ATOMICS)
def test_atomics(name, start, operands, seen, end):
    values = np.resize(np.array(operands, U), 64)
    offsets = (LANES // 4 * 4).astype(U)
    for form in ("global", "buffer", "local", "wide", "silent"):
        data = np.full(16, start, U)
        memory, (base,) = mapped(data)
        given = {0: offsets, 1: values}
        if form == "global":
            b = run(f"global_atomic_{name} v2, v0, v1, s[0:1] sc0", v=given, s={0: U64(base)}, memory=memory)
        elif form == "silent":
            b = run(f"global_atomic_{name} v0, v1, s[0:1]", v=given, s={0: U64(base)}, memory=memory)
        elif form == "buffer":
            b = run(f"buffer_atomic_{name} v1, v0, s[8:11], 0 offen sc0\nv_mov_b32 v2, v1", v=given,
                    s=resource(base, 64), memory=memory)  # fmt: skip
        elif form == "wide":
            if name in ("smax", "smin"):
                continue  # these numbers are negative in 32 bits only
            data = np.full(16, start, U64)
            memory, (base,) = mapped(data)
            b = run(f"global_atomic_{name}_x2 v[2:3], v0, v[4:5], s[0:1] sc0",
                    v={0: offsets * U(2), 4: values, 5: U(0)}, s={0: U64(base)}, memory=memory)  # fmt: skip
        else:
            mnemonic = "ds_" + LOCAL_NAMES.get(name, f"{name}_{{}}_u32").format("rtn")
            b = run(f"ds_write_b32 v0, v3\n{mnemonic} v2, v0, v1", v=given | {3: U(start)})
            data = b.local.data.view(U)[:16]
        assert (data == end).all(), form
        if form != "silent":
            assert (b.v[2, 0].reshape(16, 4) == seen).all(), form


def test_compare_and_swap():
    data = np.zeros(16, U)
    memory, (base,) = mapped(data)
    given = {0: (LANES // 4 * 4).astype(U), 4: LANES + 1, 5: np.where(LANES % 4 == 1, 99, 0).astype(U)}
    b = run("global_atomic_cmpswap v2, v0, v[4:5], s[0:1] sc0", v=given, s={0: U64(base)}, memory=memory)
    first = LANES // 4 * 4 + 1
    assert (data == first[::4]).all()  # lane 0 of four finds 0; the others do not
    assert (b.v[2, 0] == np.where(LANES % 4 == 0, 0, first)).all()
    b = run("ds_write_b32 v0, v3\nds_cmpst_rtn_b32 v2, v0, v5, v4", v=given | {3: U(0)})
    assert (b.local.data.view(U)[:16] == first[::4]).all()


def test_float_atomics():
    data = np.zeros(16, np.float32)
    memory, (base,) = mapped(data)
    run("global_atomic_add_f32 v0, v1, s[0:1]", v={0: (LANES // 4 * 4).astype(U), 1: np.float32(0.5)}, s={0: U64(base)},
        memory=memory)  # fmt: skip
    assert (data == 2.0).all()
    halves = np.zeros(2, np.float16)
    memory, (base,) = mapped(halves)
    one = np.float16([1, 0.5]).view(U)[0]
    run("global_atomic_pk_add_f16 v0, v1, s[0:1]", v={0: U(0), 1: one}, s={0: U64(base)}, memory=memory)
    assert halves.tolist() == [64, 32]


def test_buffer_atomic_out_of_bounds_vanishes():
    data = np.zeros(64, U)
    memory, (base,) = mapped(data)
    run(
        "buffer_atomic_add v1, v0, s[8:11], 0 offen",
        v={0: LANES.astype(U) * U(4), 1: U(1)},
        s=resource(base, 128),
        memory=memory,
    )
    assert data.tolist() == [1] * 32 + [0] * 32
