"""Finds LDS races: one wave reads what another wrote, or overwrites what another read, with no barrier between.

Only words of 32 bits are watched, and atomics are left out. Words that several waves write between two barriers
(the same value, in compiled code) are not checked when they are read.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .errors import Race

SEVERAL = -2
Indices = NDArray[np.int64]


class Watch:
    """Who wrote and who read each word of the LDS last, and between which barriers."""

    def __init__(self, words: int) -> None:
        self.epoch = 0  # barriers so far: all workgroups that run together pass them together
        self.written, self.read = (np.full(words, -1, np.int32) for _ in range(2))
        self.writer, self.reader = (np.full(words, -1, np.int64) for _ in range(2))

    def loads(self, words: Indices, wave: Indices) -> None:
        """words [n, words each], wave [n]."""
        wave = np.broadcast_to(wave[:, None], words.shape)
        writer = self.writer[words]
        bad = (self.written[words] == self.epoch) & (writer != wave) & (writer != SEVERAL)
        self._refuse(bad, words, wave, writer, "reads LDS word {} that wave {} has written")
        self._mark(self.read, self.reader, words, wave)

    def stores(self, words: Indices, wave: Indices) -> None:
        wave = np.broadcast_to(wave[:, None], words.shape)
        reader = self.reader[words]
        bad = (self.read[words] == self.epoch) & (reader != wave)
        self._refuse(bad, words, wave, reader, "writes LDS word {} that wave {} has read")
        self._mark(self.written, self.writer, words, wave)

    def forget(self, words: Indices) -> None:
        """Parts of words, and atomics: no longer known who wrote them."""
        self.written[words], self.writer[words] = self.epoch, SEVERAL

    def _mark(self, epochs, owners, words: Indices, wave: Indices) -> None:
        shared = (epochs[words] == self.epoch) & (owners[words] != wave)
        owners[words] = np.where(shared, SEVERAL, wave)
        epochs[words] = self.epoch
        clash = owners[words] != wave  # another wave of this very instruction
        owners[words[clash]] = SEVERAL

    @staticmethod
    def _refuse(bad, words, wave, owner, text: str) -> None:
        if bad.any():
            first = tuple(place[0] for place in np.nonzero(bad))
            whose = "another" if owner[first] == SEVERAL else owner[first]
            raise Race(f"wave {wave[first]} {text.format(words[first], whose)}, with no barrier between")
