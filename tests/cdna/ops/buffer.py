"""Loads, stores and atomics through a buffer descriptor (four scalar registers).

Descriptor: a 48-bit base, a stride, num_records in bytes, flags. Without an index the range check is on
bytes: an access is in bounds where offset + size <= num_records. Outside, loads give 0 and stores and
atomics vanish. An access that passes is then checked against the tensors like any other.
"""

from __future__ import annotations

import numpy as np

from ..errors import UnknownInstruction
from ..operand import place, vector, vector_writer
from .atomics import GLOBAL
from .global_memory import LOADS, STORES
from .loads import Form, active, flat
from .local import landing

U64 = np.uint64


class Access:
    """Operands `vaddr, descriptor, soffset` with their modifiers."""

    def __init__(self, ins, program, texts, size: int) -> None:
        if ins.flag("idxen"):
            raise UnknownInstruction("a buffer access with an index")
        voffset, descriptor, soffset = texts
        self.size, self.resource = size, place(descriptor, program).index
        self.voffset = vector(voffset, "u32", program) if ins.flag("offen") else None
        self.soffset = vector(soffset, "u32", program)
        self.immediate = ins.number("offset")

    def lanes(self, b):
        """(addresses [n], lanes in bounds): the lanes that touch memory, None where all do."""
        first = self.resource
        # The scalar offset moves the base: it takes no part in the range check's left side.
        offset = np.full(b.mask.shape, self.immediate, np.int64)
        if self.voffset is not None:
            offset = offset + self.voffset(b)
        soffset = np.asarray(self.soffset(b), np.int64)
        records = b.s[:, first + 2 : first + 3].astype(np.int64)
        if ((b.s[:, first + 1] >> np.uint32(31)) & np.uint32(1)).any():
            raise UnknownInstruction("a swizzled buffer")
        inside = b.mask & (offset + self.size <= records - soffset)
        base = b.pair(first) & U64(0xFFFFFFFFFFFF)
        address = base[:, None] + (offset + soffset).view(U64)
        lanes = None if inside.all() else inside
        return flat(address, b, lanes), lanes


def load(ins, program):
    form = Form(ins.name.partition("_load_")[2])
    if ins.flag("lds"):
        return _to_lds(ins, program, form.size)
    where, access = place(ins.operands[0], program), Access(ins, program, ins.operands[1:], form.size)

    def run(b):
        address, lanes = access.lanes(b)
        if lanes is not None:
            off = np.count_nonzero(b.mask)
            form.write(b, where, active(b), np.zeros((off, form.size), np.uint8))
        form.write(b, where, lanes, b.memory.load(address, form.size))

    return run


def _to_lds(ins, program, size: int):
    """buffer_load ... lds: lane l's data, 0 where out of bounds, to LDS at M0 + offset + l * size."""
    access = Access(ins, program, ins.operands, size)
    if size < 4:
        raise UnknownInstruction("a load of less than a dword to LDS")
    target = landing(program, access.immediate, size)

    def run(b):
        address, lanes = access.lanes(b)
        data = np.zeros((*b.mask.shape, size), np.uint8)
        loaded = b.memory.load(address, size)
        if lanes is None:
            data[...] = loaded.reshape(data.shape)
        else:
            data[lanes] = loaded
        b.local.store(b, active(b), target(b), data.reshape(-1, size) if b.full else data[b.mask])

    return run


def store(ins, program):
    form = Form(ins.name.partition("_store_")[2])
    where, access = place(ins.operands[0], program), Access(ins, program, ins.operands[1:], form.size)

    def run(b):
        address, lanes = access.lanes(b)
        b.memory.store(address, form.read(b, where, lanes))

    return run


def atomic(ins, program):
    """The old value replaces the data where sc0 asks for it; it is 0 out of bounds."""
    dtype, operation = GLOBAL[ins.name.partition("_atomic_")[2]]
    where, access = place(ins.operands[0], program), Access(ins, program, ins.operands[1:], dtype.itemsize)
    returns, words = ins.flag("sc0") or ins.flag("glc"), dtype.itemsize // 4
    puts = [vector_writer(f"v{where.index + k}", "u32", program) for k in range(words)] if returns else []

    def run(b):
        address, lanes = access.lanes(b)
        picked = b.v[where.index : where.index + where.count]
        picked = picked[:, lanes] if lanes is not None else picked.reshape(where.count, -1)
        values = np.ascontiguousarray(picked.T).view(dtype)
        old = b.memory.atomic(address, values[:, 0] if where.count == words else values, operation, returns)
        if not returns:
            return
        parts = old.view(np.uint32).reshape(len(old), words)
        for k, put in enumerate(puts):
            whole = np.zeros(b.mask.shape, np.uint32)
            whole[slice(None) if lanes is None else lanes] = (
                parts[:, k].reshape(b.mask.shape) if lanes is None else parts[:, k]
            )
            put(b, whole)

    return run


BUILDERS = {f"buffer_load_{size}": load for size in LOADS}
BUILDERS |= {f"buffer_store_{size}": store for size in STORES}
BUILDERS |= {f"buffer_atomic_{name}": atomic for name in GLOBAL}
