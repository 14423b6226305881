"""What Triton would do with a kernel in this process: interpret it, compile it for a GPU, or neither."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
import triton
from triton import knobs


@lru_cache(maxsize=1)
def triton_version() -> tuple[int, int]:
    """Major and minor version of the Triton that is installed."""
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def interpreting() -> bool:
    """Whether kernels of this process are interpreted (TRITON_INTERPRET=1), on CPU tensors."""
    return bool(knobs.runtime.interpret)


def target() -> tuple[str, str] | None:
    """Vendor and architecture that kernels are compiled for, such as ("amd", "gfx942") or ("nvidia", "sm_90").

    None in the interpreter, and where Triton has no driver for this machine.
    """
    facts = None if interpreting() else _facts()
    return None if facts is None else facts[0]


def runs_on(device_type: str) -> bool:
    """Whether kernels of this process can take tensors of this torch device type ("cuda", "cpu").

    CPU tensors are right in the interpreter, and under a driver that says that its tensors live there.
    """
    if interpreting():
        return device_type == "cpu"
    facts = _facts()
    return facts is not None and facts[1] == device_type


def _facts() -> tuple[tuple[str, str], str] | None:
    """Target and device type of Triton's driver; None where it has none for this machine."""
    try:
        return _facts_of(triton.runtime.driver.active)
    except RuntimeError:
        return None


@lru_cache(maxsize=4)
def _facts_of(driver: Any) -> tuple[tuple[str, str], str]:
    # Asked once for each driver, since every call of an operation wants to know.
    found = driver.get_current_target()
    amd = found.backend == "hip"
    where = ("amd", str(found.arch).partition(":")[0]) if amd else ("nvidia", f"sm_{found.arch}")
    return where, str(driver.get_active_torch_device().type)


@cache
def units(device: torch.device) -> int:
    """Compute units or SMs of a device; a small number where kernels run on the CPU."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
