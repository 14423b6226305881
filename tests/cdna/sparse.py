"""Tensors far larger than memory: the operating system backs a page when it is first written.

They make offsets beyond 2^31 elements cheap: a kernel that reads or writes a few rows at the far end of a
100 GiB tensor touches a few pages. Unwritten pages read as zero.
"""

from __future__ import annotations

import mmap

import torch

NO_RESERVE = 0x4000  # Linux MAP_NORESERVE


def sparse(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous CPU tensor of any size whose memory is not there until it is written."""
    count = 1
    for size in shape:
        count *= size
    size = max(count * torch.empty((), dtype=dtype).element_size(), 1)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    pages = mmap.mmap(-1, size, flags=flags)
    return torch.frombuffer(pages, dtype=torch.uint8, count=size).view(dtype)[:count].view(shape)
