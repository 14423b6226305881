"""Counts what one iteration of the scoring kernel's main loop costs on AMD, from machine code, without a GPU.

    python ci/count_cycles.py [--arch gfx942 gfx950] [--heads 64 32] [--dim 128] [--json]

Every shipped choice (native encodings, and OCP operands reread on gfx942) is compiled for each target with the
Triton that is installed. A wave's matrix cycles are FLOP / (FLOP per clock of a SIMD); vector cycles are 4 per
wave64 instruction, packed ones counted once. The two pipes can overlap between waves, so the larger bounds the loop.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import machine_code
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from portable_indexer.backends.triton_common import scoring, scoring_kernel
from portable_indexer.backends.triton_common.runtime import triton_version
from portable_indexer.backends.triton_rocm import launch

ARCHS = ("gfx942", "gfx950")
POINTERS = {"scale_ptr": "*fp32", "w_ptr": "*fp32", "ks_ptr": "*i32", "ke_ptr": "*i32", "out_ptr": "*fp32"}
FP8_TYPE = {"fn": "fp8e4nv", "fnuz": "fp8e4b8"}


def signature(choice: scoring.ScoringChoice, heads: int, dim: int, encodings: tuple[str, str], variant: Any) -> Any:
    """Types and compile-time values of the kernel's parameters, as Triton's compiler takes them."""
    constants = scoring.constants(choice, heads, dim, variant)
    types: dict[str, str] = {}
    for name in scoring_kernel.mqa_logits_kernel.arg_names:
        types[name] = "constexpr" if name in constants else "i64"
    types.update(POINTERS, factor="fp32")
    q_type, k_type = (
        FP8_TYPE[encoding] if decode == "fp8" else "u8"
        for encoding, decode in zip(encodings, (choice.q_decode, choice.k_decode), strict=True)
    )
    types["q_ptr"] = "*" + q_type
    types["k_ptr"] = f"tensordesc<{k_type}[{choice.keys}, {dim}]>" if variant.descriptor else "*" + k_type
    return types, constants


def compile_choice(
    target: GPUTarget,
    choice: scoring.ScoringChoice,
    heads: int,
    dim: int,
    encodings: tuple[str, str],
    variant: Any,
) -> Any:
    """Triton's compiled kernel of one variant of a choice."""
    types, constants = signature(choice, heads, dim, encodings, variant)
    source = ASTSource(scoring_kernel.mqa_logits_kernel, signature=types, constexprs=constants)
    return triton.compile(source, target=target, options=choice.launch_options(variant))


def count(compiled: Any, arch: str) -> dict[str, Any]:
    """Cycles, instruction counts and resources of one compiled kernel, with its vector / matrix ratio."""
    found = machine_code.amd_resources(compiled, arch)
    matrix = found["matrix_cycles"]
    return {**found, "ratio": round(found["vector_cycles"] / matrix, 3) if matrix else None}


def rows_of(archs: list[str], heads: list[int], dim: int) -> list[dict[str, Any]]:
    """One row of counts for each architecture, head count, pair of encodings and variant."""
    rows = []
    for arch in archs:
        native = launch.NATIVE_FP8[arch]
        pairs = [(native, native)] + ([("fn", "fn")] if native == "fnuz" else [])
        for h in heads:
            for pair in pairs:
                choice = launch.scoring_choice(arch, triton_version(), h, dim, *pair)
                for variant in scoring.variants(choice):
                    compiled = compile_choice(GPUTarget("hip", arch, 64), choice, h, dim, pair, variant)
                    key = {"triton": triton.__version__, "arch": arch, "heads": h, "dim": dim}
                    named = {"encodings": "/".join(pair), "aligned": variant.aligned}
                    rows.append({**key, **named, **count(compiled, arch)})
                    print(f"{arch} H={h} {'/'.join(pair)} aligned={variant.aligned}", file=sys.stderr)
    return rows


COLUMNS = (
    "triton arch heads dim encodings aligned matrix_cycles vector_cycles ratio"
    " lds_instructions memory_instructions barriers vgpr agpr sgpr spills sgpr_spills lds"
).split()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=list(ARCHS), choices=ARCHS)
    parser.add_argument("--heads", nargs="+", type=int, default=[64, 32])
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--json", action="store_true", help="all counts, with every instruction of the loop")
    options = parser.parse_args()
    rows = rows_of(options.arch, options.heads, options.dim)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print("| " + " | ".join(COLUMNS) + " |")
        print("|" + " --- |" * len(COLUMNS))
        for row in rows:
            print("| " + " | ".join(str(row[column]) for column in COLUMNS) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
