"""Launching one kept compiled kernel, without looking at the arguments' values again.

Triton's own launch derives a cache key from every argument at every call. A kernel that is specialised on
nothing has one variant, so the key is always the same and the compiled kernel can be called directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


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
        self._num_warps = num_warps
        self._compiled: dict[int, Any] = {}

    def compile(self, device: torch.device, arguments: Sequence[Any]) -> None:
        """Compile for a GPU unless that is done; ``arguments`` only lend their types."""
        index = device.index
        if index in self._compiled:
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a graph is being captured and this kernel is not compiled yet: call warmup() before"
            )
        with torch.cuda.device(index):
            compiled = self.function.warmup(
                *arguments, **self._constants, grid=(1,), num_warps=self._num_warps, enable_fp_fusion=False
            )
            # Loads the module now: it may not be loaded inside a capture.
            compiled._init_handles()
        self._compiled[index] = compiled

    def kept_on(self, device: torch.device) -> bool:
        """Whether the kernel is compiled and loaded for this device."""
        return device.type == "cuda" and device.index in self._compiled

    def launch(self, programs: int, device: torch.device, arguments: Sequence[int]) -> None:
        """Launch ``programs`` programs of a kept kernel on the device's current stream.

        ``arguments`` are integers: addresses, of tensors that the caller has checked, and values.
        """
        kernel = self._compiled[device.index]
        if torch.cuda.current_device() == device.index:
            kernel[(programs, 1, 1)](*arguments, *self._constants.values())
        else:
            with torch.cuda.device(device.index):
                kernel[(programs, 1, 1)](*arguments, *self._constants.values())

    def launch_tensors(self, programs: int, device: torch.device, arguments: Sequence[Any]) -> None:
        """Launch with tensors for addresses: compiles first on a GPU; elsewhere it is Triton's own launch.

        Host tensors are right in the interpreter, and under a driver that runs kernels on host memory.
        """
        if device.type == "cuda":
            self.compile(device, arguments)
            addresses = (a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments)
            self.launch(programs, device, tuple(addresses))
        else:
            self.function[(programs,)](
                *arguments, **self._constants, num_warps=self._num_warps, enable_fp_fusion=False
            )
