"""Scratch that the plugin keeps: made in vLLM's profiling run, so that vLLM counts it before it sizes its cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portable_indexer.workspace import Workspace

if TYPE_CHECKING:
    import torch


@dataclass
class _Held:
    """A device's workspace, the stream that made it, and the one that used it last; None on a CPU."""

    workspace: Workspace
    made_on: Any
    used_on: Any


_held: dict[torch.device, _Held] = {}


def exchange_bytes(buffer: torch.Tensor, width: int, tp_size: int) -> int:
    """Bytes that an exchange of ``width`` columns of any rows of ``buffer`` needs besides the buffer."""
    from portable_indexer.exchange import staging_bytes

    rows, columns = buffer.shape
    return staging_bytes(rows, width, tp_size) if needs_staging(columns, width) else 0


def needs_staging(columns: int, width: int) -> bool:
    """Contiguous rows travel in place, unless the padded exchange was chosen."""
    from portable_indexer.exchange.gather import chosen_algorithm

    return columns != width or chosen_algorithm(None) == "padded"


def scratch(device: torch.device, nbytes: int) -> Workspace | None:
    """The device's workspace for the current stream, at least ``nbytes`` large; None for 0 bytes.

    There is one for all streams: vLLM profiles, records graphs and serves on streams of their own, and counts
    only what profiling allocates. A stream that takes it over waits for what the last one has been given.
    """
    import torch

    if nbytes <= 0:
        return None
    stream: Any = torch.cuda.current_stream(device) if device.type == "cuda" else None
    held = _held.get(device)
    if held is not None and stream != held.used_on:
        stream.wait_stream(held.used_on)
        held.used_on = stream
    if held is None or held.workspace.nbytes < nbytes:
        if held is not None and held.made_on != stream:
            held.made_on.wait_stream(stream)  # its memory goes back to that stream
        held = _held[device] = _Held(Workspace(device, nbytes), stream, stream)
    return held.workspace
