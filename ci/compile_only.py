"""A stand-in for a GPU's driver that compiles kernels for any target and launches nothing.

With it active, the package's own launch paths run as they would on a GPU, tensors in host memory, and every
kernel variant that they reach is compiled by Triton and recorded. No GPU is needed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


def target_of(arch: str) -> GPUTarget:
    """Triton's target of an architecture name: gfx942, gfx1250, sm_90, ..."""
    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch[3:]), 32)
    return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)


class _Utils:
    """What Triton asks of a device before it launches: no limit, so that the audit can judge instead."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 30, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 64}

    def load_binary(self, name: str, binary: Any, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024

    def unload_module(self, module: int) -> None:
        return None


class CompileOnlyDriver(DriverBase):  # type: ignore[misc]
    """Drives a GPU that is not there: compiled kernels are kept, launches do nothing."""

    def __init__(self, target: GPUTarget) -> None:
        super().__init__()
        self.target = target
        self.utils = _Utils()
        self.launcher_cls = lambda source, metadata: lambda *arguments, **options: None

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., Any]:
        raise RuntimeError("nothing runs under this driver")

    def get_device_interface(self) -> Any:
        raise RuntimeError("nothing runs under this driver")

    def get_empty_cache_for_benchmark(self) -> Any:
        raise RuntimeError("nothing runs under this driver")

    def clear_cache(self, cache: Any) -> None:
        return None


@dataclass(frozen=True)
class Compiled:
    """One compiled variant: the kernel's name, its compile-time values, its parameters' types and the result."""

    name: str
    constants: dict[str, Any]
    signature: dict[str, str]
    kernel: Any


class Recorder:
    """Records each kernel that Triton compiles, and ends the process where one takes too long."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.functions: dict[int, Any] = {}
        self._timer: threading.Timer | None = None
        knobs.runtime.jit_cache_hook = self._before
        knobs.runtime.jit_post_compile_hook = self._after

    def _before(self, *, fn: Any, compile: dict[str, Any], **rest: Any) -> bool:
        name = getattr(fn, "name", "kernel")

        def give_up() -> None:
            print(f"compiling {name} took more than {self.limit_s:.0f} s", flush=True)
            os._exit(124)

        self.functions[id(fn.jit_function)] = fn.jit_function
        self._timer = threading.Timer(self.limit_s, give_up)
        self._timer.daemon = True
        self._timer.start()
        return False

    def _after(self, *, fn: Any, compile: dict[str, Any], key: Any, **rest: Any) -> bool:
        if self._timer is not None:
            self._timer.cancel()
        return False

    def compiled(self) -> list[Compiled]:
        """All variants so far, in the order of compilation within each kernel."""
        found = []
        for function in self.functions.values():
            for cache, *_ in function.device_caches.values():
                for kernel in cache.values():
                    source = kernel.src
                    constants = {
                        function.arg_names[path[0]]: value for path, value in source.constants.items() if len(path) == 1
                    }
                    found.append(Compiled(function.__name__, constants, dict(source.signature), kernel))
        return found


def activate(arch: str, limit_s: float = 60.0) -> Recorder:
    """Make this process compile for ``arch``; its kernels are then found in the recorder."""
    triton.runtime.driver.set_active(CompileOnlyDriver(target_of(arch)))
    return Recorder(limit_s)
