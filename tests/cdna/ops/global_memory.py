"""Loads, stores and atomics through 64-bit addresses (global_*, flat_*), scratch and scalar loads."""

from __future__ import annotations

import numpy as np

from ..errors import MemoryFault, UnknownInstruction
from ..operand import Place, place, scalar, vector
from ..wave import SCALARS
from .atomics import GLOBAL
from .loads import Form, active, flat
from .local import landing

U64 = np.uint64


def _address(ins, program, texts):
    """Reads addresses [waves, 64] from `vaddr, saddr` or, for flat access, `vaddr` alone."""
    offset = U64(ins.number("offset") & 0xFFFFFFFFFFFFFFFF)
    base = texts[1] if len(texts) > 1 else "off"
    if base == "off":
        get = vector(texts[0], "u64", program)
        return lambda b: get(b) + offset
    low, high = vector(texts[0], "u32", program), vector(base, "u64", program)
    return lambda b: high(b) + low(b).astype(U64) + offset


def load(ins, program):
    form, where = Form(ins.name.partition("_load_")[2]), place(ins.operands[0], program)
    address = _address(ins, program, ins.operands[1:])

    def run(b):
        lanes = active(b)
        form.write(b, where, lanes, b.memory.load(flat(address(b), b, lanes), form.size))

    return run


def store(ins, program):
    form, where = Form(ins.name.partition("_store_")[2]), place(ins.operands[1], program)
    address = _address(ins, program, (ins.operands[0], *ins.operands[2:]))

    def run(b):
        lanes = active(b)
        b.memory.store(flat(address(b), b, lanes), form.read(b, where, lanes))

    return run


def load_to_lds(ins, program):
    """global_load_lds: lane l's data goes to LDS at M0 + offset + l * size."""
    suffix = ins.name.partition("_load_lds_")[2]
    address, size = _address(ins, program, ins.operands), Form(suffix).size
    target = landing(program, ins.number("offset"), size)

    def run(b):
        lanes = active(b)
        data = b.memory.load(flat(address(b), b, lanes), size)
        b.local.store(b, lanes, target(b), data)

    return run


def atomic(ins, program):
    """Operands: the old value where sc0 asks for it, address, data, base."""
    dtype, operation = GLOBAL[ins.name.partition("_atomic_")[2]]
    returns = ins.flag("sc0") or ins.flag("glc")
    operands = ins.operands if returns else (None, *ins.operands)
    address = _address(ins, program, (operands[1], *operands[3:]))
    result = place(operands[0], program) if returns else None
    return atomic_runner(address, place(operands[2], program), result, dtype, operation)


def atomic_runner(address, data: Place, result: Place | None, dtype, operation):
    words = dtype.itemsize // 4

    def run(b):
        lanes = active(b)
        picked = b.v[data.index : data.index + data.count]
        picked = picked[:, lanes] if lanes is not None else picked.reshape(data.count, -1)
        values = np.ascontiguousarray(picked.T).view(dtype)
        values = values[:, 0] if data.count == words else values
        old = b.memory.atomic(flat(address(b), b, lanes), values, operation, result is not None)
        if result is not None:
            Form("dword" if words == 1 else "dwordx2").write(b, result, lanes, old.view(np.uint8).reshape(len(old), -1))

    return run


def scratch(ins, program):
    """scratch_load d, vaddr, saddr and scratch_store vaddr, data, saddr: bytes of the lane's own."""
    loading = "_load_" in ins.name
    form = Form(ins.name.split("_load_" if loading else "_store_")[1])
    texts = ins.operands[1:] if loading else (ins.operands[0], ins.operands[2])
    where = place(ins.operands[0 if loading else 1], program)
    gets = [vector(text, "u32", program) for text in texts if text != "off"]
    offset = ins.number("offset")

    def run(b):
        lanes = active(b)
        start = sum((np.asarray(get(b), np.int64) for get in gets), np.zeros(b.mask.shape, np.int64)) + offset
        size = b.scratch.shape[2]
        start, base = flat(start, b, lanes), np.arange(b.mask.size).reshape(b.mask.shape)
        if ((start < 0) | (start + form.size > size)).any():
            raise MemoryFault(f"scratch access outside {size} bytes a lane")
        index = (flat(base, b, lanes) * size + start)[:, None] + np.arange(form.size)
        if loading:
            form.write(b, where, lanes, b.scratch.reshape(-1)[index])
        else:
            b.scratch.reshape(-1)[index] = form.read(b, where, lanes)

    return run


def scalar_load(ins, program):
    """s_load and s_buffer_load: the same address for a whole wave. A dword needs one allowed byte."""
    count = int(ins.name.partition("dword")[2].lstrip("x") or 1)
    target, base = place(ins.operands[0], program), place(ins.operands[1], program)
    offset = scalar(ins.operands[2], "u32", program)
    extra, buffered = ins.number("offset"), "buffer" in ins.name
    if target.index + count > SCALARS:
        raise UnknownInstruction("a scalar load past the last register")

    def run(b):
        shift = offset(b).view(np.int32).astype(np.int64) + extra
        start = b.pair(base.index)
        if buffered:
            start = start & U64(0xFFFFFFFFFFFF)
            records = b.s[:, base.index + 2].astype(np.int64)
        address = start + shift.view(U64) & ~U64(3)
        for k in range(count):
            if not buffered:
                data = b.memory.load(address + U64(4 * k), 4, partial=True)
                b.s[:, target.index + k] = data.view(np.uint32)[:, 0]
                continue
            ok = shift + 4 * k + 4 <= records
            data = np.zeros(b.count, np.uint32)
            data[ok] = b.memory.load((address + U64(4 * k))[ok], 4, partial=True).view(np.uint32)[:, 0]
            b.s[:, target.index + k] = data

    return run


BUILDERS = {}
_SIZES = [*(f"dword{n}" for n in ("", "x2", "x3", "x4"))]
_SMALL = ["ubyte", "sbyte", "ushort", "sshort"]
_PARTS = [f"{kind}_d16{part}" for kind in ("ubyte", "sbyte", "short") for part in ("", "_hi")]
LOADS, STORES = _SIZES + _SMALL + _PARTS, [*_SIZES, "byte", "short", "byte_d16_hi", "short_d16_hi"]
for _space, _load, _store in (("global", load, store), ("flat", load, store), ("scratch", scratch, scratch)):
    BUILDERS |= {f"{_space}_load_{size}": _load for size in LOADS}
    BUILDERS |= {f"{_space}_store_{size}": _store for size in STORES}
for _space in ("global", "flat"):
    BUILDERS |= {f"{_space}_atomic_{name}": atomic for name in GLOBAL}
BUILDERS |= {f"global_load_lds_{size}": load_to_lds for size in ("dword", "dwordx3", "dwordx4")}
for _n in ("", "x2", "x3", "x4", "x8", "x16"):
    BUILDERS |= {f"s_load_dword{_n}": scalar_load, f"s_buffer_load_dword{_n}": scalar_load}
