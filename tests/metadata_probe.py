"""Compiles and launches the metadata kernels for a named target under a driver that only records.

Run by test_metadata_kept.py in a process of its own, since it sets Triton's driver. Prints JSON.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

TARGETS = {
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "sm_90": GPUTarget("cuda", 90, 32),
}


FORMS = ("plain", "spread", "flag", "tuple", "scratch")


class Launcher:
    """A launcher as Triton's are: Python around a C function, here one that records.

    ``form``: arguments one by one behind the rest, the same with a flag before the grid, as one tuple behind a flag, or
    with scratch memory by the size of the grid.
    """

    def __init__(self, form: str, launches: list[tuple[Any, ...]]) -> None:
        self.form, self.calls = form, 0

        def launch(*given: Any) -> None:
            if form == "flag":
                flag, *given = given  # type: ignore[assignment]
                assert flag == "cooperative"
            if form == "tuple":
                flag, x, y, z, stream, function, packed, *hooks, given_arguments = given
                assert flag == "cooperative"
                launches.append((x, y, z, stream, function, packed, *hooks, *given_arguments))
            else:
                x, y, z, stream, function, _, scratch, *rest = given
                assert scratch == (x * y * z if form == "scratch" else None)
                launches.append((x, y, z, stream, function, *rest))

        self.launch = launch

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *arguments: Any) -> None:
        self.calls += 1
        if self.form == "tuple":
            self.launch("cooperative", x, y, z, stream, function, *arguments[:4], arguments[4:])
        else:
            scratch = x * y * z if self.form == "scratch" else None
            before = ("cooperative",) if self.form == "flag" else ()
            self.launch(*before, x, y, z, stream, function, False, scratch, *arguments)


class RecordingDriver:
    """Takes every launch and runs none."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        self.utils = self
        self.launches: list[tuple[Any, ...]] = []
        self.form = "plain"

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        if self.form == "plain":
            return lambda *launch: self.launches.append(launch)
        return Launcher(self.form, self.launches)

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return object(), name, 1, 0, 1024

    def unload_module(self, module: Any) -> None:
        pass

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 16}

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 1234

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def variants(kernel: Any) -> int:
    return len(kernel.device_caches[0][0])


def many_steps(metadata: Any, steps: int) -> None:
    """Build ``steps`` different steps: counts of 1, 16 and 17, any base alignment, any number of groups."""
    from portable_indexer.chunks import group_words
    from portable_indexer.step_metadata import INLINE_GROUPS, MetadataBuffers, StepLayout

    for number in range(steps):
        reqs = (1, 2, 15, 16, 17, 18, 32, random.randint(1, 700))[number % 8]
        rows = (0, 1, 16, 17, random.randint(1, 50))[number % 5]
        offset = random.randint(0, 3)
        starts = [rows * request for request in range(reqs + 1)]
        lens = [random.choice((1, 16, 17, random.randint(1, 1 << 20))) for _ in range(reqs)]
        decodes = random.choice((0, 1, reqs))
        words = group_words(starts[decodes:], lens[decodes:], decodes, 1 << 30, max(lens)) if decodes < reqs else ()
        layout = StepLayout(
            *(reqs, decodes, random.choice((1, 4, 16)), tuple(starts[decodes:]), words, max(lens), sum(lens[decodes:]))
        )
        buffers = MetadataBuffers.allocate(max(1, starts[-1]), reqs, 1, torch.device("cpu"))
        query = torch.zeros(reqs + 1 + offset, dtype=torch.int32)[offset:]
        table = torch.zeros(len(words), dtype=torch.int64) if len(words) > INLINE_GROUPS else None
        metadata.build_metadata(query, query[1:], layout, buffers, table)
        metadata.token_to_req_indices(query, buffers.token_to_req, random.choice((0, -1, 16)))


def same_arguments(driver: RecordingDriver, metadata: Any) -> dict[str, list[bool]]:
    """Whether a kept kernel's launcher gets what Triton's own launch gives it, for both kernels.

    With and without a hook, as a profiler sets it; and for launchers of every form.
    """
    device = torch.device("cuda", 0)
    torch.cuda.is_current_stream_capturing = lambda: False  # type: ignore[assignment]
    torch.cuda.device = contextlib.nullcontext  # type: ignore[assignment,misc]
    torch.cuda.current_device = lambda: 0
    ints, words = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int64)
    same: dict[str, list[bool]] = {}
    for driver.form in FORMS:
        for hook in (None, lambda metadata: None):
            if hook is not None:
                triton.knobs.runtime.launch_enter_hook.add(hook)
            for kept, tensors in ((metadata._MAP, (ints[1:], ints)), (metadata._STEP, (*(ints,) * 8, words))):
                if hook is None:  # loaded anew, with a launcher of this form
                    kept._loaded.clear()
                    for compiled in kept.function.device_caches[0][0].values():
                        compiled.module = compiled._run = None
                count = len(kept.function.arg_names) - len(kept._constants) - len(tensors)
                arguments = (*tensors, *(random.choice((0, 1, 16, 17, 1 << 30)) for _ in range(count)))
                driver.launches.clear()
                kept.launch_tensors((40, 3), torch.device("cpu"), *arguments)
                kept.launch_tensors((40, 3), device, *arguments)
                own, direct = driver.launches
                addresses = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in own[9:]]
                # The first nine: grid, stream, function, packed metadata, launch metadata, two hooks.
                right = list(direct[9:]) == addresses and direct[:6] == own[:6] and direct[:3] == (40, 3, 1)
                hooks = own[7:9] if hook is not None else (None, None)
                right = right and direct[7:9] == hooks
                # The Python around the C function runs only where it has something to do, or for a profiler.
                calls = getattr(kept.loaded(device)._compiled.run, "calls", 2)
                if hook is None:
                    right = right and calls == (2 if driver.form in ("plain", "scratch") else 1)
                same.setdefault(driver.form, []).append(right)
            if hook is not None:
                triton.knobs.runtime.launch_enter_hook.remove(hook)
    return same


def main(target: str, steps: int) -> None:
    driver = RecordingDriver(TARGETS[target])
    triton.runtime.driver.set_active(driver)
    from portable_indexer.backends.triton_common import metadata

    kernels = (metadata._map_kernel, metadata._step_kernel)
    many_steps(metadata, 1)
    first = [variants(kernel) for kernel in kernels]
    many_steps(metadata, steps)
    launches = len(driver.launches)
    report = {
        "first": first,
        "after": [variants(kernel) for kernel in kernels],
        "launches": launches,
        "same_arguments": same_arguments(driver, metadata),
        "final": [variants(kernel) for kernel in kernels],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
