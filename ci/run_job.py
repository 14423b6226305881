"""Runs one job of ``ci/matrix.json``: ``python ci/run_job.py h200``.

A job installs, runs its commands in order, and fails with the first that fails. It also fails when
a test was skipped for a reason that the job's ``may_skip`` (regular expressions) does not allow, or
when pytest ran and nothing passed: a GPU job whose own tests were skipped has tested nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]


def load_jobs(path: Path = ROOT / "ci" / "matrix.json") -> dict[str, dict[str, object]]:
    jobs: dict[str, dict[str, object]] = json.loads(path.read_text())["jobs"]
    return jobs


def judge(reports: list[Path], may_skip: list[str]) -> list[str]:
    """What is wrong with the JUnit reports of a job; empty if nothing."""
    wrong, passed = [], 0
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            skipped = case.find("skipped")
            if skipped is not None and skipped.get("type") != "pytest.xfail":
                reason = skipped.get("message") or ""
                if not any(re.search(allowed, reason) for allowed in may_skip):
                    wrong.append(f"{name} was skipped, which this job may not: {reason or 'no reason given'}")
            elif case.find("failure") is not None or case.find("error") is not None:
                wrong.append(f"{name} failed")
            else:
                passed += 1
    if reports and not passed:
        wrong.append("no test passed")
    return wrong


def main() -> int:
    jobs = load_jobs()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=sorted(jobs), nargs="?")
    parser.add_argument("--list", action="store_true", help="print the jobs as a JSON matrix and stop")
    options = parser.parse_args()
    if options.list or options.job is None:
        print(json.dumps({"include": [{"name": name, "runs_on": job["runs_on"]} for name, job in jobs.items()]}))
        return 0
    job = jobs[options.job]
    with tempfile.TemporaryDirectory() as folder:
        # pytest reads PYTEST_ADDOPTS in every process that a command starts; each writes a report of its own.
        environment = {**os.environ, **job.get("environment", {}), "PORTABLE_INDEXER_JUNIT": folder}  # type: ignore[dict-item]
        for command in [*job.get("install", []), *job["commands"]]:  # type: ignore[misc]
            print(f"+ {command}", flush=True)
            code = subprocess.run(command, shell=True, cwd=ROOT, env=environment, check=False).returncode
            if code:
                print(f"{options.job}: {command!r} ended with exit code {code}")
                return code
        wrong = judge(sorted(Path(folder).glob("*.xml")), job["may_skip"])  # type: ignore[arg-type]
    for line in wrong:
        print(f"{options.job}: {line}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
