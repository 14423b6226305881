"""Compiles every kernel of the package for every target, without a GPU, and audits the machine code: ``make matrix``.

    python ci/compile_matrix.py --python 3.9=.venv/bin/python 3.6=.venv-triton36/bin/python
        [--arch gfx942] [--smoke] [--update] [--table FILE]

Targets, shapes and the time limit of one compile come from ``ci/matrix.json``; what an audited kernel may take, from
``ci/audit.json``: general limits for each architecture, and the counts that were recorded for each kernel and
launch choice. A count above its limit, or above what was recorded, fails with both numbers; ``--update`` records anew.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Counts that are recorded for each variant and must not grow.
RECORDED = (
    "vgpr",
    "agpr",
    "sgpr",
    "registers",
    "spills",
    "scratch",
    "lds",
    "vector_cycles",
    "lds_instructions",
)


def variant(row: dict[str, Any]) -> str:
    """Key of a variant in the audit's record."""
    return f"{row['kernel']} {row['choice']} [{row['types']}]"


def compiled_for(row: dict[str, Any]) -> str:
    """Architecture and Triton's version, as the audit names them: "gfx942 3.9"."""
    return f"{row['arch']} {'.'.join(row['triton'].split('.')[:2])}"


def unaligned(row: dict[str, Any]) -> bool:
    """Whether the variant serves odd offsets and strides, with narrow loads."""
    return "ALIGNED=False" in row["choice"] or "UNIT=1" in row["choice"]


def shown(row: dict[str, Any]) -> bool:
    """Whether the table shows the variant: aligned, and of the scoring kernel the common shapes and encodings."""
    choice = row["choice"]
    if row["kernel"] == "mqa_logits_kernel":
        common = any(f"H={heads} D=128" in choice for heads in (32, 64))
        return common and not unaligned(row) and "_as_half" not in choice and "=fp8 K_DECODE=fn" not in choice
    return not unaligned(row)


def judge(row: dict[str, Any], limits: dict[str, Any], recorded: dict[str, Any]) -> Iterator[str]:
    """What is wrong with one compiled kernel: each line names it and both numbers."""
    arch, version = compiled_for(row).split()
    place = f"{arch}, Triton {version}, {variant(row)}"
    rules: dict[str, Any] = {}
    for kernel in ("*", row["kernel"]):
        for where in ("*", arch, compiled_for(row)):
            rules.update(limits.get(kernel, {}).get(where, {}))
    if unaligned(row):
        rules.update(rules.get("unaligned", {}))
    for name in ("spills", "sgpr_spills", "scratch", "lds"):
        if rules.get(name) is not None and row.get(name) is not None and row[name] > rules[name]:
            yield f"{place}: {name} {row[name]}, limit {rules[name]}"
    wanted = rules.get("matrix_ops")
    if wanted and not any(op.startswith(tuple(wanted)) for op in row["matrix_ops"]):
        yield f"{place}: matrix instructions {row['matrix_ops']}, must be of {wanted}"
    ratio = rules.get("vector_per_matrix")
    native = all(word not in row["choice"] for word in ("_as_", "ALIGNED=False"))
    if ratio and native and any(f"H={heads} D=128" in row["choice"] for heads in (32, 64)):
        found = row["vector_cycles"] / max(row["matrix_cycles"], 1)
        if found > ratio:
            yield f"{place}: vector / matrix cycles {found:.2f}, limit {ratio}"
    for argument in row.get("whole_buffer", []):
        if argument in rules.get("beyond_2gib", []):
            yield f"{place}: {argument} may exceed 2 GiB and is addressed whole with 32-bit offsets"
    before = recorded.get(compiled_for(row), {}).get(variant(row))
    for name in RECORDED if before else ():
        if row.get(name) is not None and before.get(name) is not None and row[name] > before[name]:
            yield f"{place}: {name} {row[name]}, recorded {before[name]}"


