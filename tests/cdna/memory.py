"""A sparse 64-bit address space that holds nothing but the tensors of one launch.

Every storage gets a terabyte of its own, so an offset that is wrong by 2^31 or 2^32 elements, or that
runs off the end, always lands where nothing is and is reported. Addresses keep the low 12 bits of the
real ones: alignment is what the kernel was specialised for. Pages of a large tensor are the operating
system's, see sparse.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import MemoryFault
from .ops.atomics import apply

SLOT = 40  # log2 of the bytes between storages; 7 bits above it fit a buffer descriptor's 48
MAX_STORAGES = 126
Addresses = NDArray[np.uint64]


@dataclass
class Storage:
    """The bytes behind one or more tensors, and the parts of them that the launch was given."""

    name: str
    base: int  # fake address of data[0]
    data: NDArray[np.uint8]
    windows: list[tuple[int, int]]  # byte ranges, sorted and disjoint

    def __post_init__(self) -> None:
        self._views: dict[int, NDArray] = {1: self.data}
        for size, kind in ((2, np.uint16), (4, np.uint32), (8, np.uint64)):
            if self.data.ctypes.data % size == 0:
                self._views[size] = self.data[: len(self.data) // size * size].view(kind)

    def allow(self, start: int, stop: int) -> None:
        """Adds a byte range to the windows, merging what overlaps."""
        merged: list[tuple[int, int]] = []
        for low, high in sorted([*self.windows, (start, stop)]):
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        self.windows = merged

    def inside(self, offset: NDArray[np.int64], size: int, partial: bool) -> NDArray[np.bool_]:
        """Where [offset, offset + size) is allowed; `partial`: where any byte of it is."""
        need_low, need_high = (1 - size, 1) if partial else (0, size)
        ok = np.zeros(offset.shape, bool)
        for low, high in self.windows:
            ok |= (offset >= low + need_low) & (offset + need_high <= high)
        return ok

    def view(self, offset: NDArray[np.int64], unit: int):
        """(array of `unit`-byte numbers, indices) for aligned offsets, else None."""
        if unit in self._views and not (offset & (unit - 1)).any():
            return self._views[unit], offset >> (unit.bit_length() - 1)
        return None


class Memory:
    """Finds storages by address; reads and writes arrays of bytes."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []

    def add(self, name: str, data: NDArray[np.uint8], windows: list[tuple[int, int]]) -> Storage:
        """Maps the bytes `data` of a storage; returns where."""
        if len(self.storages) >= MAX_STORAGES:
            raise ValueError(f"a launch may name at most {MAX_STORAGES} storages")
        base = (len(self.storages) + 1 << SLOT) + (data.ctypes.data & 0xFFF)
        self.storages.append(Storage(name, base, data, sorted(windows)))
        return self.storages[-1]

    def _groups(self, address: Addresses, size: int, partial: bool = False):
        """Yields (storage, rows, offsets): all accesses, checked, storage by storage."""
        slots = (address >> np.uint64(SLOT)).astype(np.int64)
        first = int(slots[0]) if len(slots) else 0
        uniform = bool((slots == first).all())
        for slot in [first] if uniform else np.unique(slots).tolist():
            rows = slice(None) if uniform else np.nonzero(slots == slot)[0]
            if not len(address):
                return
            if not 1 <= slot <= len(self.storages):
                raise self._fault(address[rows][0], size)
            storage = self.storages[slot - 1]
            offset = (address[rows] - np.uint64(storage.base)).view(np.int64)
            inside = storage.inside(offset, size, partial)
            if not inside.all():
                raise self._fault(address[rows][~inside][0], size)
            yield storage, rows, offset

    def _fault(self, address, size: int) -> MemoryFault:
        slot = min(max(int(address) >> SLOT, 1), len(self.storages) or 1)
        near = "nothing is mapped"
        if self.storages:
            storage = self.storages[slot - 1]
            spans = ", ".join(f"[{low}, {high})" for low, high in storage.windows)
            near = f"nearest: {storage.name}, byte {int(address) - storage.base}, allowed {spans}"
        return MemoryFault(f"{size} bytes at {int(address):#x} belong to no tensor of the launch ({near})")

    def load(self, address: Addresses, size: int, partial: bool = False) -> NDArray[np.uint8]:
        """uint8 [n, size] from n addresses."""
        out = np.empty((len(address), size), np.uint8)
        for storage, rows, offset in self._groups(address, size, partial):
            unit = size & -size if size <= 8 else size & -size & 12 or 8
            unit = min(unit, 4) if size > 4 else unit
            if found := storage.view(offset, unit):
                array, index = found
                if size > unit:
                    index = index[:, None] + np.arange(size // unit)
                    # The last number of a partial read may end past the storage.
                    index = np.minimum(index, len(array) - 1) if partial else index
                values = array.take(index).reshape(len(offset), -1)
                out[rows] = values.view(np.uint8)
            else:
                index = offset[:, None] + np.arange(size)
                out[rows] = storage.data.take(index.clip(0, len(storage.data) - 1) if partial else index)
        return out

    def store(self, address: Addresses, data: NDArray[np.uint8]) -> None:
        """Writes uint8 [n, size] to n addresses; the last of equal addresses stays."""
        size = data.shape[1]
        for storage, rows, offset in self._groups(address, size):
            unit = min(size & -size, 4)
            part = np.ascontiguousarray(data[rows])
            if found := storage.view(offset, unit):
                array, index = found
                values = part.view(array.dtype)
                array[index[:, None] + np.arange(size // unit)] = values
            else:
                storage.data[offset[:, None] + np.arange(size)] = part

    def atomic(self, address: Addresses, data: NDArray, operation, returns: bool):
        """`operation(old, data)` at each address in order; the old values where `returns`.

        data is [n] or, for compare-and-swap, [n, 2] of the operation's own dtype.
        """
        kind = data.dtype
        old = np.empty(len(address), kind)
        for storage, rows, offset in self._groups(address, kind.itemsize):
            found = storage.view(offset, kind.itemsize)
            if found is None:
                raise MemoryFault(f"an atomic of {kind.itemsize} bytes is not aligned in {storage.name}")
            before = apply(found[0].view(kind), found[1], data[rows], operation, returns)
            if returns:
                old[rows] = before
        return old if returns else None
