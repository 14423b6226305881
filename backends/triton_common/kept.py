"""Launching one kept compiled kernel, without looking at the arguments' values again.

Triton's own launch derives a cache key from every argument at every call. A kernel that is specialised on
nothing has one variant, so the key is always the same and the compiled kernel can be called directly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver


class KeptKernel:
    """One variant of a ``@triton.jit`` function whose parameters are all in ``do_not_specialize``.

    Args:
        function: the function; its constexpr parameters come last.
        constants: values of the constexpr parameters, in order.
        num_warps: waves or warps of a program.
    """

    def __init__(self, function: Any, constants: Mapping[str, int], num_warps: int) -> None:
        self.function = function
        self._constants = dict(constants)
        self._values = tuple(constants.values())
        self._options = {"num_warps": num_warps, "enable_fp_fusion": False}
        self._compiled: dict[int, Any] = {}
        self._stream_of: Any = None

    def compile(self, device: torch.device, *arguments: Any) -> None:
        """Compile for a GPU unless that is done; ``arguments`` only lend their types."""
        index = device.index
        if index in self._compiled:
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a graph is being captured and a kernel is not compiled yet: call warmup() before")
        with torch.cuda.device(index):
            compiled = self.function.warmup(*arguments, **self._constants, grid=(1,), **self._options)
            # Loads the module now: it may not be loaded inside a capture.
            compiled._init_handles()
        self._stream_of = driver.active.get_current_stream
        self._compiled[index] = compiled

    def kept_on(self, device: torch.device) -> bool:
        """Whether the kernel is compiled and loaded for this device."""
        return device.type == "cuda" and device.index in self._compiled

    def launch(self, grid: tuple[int, int], device: torch.device, *arguments: int) -> None:
        """Launch a kept kernel on the device's current stream.

        ``arguments`` are integers: addresses, of tensors that the caller has checked, and values.
        """
        index = device.index
        if torch.cuda.current_device() == index:
            self._launch(grid, index, arguments)
        else:
            with torch.cuda.device(index):
                self._launch(grid, index, arguments)

    def _launch(self, grid: tuple[int, int], index: int, arguments: tuple[int, ...]) -> None:
        kernel = self._compiled[index]
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        if _is_empty(enter) and _is_empty(leave):
            head = (*grid, 1, self._stream_of(index), kernel.function, kernel.packed_metadata)
            kernel.run(*head, None, None, None, *arguments, *self._values)
        else:  # a profiler listens
            whole = (grid[0], grid[1], 1)
            kernel[whole](*arguments, *self._values)

    def launch_tensors(self, grid: tuple[int, int], device: torch.device, *arguments: Any) -> None:
        """Launch with tensors for addresses: compiles first on a GPU; elsewhere it is Triton's own launch.

        Host tensors are right in the interpreter, and under a driver that runs kernels on host memory.
        """
        if device.type == "cuda":
            self.compile(device, *arguments)
            self.launch(grid, device, *(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments))
        else:
            self.function[grid](*arguments, **self._constants, **self._options)


def _is_empty(hook: Any) -> bool:
    """Whether a launch hook of Triton, a chain of functions or None, has nothing to call."""
    return hook is None or getattr(hook, "calls", True) == []
