"""Runs the test suites that need no GPU: ``make test``, ``make emulate``.

A process either interprets Triton kernels, or compiles them for one architecture, or does neither; so the contract
suite runs several times, each in processes of its own. Ends with one line that counts everything.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The contract suite: these run again for each Triton backend.
CONTRACT = ("test_scoring", "test_selection", "test_pools", "test_metadata")
# Of those, what looks at compiled kernels or a GPU and so says nothing new in the interpreter.
NOT_INTERPRETED = ("_kept", "_gpu")
# Tests of real processes with time limits, which a machine busy with other work may break.
AGAINST_THE_CLOCK = ("test_demo", "test_exchange", "test_agree", "test_tuning")
COUNTED = ("passed", "failed", "skipped", "error", "errors", "xfailed", "xpassed")
Run = tuple[str, dict[str, str], list[str]]


def contract_files(starts: tuple[str, ...] = CONTRACT) -> list[str]:
    """Files of the contract suite that the interpreter and the executor run."""
    return sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").glob("test_*.py")
        if path.stem.startswith(starts) and not path.stem.endswith(NOT_INTERPRETED)
    )


def interpreted(backend: str, files: list[str]) -> Run:
    """The contract suite in Triton's interpreter."""
    return f"{backend}, interpreted", {"TRITON_INTERPRET": "1", "PORTABLE_INDEXER_TEST_BACKEND": backend}, files


def executed(arch: str, files: list[str]) -> Run:
    """The contract suite on compiled ROCm code that the executor runs."""
    environment = {"CDNA_ARCH": arch, "PORTABLE_INDEXER_TEST_BACKEND": "triton_rocm", "PYTHONPATH": "tests"}
    return f"{arch} machine code, contract suite", environment, ["-p", "cdna.plugin", *files]


def test_runs() -> list[Run]:
    """Name, environment and pytest arguments of each run of ``make test``."""
    return [
        ("reference, planner, exchange, commands", {}, ["tests", "--ignore=tests/cdna", "--ignore=tests/vllm"]),
        interpreted("triton_rocm", contract_files()),
        # The kernels are the same: what differs by vendor are the choices of the scoring kernel.
        interpreted("triton_cuda", contract_files(("test_scoring", "test_pools"))),
        ("single instructions of the executor", {}, ["tests/cdna"]),
        # A smoke of `make emulate`.
        *(executed(arch, contract_files(("test_pools", "test_metadata_map"))) for arch in ("gfx942", "gfx950")),
        ("gfx942 machine code, scoring", {"CDNA_ARCH": "gfx942"}, ["tests/cdna/test_contract_scoring.py"]),
    ]


def emulate_runs() -> list[Run]:
    """The same of ``make emulate``: every suite of the executor, for each architecture."""
    return [
        ("single instructions of the executor", {}, ["tests/cdna"]),
        *((f"{arch} machine code", {"CDNA_ARCH": arch}, ["tests/cdna"]) for arch in ("gfx942", "gfx950")),
        *(executed(arch, contract_files()) for arch in ("gfx942", "gfx950")),
    ]


SUITES = {"test": test_runs, "emulate": emulate_runs}


def stream(command: list[str], environment: dict[str, str]) -> tuple[int, list[str]]:
    """Run a command, pass its output on as it comes; its exit code and the lines that it printed."""
    lines = []
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.strip():
                lines.append(line.strip())
    return process.returncode, lines


def again(lines: list[str]) -> list[str]:
    """Failed tests that deserve a second try, alone: only if all of them start real processes against the clock.

    What computes gets one try: an answer that differs from run to run is a fault.
    """
    failed = [match[1] for line in lines if (match := re.match(r"(?:FAILED|ERROR) (tests/[^\s\[]+)", line))]
    timed = failed and all(Path(name.partition("::")[0]).stem.startswith(AGAINST_THE_CLOCK) for name in failed)
    return sorted(set(failed)) if timed else []


def count(lines: list[str]) -> dict[str, int]:
    """Tests by outcome, from pytest's last line."""
    found = re.findall(rf"(\d+) ({'|'.join(COUNTED)})\b", lines[-1] if lines else "")
    return {word: int(number) for number, word in found}


def failures(counts: dict[str, int]) -> int:
    """Tests that failed or could not be set up."""
    return sum(counts.get(word, 0) for word in ("failed", "error", "errors"))


def run(environment: dict[str, str], arguments: list[str], workers: str, slow: bool) -> tuple[int, dict[str, int]]:
    """One run of pytest, and a second of what the clock may have failed; exit code and counts."""
    pytest = [sys.executable, "-m", "pytest", "-q", *([] if slow else ["-m", "not slow"])]
    everything = {**os.environ, **environment}
    code, lines = stream([*pytest, "-n", workers, "--dist", "loadfile", *arguments], everything)
    counts = count(lines)
    retried = again(lines) if code == 1 else []
    if retried:
        print(f"--- again, alone: {' '.join(retried)}", flush=True)
        code, lines = stream([*pytest, *retried], everything)
        still = failures(count(lines))
        passed = counts.get("passed", 0) + failures(counts) - still
        counts = {**counts, "failed": still, "error": 0, "errors": 0, "passed": passed}
    return code, counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=sorted(SUITES), nargs="?", default="test")
    parser.add_argument("--workers", default=os.environ.get("PYTEST_WORKERS", str(min(8, os.cpu_count() or 1))))
    parser.add_argument("--slow", action="store_true", help="also run the tests marked slow")
    options = parser.parse_args()
    totals = dict.fromkeys(COUNTED, 0)
    worst = 0
    for name, environment, arguments in SUITES[options.suite]():
        print(f"--- {name}", flush=True)
        begin = time.monotonic()
        code, counts = run(environment, arguments, options.workers, options.slow)
        for word, number in counts.items():
            totals[word] += number
        worst = max(worst, code)
        print(f"--- {name}: exit {code}, {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{totals['passed']} passed, {failures(totals)} failed, {totals['skipped']} skipped")
    return worst


if __name__ == "__main__":
    sys.exit(main())