def compile_target(python: str, arch: str, shapes: list[str], limit: float) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows and faults of one architecture under one Triton, from a child process."""
    command = [python, str(HERE / "compile_one.py"), arch, "--limit", str(limit), "--shapes", *shapes]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    rows, faults = [], []
    for line in done.stdout.splitlines():
        if not line.startswith("{"):
            faults.append(f"{arch}: {line}")
            continue
        row = json.loads(line)
        if "error" in row:
            faults.append(f"{arch}, Triton {row['triton']}, shape {row['shape']}: {row['error']}")
        else:
            rows.append(row)
    if done.returncode and not faults:
        faults.append(f"{arch}: exit code {done.returncode}: {done.stderr[-2000:]}")
    if not rows and not faults:
        faults.append(f"{arch}: nothing was compiled")
    return rows, faults


def jobs(
    matrix: dict[str, Any], pythons: dict[str, str], archs: list[str] | None, smoke: bool
) -> list[tuple[str, str, list[str]]]:
    """(python, architecture, shapes) of each child, the longest first."""
    found = []
    for version, python in pythons.items():
        for arch, target in matrix["targets"].items():
            if version not in target["triton"] or (archs and arch not in archs):
                continue
            if smoke and arch not in matrix["smoke"]["targets"]:
                continue
            shapes = matrix["smoke"]["shapes"] if smoke else target["shapes"]
            found += [(python, arch, [shape]) for shape in shapes] if not smoke else [(python, arch, shapes)]
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table of the audited kernels that ``shown`` picks."""
    columns = (
        "triton arch kernel choice matrix_cycles vector_cycles lds_instructions memory_instructions"
        " vgpr agpr sgpr registers waves_per_simd spills scratch lds"
    ).split()
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for row in sorted(filter(shown, rows), key=lambda row: [str(row.get(name, "")) for name in columns[:4]]):
        lines.append("| " + " | ".join("" if row.get(name) is None else str(row[name]) for name in columns) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", required=True, metavar="VERSION=PYTHON", help="a Python for each Triton")
    parser.add_argument("--arch", nargs="+")
    parser.add_argument("--smoke", action="store_true", help="the one-minute part of `make test`")
    parser.add_argument("--update", action="store_true", help="record the counts of this run")
    parser.add_argument("--table", type=Path, help="also write a Markdown table there")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    pythons = dict(entry.split("=", 1) for entry in options.python)
    matrix = json.loads((HERE / "matrix.json").read_text())["compile"]
    audit = json.loads((HERE / "audit.json").read_text())
    begin = time.monotonic()
    todo = jobs(matrix, pythons, options.arch, options.smoke)
    rows, faults = [], []
    with ThreadPoolExecutor(options.workers) as pool:
        results = [(job, pool.submit(compile_target, *job, matrix["seconds_per_compile"])) for job in todo]
        for (_, arch, shapes), result in results:
            found, wrong = result.result()
            rows += found
            faults += wrong
            print(
                f"{arch} {' '.join(shapes)}: {len(found)} kernels, {time.monotonic() - begin:.0f} s",
                flush=True,
            )
    unique = {(row["triton"], row["arch"], variant(row)): row for row in rows}
    audited = [row for row in unique.values() if matrix["targets"][row["arch"]]["audit"]]
    if options.update:
        record(audit, audited, whole=not options.smoke)
    for row in audited:
        faults += judge(row, audit["limits"], audit["recorded"])
    if options.table:
        options.table.write_text(table(audited))
    for fault in faults:
        print(fault)
    counted = f"{len(unique)} kernels compiled, {len(audited)} audited, {len(faults)} faults"
    print(f"{counted}, {time.monotonic() - begin:.0f} s")
    return int(bool(faults))


def record(audit: dict[str, Any], rows: list[dict[str, Any]], whole: bool) -> None:
    """Replace the recorded counts of what was compiled; ``whole``: what the targets have no more goes, too."""
    if whole:
        for row in rows:
            audit["recorded"].pop(compiled_for(row), None)
    for row in rows:
        place = compiled_for(row)
        counts = {name: row[name] for name in RECORDED if row.get(name) is not None}
        audit["recorded"].setdefault(place, {})[variant(row)] = counts
    for place, variants in audit["recorded"].items():
        audit["recorded"][place] = dict(sorted(variants.items()))
    text = json.dumps(audit, indent=1)
    (HERE / "audit.json").write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
