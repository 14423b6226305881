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

from portable_indexer.backends.triton_common.runtime import interpreting


class LoadedKernel:
    """A compiled kernel, loaded on one GPU."""

    def __init__(self, compiled: Any, index: int, constants: tuple[int, ...]) -> None:
        compiled._init_handles()  # loads the module, which may not happen inside a capture
        self._compiled, self._run = compiled, compiled.run
        self._function, self._packed = compiled.function, compiled.packed_metadata
        self._index, self._constants = index, constants
        self._stream_of = driver.active.get_current_stream
        self._current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

    def launch(self, grid: tuple[int, int], *arguments: int) -> None:
        """Launch on the GPU's current stream.

        ``arguments`` are integers: addresses, of tensors that the caller has checked, and values.
        """
        index, runtime = self._index, knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if self._current_device() != index:
            with torch.cuda.device(index):
                self.launch(grid, *arguments)
        elif (enter is None or not enter.calls) and (leave is None or not leave.calls):
            head = (grid[0], grid[1], 1, self._stream_of(index), self._function, self._packed, None, None, None)
            self._run(*head, *arguments, *self._constants)
        else:  # a profiler listens
            whole = (grid[0], grid[1], 1)
            self._compiled[whole](*arguments, *self._constants)


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
        self._options = {"num_warps": num_warps, "enable_fp_fusion": False}
        self._loaded: dict[int | None, LoadedKernel] = {}

    def loaded(self, device: torch.device) -> LoadedKernel | None:
        """The kernel as loaded for a GPU; None before that, and on the host."""
        return self._loaded.get(device.index)

    def load(self, device: torch.device, *arguments: Any) -> LoadedKernel:
        """Compile and load for a GPU unless that is done; ``arguments`` only lend their types."""
        loaded = self._loaded.get(device.index)
        if loaded is not None:
            return loaded
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a graph is being captured and a kernel is not compiled yet: call warmup() before")
        with torch.cuda.device(device.index):
            compiled = self.function.warmup(*arguments, **self._constants, grid=(1,), **self._options)
            loaded = LoadedKernel(compiled, device.index, tuple(self._constants.values()))
        self._loaded[device.index] = loaded
        return loaded

    def prepare(self, device: torch.device, *arguments: Any) -> None:
        """Compile ahead of the first launch, and load where that is a GPU; the interpreter has nothing to compile."""
        if device.type == "cuda":
            self.load(device, *arguments)
        elif not interpreting():
            self.function.warmup(*arguments, **self._constants, grid=(1,), **self._options)

    def launch_tensors(self, grid: tuple[int, int], device: torch.device, *arguments: Any) -> None:
        """Launch with tensors for addresses: loads first on a GPU; elsewhere it is Triton's own launch.

        Host tensors are right in the interpreter, and under a driver that runs kernels on host memory.
        """
        if device.type == "cuda":
            addresses = (a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments)
            self.load(device, *arguments).launch(grid, *addresses)
        else:
            self.function[grid](*arguments, **self._constants, **self._options)
