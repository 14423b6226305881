"""Launching one kept compiled kernel, without looking at the arguments' values again.

Triton's own launch derives a cache key from every argument at every call. A kernel that is specialised on
nothing has one variant, so the key is always the same and the compiled kernel can be called directly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.runtime import driver

from portable_indexer.backends.triton_common.runtime import interpreting


class _Call(NamedTuple):
    """How a launcher's C function is called: with the grid, the stream, ``middle`` and the arguments."""

    function: Callable[..., Any]
    middle: tuple[Any, ...]
    spread: bool  # each argument by itself, or all as one tuple


def _call_of(compiled: Any, count: int) -> _Call:
    """The call that launches a loaded kernel of ``count`` parameters.

    Triton's launcher is Python around a C function. What it adds to grid, stream and arguments never changes, so
    it is asked for that once, by a call that launches nothing. Where it does more (scratch memory by the size of
    the grid, say) or looks otherwise than expected, the launcher itself is what is called.
    """
    run, constant = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)
    whole = _Call(run, constant, True)
    function = getattr(run, "launch", None)
    if function is None:
        return whole
    calls: list[tuple[Any, ...]] = []
    asked = copy(run)
    asked.launch = lambda *given: calls.append(given)
    place, arguments = tuple(object() for _ in range(4)), tuple(object() for _ in range(count))
    try:
        asked(*place, *constant, *arguments)
    except TypeError:  # it calculates with the grid
        return whole
    if len(calls) != 1 or place[0] not in calls[0]:
        return whole
    at = calls[0].index(place[0])
    before, middle = calls[0][:at], calls[0][at + len(place) :]
    if before:
        function = partial(function, *before)
    if calls[0][at : at + len(place)] == place and middle[-1] == arguments:
        return _Call(function, middle[:-1], False)
    if calls[0][at : at + len(place)] == place and middle[-count:] == arguments:
        return _Call(function, middle[:-count], True)
    return whole


class LoadedKernel:
    """A compiled kernel, loaded on one GPU."""

    def __init__(self, compiled: Any, index: int, constants: tuple[int, ...]) -> None:
        compiled._init_handles()  # loads the module, which may not happen inside a capture
        self._compiled, self._index, self._constants = compiled, index, constants
        self._function, self._middle, self._spread = _call_of(compiled, len(compiled.src.fn.arg_names))
        self._stream_of = driver.active.get_current_stream
        self._current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

    def launch(self, grid: tuple[int, int], *arguments: int) -> None:
        """Launch on the GPU's current stream.

        ``arguments`` are integers: addresses, of tensors that the caller has checked, and values.
        """
        self.start(grid, arguments)

    def start(self, grid: tuple[int, int], arguments: tuple[int, ...]) -> None:
        """``launch`` with the arguments as one tuple."""
        index, runtime = self._index, knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if self._current_device() != index:
            with torch.cuda.device(index):
                self.start(grid, arguments)
        elif (enter is None or not enter.calls) and (leave is None or not leave.calls):
            # Tuples are added, not unpacked into a new one: half the time.
            head = (grid[0], grid[1], 1, self._stream_of(index)) + self._middle  # noqa: RUF005
            arguments = arguments + self._constants
            self._function(*(head + arguments if self._spread else (*head, arguments)))
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
