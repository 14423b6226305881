"""A stand-in for a GPU driver: Triton compiles for gfx942 or gfx950 and launches on CPU tensors.

    driver = activate("gfx942")     # or arch_from_environment()
    kernel[grid](tensor, ...)       # compiled for gfx942, executed by NumPy
    driver.instructions             # wave instructions so far

It takes the place of Triton's driver until `deactivate`; code that asks Triton what the hardware is gets
the architecture named here. Works with Triton 3.6 and 3.9. A process that imported Triton with
TRITON_INTERPRET=1 interprets every kernel and never gets here.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager

from .asm import parse
from .launch import launch
from .machine import Kernel

VARIABLE = "CDNA_ARCH"
LDS = {"gfx942": 64 * 1024, "gfx950": 160 * 1024}
COMPUTE_UNITS = {"gfx942": 304, "gfx950": 256}


def arch_from_environment() -> str | None:
    """The architecture that CDNA_ARCH names, or None. Raises ValueError for one that is unknown."""
    arch = os.environ.get(VARIABLE)
    if arch and arch not in LDS:
        raise ValueError(f"{VARIABLE}={arch!r}: expected one of {sorted(LDS)}")
    return arch or None


class CdnaUtils:
    """What Triton asks of a device: its limits, and to load a binary."""

    def __init__(self, arch: str) -> None:
        self.arch = arch

    def get_device_properties(self, device: int) -> dict:
        return {
            "max_shared_mem": LDS[self.arch], "max_num_regs": 65536, "warpSize": 64, "arch": self.arch,
            "multiprocessor_count": COMPUTE_UNITS[self.arch], "sm_clock_rate": 2_100_000,
            "mem_clock_rate": 3_000_000, "mem_bus_width": 8192, "cooperativeLaunch": False,
        }  # fmt: skip

    def load_binary(self, name: str, binary: bytes, shared: int, device: int):
        """(module, function, registers, spills, most threads); the launcher finds the text by itself."""
        return name, name, 0, 0, 1024

    def unload_module(self, module) -> None:
        pass


class CdnaLauncher:
    """Runs one compiled kernel. Triton makes one for each variant that it loads."""

    def __init__(self, src, metadata) -> None:
        self.metadata = metadata
        self.names = src.fn.arg_names if hasattr(src, "fn") else list(src.signature)
        self.types = list(src.signature.values())
        scratch = [getattr(metadata, f"{kind}_scratch_size", 0) for kind in ("global", "profile")]
        if any(scratch):
            raise NotImplementedError(f"{metadata.name} asks for {scratch} bytes of scratch in global memory")
        folder = get_cache_manager(metadata.hash)
        path = folder.get_file(f"{metadata.name[:150]}.amdgcn")
        if path is None:
            raise FileNotFoundError(f"Triton's cache holds no assembly text for {metadata.name}")
        with open(path) as text:
            self.kernel = Kernel(parse(text.read()))

    def __call__(self, grid_x, grid_y, grid_z, stream, function, packed, launch_metadata, enter, leave, *args):
        driver = triton.runtime.driver.active
        pairs = zip(self.names, self.types, args, strict=True)
        values = [item for name, kind, value in pairs for item in _flatten(name, kind, value)]
        if enter is not None:
            enter(launch_metadata)
        grid, meta = (grid_x, grid_y, grid_z), self.metadata
        if min(grid) > 0:
            counters = launch(self.kernel, grid, meta.num_warps, meta.shared, values, driver.lockstep)
            driver.record(meta.name, self.kernel, counters)
        if leave is not None:
            leave(launch_metadata)


def _flatten(name: str, kind, value):
    """(name, type, value) of each kernel argument; tuples are spread, constants are compiled in."""
    if isinstance(kind, tuple):
        for place, (inner, item) in enumerate(zip(kind, value, strict=True)):
            yield from _flatten(f"{name}.{place}", inner, item)
    elif kind != "constexpr":
        yield name, kind, value


class CdnaDriver:
    """Triton's view of one MI300-class device whose memory is the host's.

    launches, instructions, workgroups: totals since the last `reset`.
    mnemonics: every instruction name in the kernels that ran.
    lockstep: False runs each wave alone to the next barrier, slower, another legal order.
    """

    launcher_cls = CdnaLauncher

    def __init__(self, arch: str, lockstep: bool = True) -> None:
        if arch not in LDS:
            raise ValueError(f"arch must be one of {sorted(LDS)}, got {arch!r}")
        self.arch, self.lockstep, self.utils = arch, lockstep, CdnaUtils(arch)
        self.mnemonics: set[str] = set()
        self.reset()

    def reset(self) -> None:
        self.instructions = self.workgroups = 0
        self.launches: Counter[str] = Counter()

    def record(self, name: str, kernel: Kernel, counters) -> None:
        self.launches[name] += 1
        self.instructions += counters.instructions
        self.workgroups += counters.workgroups
        self.mnemonics |= kernel.program.mnemonics()

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", self.arch, 64)

    def get_current_device(self) -> int:
        return sorted(LDS).index(self.arch)  # Triton keeps its kernels by this number

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return (9, 4) if self.arch == "gfx942" else (9, 5)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self):
        return torch.cpu

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    def assemble_tensormap_to_arg(self, tensormaps_info, args):
        return args

    def allocate_default_profile_scratch(self, size: int, alignment: int, stream):
        raise NotImplementedError("profiling")

    def get_benchmarker(self):
        raise NotImplementedError("the executor has no sense of time")

    def get_empty_cache_for_benchmark(self):
        raise NotImplementedError("the executor has no sense of time")


def activate(arch: str, lockstep: bool = True) -> CdnaDriver:
    """Makes `arch` the device that Triton compiles for and launches on, from now on."""
    driver = CdnaDriver(arch, lockstep)
    triton.runtime.driver.set_active(driver)
    return driver


def deactivate() -> None:
    """Gives the choice back to Triton, which looks for real hardware on the next use."""
    triton.runtime.driver._active = None


@contextlib.contextmanager
def active(arch: str, lockstep: bool = True) -> Iterator[CdnaDriver]:
    """`activate` for the length of a with block."""
    before = triton.runtime.driver._active
    try:
        yield activate(arch, lockstep)
    finally:
        triton.runtime.driver._active = before
