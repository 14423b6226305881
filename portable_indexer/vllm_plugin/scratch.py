"""Scratch that the plugin keeps: made in vLLM's profiling run, so that vLLM counts it before it sizes its cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable_indexer.workspace import Workspace

if TYPE_CHECKING:
    import torch

_held: dict[tuple[torch.device, int], Workspace] = {}


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
    """The workspace of this device and its current stream, at least ``nbytes`` large; None for 0 bytes."""
    import torch

    if nbytes <= 0:
        return None
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (device, stream)
    held = _held.get(key)
    if held is None or held.nbytes < nbytes:
        held = _held[key] = Workspace(device, nbytes)
    return held
