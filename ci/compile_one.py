"""Compiles what ``warmup`` compiles for one architecture under the installed Triton: a child of compile_matrix.py.

    python ci/compile_one.py gfx942 --shapes 64,128,2048 32,128,2048 --limit 60

Prints one JSON line for each kernel variant, or a line with "error".
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from typing import Any

import compile_only
import machine_code


def describe(constants: dict[str, Any]) -> str:
    """Compile-time values as one word a value: the name of a launch choice and variant."""
    return " ".join(f"{name}={value}" for name, value in constants.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch")
    parser.add_argument("--shapes", nargs="+", required=True, help="heads,dim,topk")
    parser.add_argument("--limit", type=float, default=60, help="seconds that one compile may take")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    recorder = compile_only.activate(options.arch, options.limit)

    import torch
    import triton

    from portable_indexer import registry

    amd = options.arch.startswith("gfx")
    backend = registry._load("triton_rocm" if amd else "triton_cuda")
    common = {"triton": triton.__version__, "arch": options.arch}
    code = 0
    for shape in options.shapes:
        heads, dim, topk = (int(part) for part in shape.split(","))
        begin = time.monotonic()
        try:
            backend.warmup(torch.device("cpu"), heads, dim, topk)
        except Exception as error:
            traceback.print_exc()
            print(
                json.dumps({**common, "shape": shape, "error": f"{type(error).__name__}: {error}"}),
                flush=True,
            )
            code = 1
        print(f"{options.arch} {shape}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    for found in recorder.compiled():
        resources = (
            machine_code.amd_resources(found.kernel, options.arch)
            if amd
            else machine_code.nvidia_resources(found.kernel)
        )
        row = {**common, "kernel": found.name, "choice": describe(found.constants), **resources}
        row["warps"] = found.kernel.metadata.num_warps
        row["types"] = ",".join(sorted(set(found.signature.values()) - {"constexpr"}))
        print(json.dumps(row), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
