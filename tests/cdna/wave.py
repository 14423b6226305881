"""The state of waves that run in lockstep: registers, execution mask, scratch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LANES = 64
VCC, M0, EXEC = 106, 124, 126
SCALARS = 128
# A quiet NaN as a float, a huge number as an integer: whoever reads it unwritten, shows it.
POISON = 0x7FD5A5A5


class Batch:
    """`count` waves at one program counter.

    v       uint32 [registers, count, 64]   vector registers, accumulation registers last
    s       uint32 [count, 128]             scalar registers; VCC at 106, M0 at 124, EXEC at 126
    scc     bool [count]
    mask    bool [count, 64]                EXEC, unpacked; `full` where all lanes are on
    wave    int [count]                     index into the launch: orders atomics, names faults
    lds     int [count]                     where the workgroup's LDS starts
    scratch uint8 [count, 64, bytes]
    memory, local                           global memory and LDS, shared by all batches of a launch
    """

    def __init__(self, v, s, scc, wave, lds, scratch, pc: int, memory, local) -> None:
        self.v: NDArray[np.uint32] = v
        self.s: NDArray[np.uint32] = s
        self.scc: NDArray[np.bool_] = scc
        self.wave: NDArray[np.int64] = wave
        self.lds: NDArray[np.int64] = lds
        self.scratch: NDArray[np.uint8] = scratch
        self.pc, self.memory, self.local = pc, memory, local
        self.count = len(wave)
        self.vi, self.vf = v.view(np.int32), v.view(np.float32)
        self.vh, self.vb = v.view(np.uint16), v.view(np.uint8)
        self.si, self.sf = s.view(np.int32), s.view(np.float32)
        self.s64, self.s8 = s.view(np.uint64), s.view(np.uint8)
        self.exec_changed()

    @classmethod
    def fresh(cls, registers: int, scratch: int, wave, lds, memory, local) -> Batch:
        """Waves at the entry of a kernel, everything poisoned, all lanes on."""
        count = len(wave)
        v = np.full((registers, count, LANES), POISON, np.uint32)
        s = np.full((count, SCALARS), POISON, np.uint32)
        s[:, EXEC : EXEC + 2] = 0xFFFFFFFF
        private = np.full((count, LANES, scratch), 0xA5, np.uint8)
        return cls(v, s, np.zeros(count, bool), np.asarray(wave), np.asarray(lds), private, 0, memory, local)

    def exec_changed(self) -> None:
        """Call after a write to EXEC."""
        self.mask = self.bits(EXEC)
        self.full = bool(self.mask.all())

    def bits(self, index: int) -> NDArray[np.bool_]:
        """A scalar register pair as one boolean a lane, [count, 64]."""
        packed = self.s8[:, 4 * index : 4 * index + 8]
        return np.unpackbits(packed, axis=1, bitorder="little").view(bool)

    def set_bits(self, index: int, lanes: NDArray[np.bool_]) -> None:
        """Writes one boolean a lane to a scalar register pair."""
        if lanes.shape != self.mask.shape:
            lanes = np.broadcast_to(lanes, self.mask.shape)
        self.s8[:, 4 * index : 4 * index + 8] = np.packbits(lanes, axis=1, bitorder="little")
        if index == EXEC:
            self.exec_changed()

    def pair(self, index: int) -> NDArray[np.uint64]:
        """A scalar register pair as one number a wave, [count]."""
        if index % 2 == 0:
            return self.s64[:, index // 2]
        return self.s[:, index] | (self.s[:, index + 1].astype(np.uint64) << np.uint64(32))

    def set_pair(self, index: int, value) -> None:
        value = np.asarray(value, np.uint64)
        self.s[:, index] = value & np.uint64(0xFFFFFFFF)
        self.s[:, index + 1] = value >> np.uint64(32)
        if index == EXEC:
            self.exec_changed()

    def select(self, rows) -> Batch:
        """A copy with only the waves that `rows` picks."""
        return Batch(
            np.ascontiguousarray(self.v[:, rows]), self.s[rows].copy(), self.scc[rows].copy(),
            self.wave[rows], self.lds[rows], self.scratch[rows].copy(), self.pc, self.memory, self.local,
        )  # fmt: skip

    @classmethod
    def join(cls, parts: list[Batch]) -> Batch:
        """All waves of `parts`, which must stand at one program counter, in launch order."""
        order = np.argsort(np.concatenate([p.wave for p in parts]), kind="stable")
        v = np.concatenate([p.v for p in parts], axis=1)[:, order]

        def gather(name: str):
            return np.concatenate([getattr(p, name) for p in parts])[order]

        fields = (gather(name) for name in ("s", "scc", "wave", "lds", "scratch"))
        return cls(np.ascontiguousarray(v), *fields, parts[0].pc, parts[0].memory, parts[0].local)
