"""The hardware matrix: its data, and that a job's own skipped tests fail it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("run_job", ROOT / "ci" / "run_job.py")
assert spec and spec.loader
run_job = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run_job)


def test_jobs_are_complete() -> None:
    jobs = run_job.load_jobs()
    assert {"cpu", "compile", "emulate", "mi325x", "h200"} <= set(jobs)
    makefile = (ROOT / "Makefile").read_text()
    for name, job in jobs.items():
        assert job["runs_on"] and job["commands"] and job["timeout_minutes"] > 0, name
        for command in job["commands"]:
            target = re.match(r"make ([a-z-]+)", command)
            assert target is None or re.search(rf"^{target[1]}:", makefile, re.M), command
        for allowed in job["may_skip"]:
            re.compile(allowed)


@pytest.mark.parametrize(("name", "own"), [("mi325x", "rocm_only"), ("h200", "cuda_only")])
def test_gpu_jobs_may_not_skip_their_own(name: str, own: str) -> None:
    allowed = run_job.load_jobs()[name]["may_skip"]
    for marker in ("gpu", own):
        assert not any(re.search(pattern, f"needs {marker}; this machine has 0 GPUs") for pattern in allowed)


def test_a_skipped_test_fails_the_job(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_runs(): pass\n"
        "@pytest.mark.skip(reason='needs gpu; this machine has 0 GPUs')\n"
        "def test_own(): raise AssertionError\n"
    )
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        env={"PORTABLE_INDEXER_JUNIT": str(tmp_path), "PATH": ""},
        check=True,
        capture_output=True,
        cwd=tmp_path,
    )
    reports = list(tmp_path.glob("*.xml"))
    assert len(reports) == 1
    assert run_job.judge(reports, ["needs gpu"]) == []
    (found,) = run_job.judge(reports, ["needs multi_gpu"])
    assert "test_own was skipped, which this job may not: needs gpu" in found
    (tmp_path / "test_it.py").write_text("import pytest\ndef test_own(): pytest.skip('needs gpu')\n")
    assert "no test passed" in run_job.judge([_report(tmp_path)], ["needs gpu"])


def test_only_tests_against_the_clock_get_a_second_try() -> None:
    spec = importlib.util.spec_from_file_location("run_tests", ROOT / "ci" / "run_tests.py")
    assert spec and spec.loader
    run_tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run_tests)
    clock = "FAILED tests/test_demo.py::test_a_rank_that_fails[hang-nothing was heard] - AssertionError: late"
    assert run_tests.again([clock]) == ["tests/test_demo.py::test_a_rank_that_fails"]
    assert run_tests.again([clock, "FAILED tests/test_selection.py::test_ties - AssertionError"]) == []
    assert run_tests.again(["2 passed in 1.00s"]) == []
    assert run_tests.count(["1 failed, 20 passed, 3 skipped in 2.00s"]) == {"failed": 1, "passed": 20, "skipped": 3}


def _report(folder: Path) -> Path:
    target = folder / "second" / "report.xml"
    target.parent.mkdir()
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={target}", str(folder)],
        capture_output=True,
        cwd=folder,
        check=True,
    )
    return target
