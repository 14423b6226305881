"""LDS: loads, stores, pairs, transposed loads, atomics, and the lane permutations that share its path."""

from __future__ import annotations

import re

import numpy as np

from ..errors import MemoryFault, UnknownInstruction
from ..operand import Place, place, vector, vector_writer
from ..races import Watch
from ..wave import LANES, M0, POISON
from .atomics import apply, local
from .loads import Form, active, flat

LANE = np.arange(LANES)


class Lds:
    """The LDS of all workgroups that run together, `size` bytes each, poisoned at the start."""

    def __init__(self, size: int, groups: int) -> None:
        self.size, self.stride = size, -(-size // 16) * 16
        self.words = np.full(self.stride * groups // 4, POISON, np.uint32)
        self.data = self.words.view(np.uint8)
        self.watch = Watch(len(self.words))

    def _index(self, b, lanes, address, size: int):
        address = flat(np.asarray(address, np.int64), b, lanes)
        if ((address < 0) | (address + size > self.size)).any():
            bad = address[(address < 0) | (address + size > self.size)][0]
            raise MemoryFault(f"{size} bytes at LDS address {bad}, of {self.size} bytes")
        return address + flat(b.lds[:, None], b, lanes)

    def _whole_words(self, index, size: int):
        """Word numbers [n, size / 4]; None where the access is not made of whole words."""
        if size % 4 or (index & 3).any():
            return None
        return (index >> 2)[:, None] + np.arange(size // 4)

    def load(self, b, lanes, address, size: int):
        """uint8 [n, size] for the lanes `lanes`."""
        index = self._index(b, lanes, address, size)
        words = self._whole_words(index, size)
        if words is None:
            return self.data.take(index[:, None] + np.arange(size))
        self.watch.loads(words, flat(b.wave[:, None], b, lanes))
        return self.words.take(words).view(np.uint8)

    def store(self, b, lanes, address, data) -> None:
        size = data.shape[1]
        index = self._index(b, lanes, address, size)
        words = self._whole_words(index, size)
        if words is None:
            self.data[index[:, None] + np.arange(size)] = data
            self.watch.forget((index[:, None] + np.arange(size)) >> 2)
            return
        self.watch.stores(words, flat(b.wave[:, None], b, lanes))
        self.words[words] = np.ascontiguousarray(data).view(np.uint32)

    def atomic(self, b, lanes, address, values, operation, returns: bool):
        size = values.dtype.itemsize
        index = self._index(b, lanes, address, size)
        if (index % size).any():
            raise MemoryFault("an LDS atomic that is not aligned")
        self.watch.forget((index >> 2)[:, None] + np.arange(size // 4))
        return apply(self.data.view(values.dtype), index // size, values, operation, returns)


def landing(program, offset: int, size: int):
    """Where loads past the registers land: lane l at M0 + offset + l * size. M0 counts 64 KiB, or 256."""
    keep = np.uint32(0xFFFF if program.arch.startswith("gfx94") else 0x3FFFF)
    return lambda b: (b.s[:, M0 : M0 + 1] & keep).astype(np.int64) + offset + LANE * size


def read(ins, program):
    form, where = Form(ins.name.removeprefix("ds_read_")), place(ins.operands[0], program)
    address, offset = vector(ins.operands[1], "i32", program), ins.number("offset")

    def run(b):
        lanes = active(b)
        form.write(b, where, lanes, b.local.load(b, lanes, address(b) + offset, form.size))

    return run


def write(ins, program):
    form, where = Form(ins.name.removeprefix("ds_write_")), place(ins.operands[1], program)
    address, offset = vector(ins.operands[0], "i32", program), ins.number("offset")

    def run(b):
        lanes = active(b)
        b.local.store(b, lanes, address(b) + offset, form.read(b, where, lanes))

    return run


def pair(ins, program):
    """ds_read2 / ds_write2: two places, offsets in elements, or in 64 elements for st64."""
    size = 8 if ins.name.endswith("b64") else 4
    step = size * (64 if "st64" in ins.name else 1)
    offsets = [ins.number(f"offset{k}") * step for k in (0, 1)]
    reading, form = "read2" in ins.name, Form(f"b{size * 8}")
    if reading:
        first = place(ins.operands[0], program)
        wheres = [first, Place("v", first.index + size // 4, size // 4)]
        address = vector(ins.operands[1], "i32", program)
    else:
        address, wheres = (
            vector(ins.operands[0], "i32", program),
            [place(text, program) for text in ins.operands[1:3]],
        )

    def run(b):
        lanes, start = active(b), address(b)
        if reading:  # both are read before either register is written: one may hold the address
            loaded = [b.local.load(b, lanes, start + offset, size) for offset in offsets]
            for where, data in zip(wheres, loaded, strict=True):
                form.write(b, where, lanes, data)
        else:
            for where, offset in zip(wheres, offsets, strict=True):
                b.local.store(b, lanes, start + offset, form.read(b, where, lanes))

    return run


def read_transposed(ins, program):
    """ds_read_b64_tr_bN: 16 lanes load a block of 64 / N rows by 16 columns; each lane gets a column."""
    bits = int(ins.name.rpartition("_b")[2])
    if bits not in (8, 16):
        raise UnknownInstruction(f"a transposed load of {bits}-bit elements")
    per_lane = 64 // bits
    lane, row = LANE & 15, np.arange(per_lane)[:, None]
    # Element (row, column) of the block was loaded by lane row * 16 / per_lane + column / per_lane.
    source_lane = (LANE & ~15) + row * (16 // per_lane) + lane // per_lane
    source_place = np.broadcast_to(lane % per_lane, source_lane.shape)
    form, where = Form("b64"), place(ins.operands[0], program)
    address, offset = vector(ins.operands[1], "i32", program), ins.number("offset")

    def run(b):
        if not b.full:
            raise UnknownInstruction("a transposed load with lanes off")
        data = b.local.load(b, None, address(b) + offset, 8).view(f"u{bits // 8}").reshape(b.count, LANES, per_lane)
        moved = data[:, source_lane, source_place].transpose(0, 2, 1)  # [waves, 64, per_lane]
        form.write(b, where, None, np.ascontiguousarray(moved).reshape(-1, per_lane).view(np.uint8))

    return run


def atomic(ins, program):
    dtype, operation, returns = local(ins.name)
    operands = ins.operands if returns else (None, *ins.operands)
    address, datas = vector(operands[1], "i32", program), [place(text, program) for text in operands[2:]]
    form = Form("b32" if dtype.itemsize == 4 else "b64")
    result, offset = place(operands[0], program) if returns else None, ins.number("offset")

    def run(b):
        lanes = active(b)
        values = [form.read(b, data, lanes).view(dtype)[:, 0] for data in datas]
        # Compare-and-swap names the number to compare with first.
        data = values[0] if len(values) == 1 else np.stack(values[::-1], axis=1)
        old = b.local.atomic(b, lanes, address(b) + offset, data, operation, returns)
        if result is not None:
            form.write(b, result, lanes, old.view(np.uint8).reshape(-1, dtype.itemsize))

    return run


def permute(ins, program):
    """ds_bpermute d, a, s: lane (a + offset) / 4 mod 64 of s; 0 from a lane that is off.

    ds_permute sends instead: the highest sender wins, a lane that nobody sends to gets 0.
    """
    address, value = vector(ins.operands[1], "u32", program), vector(ins.operands[2], "u32", program)
    put, offset, pulls = (
        vector_writer(ins.operands[0], "u32", program),
        ins.number("offset"),
        "bpermute" in ins.name,
    )

    def run(b):
        lane = np.broadcast_to(((address(b) + np.uint32(offset)) >> np.uint32(2)) & np.uint32(63), b.mask.shape)
        data, rows = np.broadcast_to(value(b), b.mask.shape), np.arange(b.count)[:, None]
        if pulls:
            out = data[rows, lane]
            put(b, out if b.full else np.where(b.mask[rows, lane], out, np.uint32(0)))
        else:
            out = np.zeros(b.mask.shape, np.uint32)
            for sender in range(LANES):
                on = np.nonzero(b.mask[:, sender])[0]
                out[on, lane[on, sender]] = data[on, sender]
            put(b, out)

    return run


def swizzle(ins, program):
    """ds_swizzle: within groups of 32 lanes by and/or/xor masks, or within groups of four."""
    pattern = _pattern(ins.modifiers.get("offset", "0"))
    if pattern & 0x8000:
        source = (LANE & ~3) + (np.array([pattern >> 2 * k & 3 for k in range(4)])[LANE & 3])
    else:
        within = ((LANE & 31 & pattern) | (pattern >> 5 & 31)) ^ (pattern >> 10 & 31)
        source = (LANE & 32) + within
    value, put = vector(ins.operands[1], "u32", program), vector_writer(ins.operands[0], "u32", program)
    return lambda b: put(b, np.where(b.mask[:, source], value(b)[:, source], np.uint32(0)))


def _pattern(text: str) -> int:
    if not text.startswith("swizzle("):
        return int(text, 0)
    mode, *rest = [part.strip(' "') for part in text[len("swizzle(") : -1].split(",")]
    if mode == "QUAD_PERM":
        return 0x8000 | sum(int(lane) << 2 * k for k, lane in enumerate(rest))
    if mode == "SWAP":
        return 0x1F | int(rest[0]) << 10
    if mode == "REVERSE":
        return 0x1F | (int(rest[0]) - 1) << 10
    if mode == "BROADCAST":
        return (0x1F & ~(int(rest[0]) - 1)) | int(rest[1]) << 5
    if mode == "BITMASK_PERM":
        codes = {"0": (0, 0, 0), "1": (0, 1, 0), "p": (1, 0, 0), "i": (1, 0, 1)}  # and, or, xor
        masks = [0, 0, 0]
        for k, char in enumerate(reversed(rest[0])):
            masks = [mask | bit << k for mask, bit in zip(masks, codes[char], strict=True)]
        return masks[0] | masks[1] << 5 | masks[2] << 10
    raise UnknownInstruction(f"swizzle {mode}")


BUILDERS = {f"ds_read_{size}": read for size in ("b32", "b64", "b96", "b128", "u8", "i8", "u16", "i16")}
BUILDERS |= {f"ds_read_{s}_d16{part}": read for s in ("u8", "i8", "u16") for part in ("", "_hi")}
BUILDERS |= {f"ds_write_{s}": write for s in ("b8", "b16", "b32", "b64", "b96", "b128", "b8_d16_hi", "b16_d16_hi")}
BUILDERS |= {f"ds_{op}2{st}_b{bits}": pair for op in ("read", "write") for st in ("", "st64") for bits in (32, 64)}
BUILDERS |= {"ds_bpermute_b32": permute, "ds_permute_b32": permute, "ds_swizzle_b32": swizzle}
BUILDERS |= {"ds_read_b64_tr_b16": read_transposed, "ds_read_b64_tr_b8": read_transposed}
BUILDERS["ds_nop"] = lambda ins, program: None


def find(name: str):
    """The builder of an LDS atomic, else None."""
    return atomic if name.startswith("ds_") and re.match(r"ds_[a-z]", name) and local(name) else None
