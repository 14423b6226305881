"""Runs the CPU test suite: ``make test``.

A process either interprets Triton kernels, or compiles them, or does neither; so the contract
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
CONTRACT = ["tests/test_scoring", "tests/test_selection", "tests/test_metadata", "tests/test_pool"]
COUNTED = ("passed", "failed", "skipped", "error", "errors", "xfailed", "xpassed")


def contract_files() -> list[str]:
    return sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").glob("test_*.py")
        if str(path.relative_to(ROOT)).startswith(tuple(CONTRACT))
    )


def runs() -> list[tuple[str, dict[str, str], list[str]]]:
    """Name, environment and pytest arguments of each run."""
    interpreted = {"TRITON_INTERPRET": "1"}
    return [
        (
            "reference, planner, exchange, commands",
            {},
            ["tests", "--ignore=tests/cdna", "--ignore=tests/vllm"],
        ),
        *(
            (f"{name}, interpreted", {**interpreted, "PORTABLE_INDEXER_TEST_BACKEND": name}, contract_files())
            for name in ("triton_rocm", "triton_cuda")
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default=os.environ.get("PYTEST_WORKERS", str(min(4, os.cpu_count() or 1))))
    parser.add_argument("--slow", action="store_true", help="also run the tests marked slow")
    options = parser.parse_args()
    totals = dict.fromkeys(COUNTED, 0)
    worst = 0
    for name, environment, arguments in runs():
        print(f"--- {name}", flush=True)
        begin = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            options.workers,
            "--dist",
            "loadfile",
            *arguments,
        ]
        if not options.slow:
            command += ["-m", "not slow"]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        print(done.stdout, end="", flush=True)
        for count, word in re.findall(rf"(\d+) ({'|'.join(COUNTED)})\b", done.stdout.rstrip().rpartition("\n")[2]):
            totals[word] += int(count)
        worst = max(worst, done.returncode)
        print(f"--- {name}: exit {done.returncode}, {time.monotonic() - begin:.0f} s", flush=True)
    failed = totals["failed"] + totals["error"] + totals["errors"]
    print(f"{totals['passed']} passed, {failed} failed, {totals['skipped']} skipped")
    return worst


if __name__ == "__main__":
    sys.exit(main())
