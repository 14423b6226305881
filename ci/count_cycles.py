"""Counts what one iteration of the scoring kernel's main loop costs on AMD, from machine code, without a GPU.

    python ci/count_cycles.py [--arch gfx942 gfx950] [--heads 64 32] [--dim 128] [--json]

Every shipped choice (native encodings, and OCP operands reread on gfx942) is compiled for each target with the
Triton that is installed. A wave's matrix cycles are FLOP / (FLOP per clock of a SIMD); vector cycles are 4 per
wave64 instruction, packed ones counted once. The two pipes can overlap between waves, so the larger bounds the loop.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from portable_indexer.backends.triton_common import scoring, scoring_kernel
from portable_indexer.backends.triton_common.runtime import triton_version
from portable_indexer.backends.triton_rocm import launch

# fp8 FLOP per clock of one SIMD.
FLOP_PER_CLOCK = {"gfx942": 1024, "gfx950": 2048}
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


def main_loop(text: str) -> list[str]:
    """The instructions of the innermost loop with the most matrix instructions."""
    lines = text.splitlines()
    labels = {m.group(1): at for at, line in enumerate(lines) if (m := re.match(r"(\.LBB\d+_\d+):", line))}
    spans: list[tuple[int, int]] = []
    for at, line in enumerate(lines):
        branch = re.search(r"s_c?branch\S*\s+(\.LBB\d+_\d+)", line)
        if branch and labels.get(branch.group(1), at) < at:
            spans.append((labels[branch.group(1)], at))
    matrix = {span: sum("v_mfma" in line for line in lines[span[0] : span[1]]) for span in spans}
    spans = [span for span in spans if matrix[span]]
    inner = [a for a in spans if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    if not inner:
        return []
    first, last = max(inner, key=lambda span: matrix[span])
    return lines[first : last + 1]


def count(compiled: Any, arch: str) -> dict[str, Any]:
    """Cycles, instruction counts and resources of one compiled kernel."""
    text = compiled.asm["amdgcn"]
    ops: Counter[str] = Counter()
    matrix_cycles = 0.0
    for line in main_loop(text):
        code = line.split(";")[0].strip()
        if not code or code.startswith(".") or code.endswith(":"):
            continue
        op = code.split()[0]
        ops[op] += 1
        shape = re.match(r"v_mfma_(?:scale_)?f32_(\d+)x(\d+)x(\d+)_(\w+)", op)
        if shape:
            m, n, k = (int(part) for part in shape.groups()[:3])
            halves = 2 if shape.group(4) in ("f16", "bf16") else 1
            matrix_cycles += halves * 2 * m * n * k / FLOP_PER_CLOCK[arch]
    vector = sum(n for op, n in ops.items() if op.startswith("v_") and not op.startswith("v_mfma"))

    def resource(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", text)
        return int(found.group(1)) if found else -1

    return {
        "matrix_ops": sorted({op for op in ops if op.startswith("v_mfma")}),
        "matrix_cycles": int(matrix_cycles),
        "vector_cycles": 4 * vector,
        "ratio": round(4 * vector / matrix_cycles, 3) if matrix_cycles else None,
        "lds_instructions": sum(n for op, n in ops.items() if op.startswith("ds_")),
        "memory_instructions": sum(n for op, n in ops.items() if op.startswith(("buffer_", "global_"))),
        "barriers": ops["s_barrier"],
        "vgpr": resource("vgpr_count"),
        "agpr": resource("agpr_count"),
        "sgpr": resource("sgpr_count"),
        # Vector registers spill to memory, scalar ones to lanes of a vector register.
        "spills": resource("vgpr_spill_count"),
        "scalar_spills": resource("sgpr_spill_count"),
        "lds": compiled.metadata.shared,
        "ops": dict(ops.most_common()),
    }


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
    " lds_instructions memory_instructions barriers vgpr agpr sgpr spills scalar_spills lds"
).split()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=["gfx942", "gfx950"], choices=sorted(FLOP_PER_CLOCK))
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
