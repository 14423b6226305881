"""Compile before serving, so that nothing compiles under load or inside a graph capture."""

from __future__ import annotations

import torch

from portable_indexer._checks import check_integer
from portable_indexer.backend import check_topk
from portable_indexer.device import detect
from portable_indexer.registry import resolve


def warmup(
    num_heads: int,
    head_dim: int,
    topk: int,
    *,
    device: torch.device | str | None = None,
    backend: str | None = None,
) -> int:
    """Compile every kernel variant that calls of this model shape can reach.

    Args:
        num_heads, head_dim, topk: the indexer's shape, as the calls will have it.
        device: where the tensors will be; None is the current GPU, or the CPU where there is none.
        backend: name of a backend; where None, ``resolve`` chooses.

    Returns:
        The number of compiled variants; 0 for a backend that compiles nothing.

    Raises:
        TypeError, ValueError: a size is no positive integer, ``topk`` is outside 1..4096, or the
            named backend cannot serve the device.
    """
    num_heads, head_dim = check_integer("num_heads", num_heads), check_integer("head_dim", head_dim)
    for name, value in (("num_heads", num_heads), ("head_dim", head_dim)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    topk = check_topk(topk)
    where = torch.device(device) if device is not None else None
    found = detect(where)
    if where is None:
        where = torch.device("cpu") if found.vendor == "cpu" else torch.device("cuda", found.index or 0)
    return resolve(found, None, backend).warmup(where, num_heads, head_dim, topk)
