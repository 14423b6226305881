"""A step's groups of requests on the device, where a launch cannot take them all by value."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from portable_indexer.step_metadata import INLINE_GROUPS

PINNED_TABLES = 8


class GroupTable:
    """The groups of a step on the device, for the rare step that has too many to pass by value.

    Pinned copies go round: one is written again only after its last transfer, ``PINNED_TABLES`` such steps
    ago, has ended.
    """

    def __init__(self, max_groups: int, device: torch.device) -> None:
        self._device = device
        self._gpu = device.type == "cuda"
        with torch.inference_mode(False):
            self._words = torch.zeros(max_groups, dtype=torch.int64, device=device)
            self._pinned = [
                torch.zeros(max_groups, dtype=torch.int64, pin_memory=self._gpu) for _ in range(PINNED_TABLES)
            ]
        self._sent: list[torch.cuda.Event | None] = [None] * PINNED_TABLES
        self._next = 0

    def hold(self, words: Sequence[int]) -> torch.Tensor:
        """Send the words and return where they will be, in stream order."""
        if self._gpu and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"a captured step can have {INLINE_GROUPS} groups of requests, this one has {len(words)}: "
                "raise key_budget or logits_budget, or build it outside the graph"
            )
        slot, event = self._pinned[self._next], self._sent[self._next]
        if event is not None:
            event.synchronize()
        slot[: len(words)] = torch.tensor(words)
        target = self._words[: len(words)]
        target.copy_(slot[: len(words)], non_blocking=True)
        if self._gpu:
            event = event or torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._sent[self._next] = event
        self._next = (self._next + 1) % PINNED_TABLES
        return target
