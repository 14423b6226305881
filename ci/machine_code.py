"""Reads what a compiler made of a kernel: resources, instruction counts of the main loop, kinds of memory access."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

# FLOP per clock of one SIMD (CDNA3: 1,024 for fp8, half for 16-bit; CDNA4 twice that; CDNA2 has no fp8 unit).
FP8_FLOP_PER_CLOCK = {"gfx90a": 1024, "gfx942": 1024, "gfx950": 2048}
# LDS of one compute unit, or shared memory that one program may take, in bytes.
LDS_LIMIT = {"gfx90a": 65_536, "gfx942": 65_536, "gfx950": 163_840, "gfx1250": 327_680}
SHARED_LIMIT = 232_448
# Registers of one SIMD lane on CDNA: VGPR and AGPR together, handed out in steps of 8, at most 8 waves.
CDNA_REGISTERS, CDNA_STEP, CDNA_WAVES = 512, 8, 8

_LABEL = re.compile(r"^(\.LBB\d+_\d+):")
_BRANCH = re.compile(r"\bs_c?branch\S*\s+(\.LBB\d+_\d+)")
_MATRIX = re.compile(r"v_mfma_(?:scale_)?f32_(\d+)x(\d+)x(\d+)_(\w+)")


def main_loop(text: str) -> list[str]:
    """Instructions of the innermost loop with the most matrix instructions, else of the longest innermost loop."""
    lines = text.splitlines()
    labels = {match[1]: at for at, line in enumerate(lines) if (match := _LABEL.match(line))}
    loops = []
    for at, line in enumerate(lines):
        branch = _BRANCH.search(line)
        if branch and labels.get(branch[1], at) < at:
            loops.append((labels[branch[1]], at))

    def matrix(loop: tuple[int, int]) -> int:
        return sum("v_mfma" in line or "v_wmma" in line for line in lines[loop[0] : loop[1]])

    # A branch back over the epilogue, too, makes no inner loop of what lies between.
    loops = [loop for loop in loops if matrix(loop)] or loops
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    begin, end = max(inner, key=lambda loop: (matrix(loop), loop[1] - loop[0]), default=(0, -1))
    return [code for line in lines[begin : end + 1] if (code := _code(line))]


def _code(line: str) -> str:
    code = line.partition(";")[0].strip()
    return "" if code.startswith(".") or code.endswith(":") else code


def loop_cycles(text: str, arch: str) -> dict[str, Any]:
    """Static counts of one iteration of the main loop of one wave.

    Matrix cycles are FLOP / rate, vector cycles 4 for each wave64 instruction (packed ones count once).
    """
    ops = Counter(code.split()[0] for code in main_loop(text))
    matrix = 0.0
    for op, times in ops.items():
        shape = _MATRIX.match(op)
        if shape:
            m, n, k = (int(part) for part in shape.groups()[:3])
            slower = 2 if shape[4].startswith(("f16", "bf16")) else 1
            matrix += times * slower * 2 * m * n * k / FP8_FLOP_PER_CLOCK.get(arch, 1024)
    vector = 4 * sum(n for op, n in ops.items() if op.startswith("v_") and not op.startswith(("v_mfma", "v_wmma")))
    return {
        "matrix_ops": sorted(op for op in ops if op.startswith(("v_mfma", "v_wmma", "v_swmmac"))),
        "matrix_cycles": round(matrix),
        "vector_cycles": vector,
        "lds_instructions": sum(n for op, n in ops.items() if op.startswith("ds_")),
        "barriers": ops["s_barrier"],
        "memory_instructions": sum(n for op, n in ops.items() if op.startswith(("buffer_", "global_", "flat_"))),
        "ops": dict(ops.most_common()),
    }


def whole_buffer_access(ttgir: str) -> list[str]:
    """Kernel arguments that a buffer instruction addresses from their first byte, so with 32-bit offsets only."""
    arguments = set(re.findall(r"%(\w+): !tt\.ptr", ttgir.partition("tt.func public")[2].partition("\n")[0]))
    bases = re.findall(r"amdg(?:pu)?\.buffer_\w+ [^\n]*?%(\w+)\[", ttgir)
    return sorted(arguments & set(bases))


def amd_resources(kernel: Any, arch: str) -> dict[str, Any]:
    """Registers, spills, scratch, LDS and occupancy (waves a SIMD) from the kernel's metadata."""
    text = kernel.asm["amdgcn"]

    def field(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", text)
        return int(found[1]) if found else 0

    vgpr, agpr = field("vgpr_count"), field("agpr_count")
    lds = int(kernel.metadata.shared)
    waves = CDNA_WAVES
    if arch.startswith("gfx9"):
        # .vgpr_count of a unified register file includes the accumulators.
        used = max(vgpr, agpr, 1)
        waves = min(waves, CDNA_REGISTERS // (-(-used // CDNA_STEP) * CDNA_STEP))
        if lds:
            per_program = kernel.metadata.num_warps / 4
            waves = min(waves, int(LDS_LIMIT[arch] // lds * per_program))
    return {
        "vgpr": vgpr,
        "agpr": agpr,
        "sgpr": field("sgpr_count"),
        "spills": field("vgpr_spill_count"),
        # Into lanes of a VGPR, not into memory, unless scratch says otherwise.
        "sgpr_spills": field("sgpr_spill_count"),
        "scratch": field("private_segment_fixed_size"),
        "lds": lds,
        "waves_per_simd": waves,
        "whole_buffer": whole_buffer_access(kernel.asm["ttgir"]),
        **loop_cycles(text, arch),
    }


@lru_cache(maxsize=1)
def _cuobjdump() -> str | None:
    import triton

    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return str(bundled) if bundled.exists() else shutil.which("cuobjdump")


def nvidia_resources(kernel: Any) -> dict[str, Any]:
    """Registers, local memory (spills and stack) and shared memory; matrix instructions by name in the PTX."""
    ptx = kernel.asm["ptx"]
    ops = Counter(re.findall(r"\b(wgmma\.mma_async\S+|mma\.sync\S+|tcgen05\.mma\S*)", ptx))
    found = {"registers": None, "scratch": None}
    tool = _cuobjdump()
    if tool:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=False)
        usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report.stdout + report.stderr))
        if usage:
            found = {"registers": int(usage["REG"]), "scratch": int(usage["STACK"]) + int(usage["LOCAL"])}
    return {**found, "lds": int(kernel.metadata.shared), "matrix_ops": sorted(ops)}
