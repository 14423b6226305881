"""Scratch memory: one allocation that calls share, and how large it should be."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch

from portable_indexer._checks import check_integer

ALIGNMENT = 256
DEFAULT_LOGITS_MB = 512
_MOST_VIEWS = 256

Spec = tuple[tuple[int, ...], torch.dtype]


def logits_budget() -> int:
    """Bytes of logits that one chunk of rows may take: PORTABLE_INDEXER_LOGITS_MB, default 512 MiB."""
    text = os.environ.get("PORTABLE_INDEXER_LOGITS_MB", "").strip()
    if not text:
        return DEFAULT_LOGITS_MB << 20
    try:
        megabytes = int(text)
    except ValueError:
        megabytes = 0
    if megabytes < 1:
        raise ValueError(f"PORTABLE_INDEXER_LOGITS_MB must be a whole number of MiB, at least 1, got {text!r}")
    return megabytes << 20


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def spec_bytes(*specs: tuple[Sequence[int], torch.dtype]) -> int:
    """Bytes that ``Workspace.views`` takes for these (shape, dtype) pairs, alignment included."""
    return sum(_padded(math.prod(shape) * dtype.itemsize) for shape, dtype in specs)


class Workspace:
    """One allocation of ``nbytes`` on ``device``, handed out as views; nothing is freed or grown.

    Every call of ``views`` starts again at the first byte, so a workspace serves one call at a time
    and one stream: give each stream, and each of two overlapping layers, its own.
    """

    def __init__(self, device: torch.device | str, nbytes: int) -> None:
        nbytes = check_integer("nbytes", nbytes)
        if nbytes < 0:
            raise ValueError(f"nbytes must not be negative, got {nbytes}")
        size = _padded(nbytes)
        # Made under inference_mode, it could not be written outside of it.
        with torch.inference_mode(False):
            # The host's allocator aligns to less than a GPU's.
            spare = ALIGNMENT if torch.device(device).type == "cpu" else 0
            held = torch.empty(size + spare, dtype=torch.uint8, device=device)
            first = -held.data_ptr() % ALIGNMENT if spare else 0
            self._buffer = held[first : first + size]
        self._views: dict[tuple[Spec, ...], list[torch.Tensor]] = {}

    @property
    def device(self) -> torch.device:
        return self._buffer.device

    @property
    def nbytes(self) -> int:
        return self._buffer.numel()

    def views(self, *specs: tuple[Sequence[int], torch.dtype]) -> list[torch.Tensor]:
        """Contiguous, 256-byte aligned, uninitialised views, one for each (shape, dtype), side by side.

        Raises ValueError, naming both sizes, where they do not fit.
        """
        key = tuple((tuple(shape), dtype) for shape, dtype in specs)
        known = self._views.get(key)
        if known is not None:
            return list(known)
        need = spec_bytes(*key)
        if need > self.nbytes:
            raise ValueError(f"workspace of {self.nbytes} bytes is too small: this call needs {need}")
        views, offset = [], 0
        with torch.inference_mode(False):
            for shape, dtype in key:
                size = math.prod(shape) * dtype.itemsize
                views.append(self._buffer[offset : offset + size].view(dtype).view(shape))
                offset += _padded(size)
        # Every layer of a step asks for the same ones.
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        self._views[key] = views
        return list(views)


_persistent: dict[tuple[torch.device, int], Workspace] = {}
# A graph that was captured with a smaller workspace goes on using it.
_outgrown: list[Workspace] = []


def persistent_workspace(device: torch.device, nbytes: int) -> Workspace:
    """The process's own workspace of this device and its current stream, at least ``nbytes`` large.

    It is made on first use and replaced by a larger one only where a call needs more, so steady
    state allocates nothing. One that was outgrown is kept, for graphs captured with it; each is at
    least half as large again as the one before, so all together take at most three times the
    last. Engines that account for memory pass a Workspace of their own instead.
    """
    stream = 0
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
    key = (device, stream)
    held = _persistent.get(key)
    if held is None or held.nbytes < nbytes:
        if held is not None:
            _outgrown.append(held)
            nbytes = max(nbytes, held.nbytes * 3 // 2)
        held = _persistent[key] = Workspace(device, nbytes)
    return held


def workspace_bytes(
    max_rows: int,
    max_keys: int,
    topk: int,
    num_heads: int,
    head_dim: int,
    tp_size: int,
    width: int | None = None,
) -> int:
    """Bytes that an engine should reserve for one ``Workspace``, the exchange's staging included.

    Args:
        max_rows: rows of the largest step, decode and padding included.
        max_keys: keys of the longest packed K, in the unit of the keys given (tokens, entries or pools).
        topk: ids a row, 1..4096.
        num_heads, head_dim: the indexer's shape.
        tp_size: ranks of the group; 1 where nothing is exchanged.
        width: columns of the id buffer where it is wider than ``topk`` (a pitched buffer is staged).

    The logits part is bounded by PORTABLE_INDEXER_LOGITS_MB (default 512 MiB). Asks the backend that
    ``resolve`` would choose on the current device. Raises ValueError for sizes below zero or a bad ``topk``.
    """
    from portable_indexer.backend import Problem, check_topk
    from portable_indexer.device import detect
    from portable_indexer.exchange import staging_bytes
    from portable_indexer.registry import resolve

    sizes = {"max_rows": max_rows, "max_keys": max_keys, "num_heads": num_heads, "head_dim": head_dim}
    for name, value in sizes.items():
        if check_integer(name, value) < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    if check_integer("tp_size", tp_size) < 1:
        raise ValueError(f"tp_size must be at least 1, got {tp_size}")
    check_topk(topk)
    if width is not None and check_integer("width", width) < topk:
        raise ValueError(f"width must be at least topk = {topk}, got {width}")
    device = detect()
    torch_device = torch.device("cpu" if device.vendor == "cpu" else "cuda")
    fp8 = torch.float8_e4m3fnuz if device.fp8 == "fnuz" else torch.float8_e4m3fn
    problem = Problem("index_topk", torch_device, max_rows, max_keys, num_heads, head_dim, topk, fp8, fp8)
    compute = resolve(device, problem).workspace_bytes(problem, logits_budget())
    # Compute and exchange follow each other on one stream, so they share the bytes.
    return _padded(max(compute, staging_bytes(max_rows, topk, tp_size)))
