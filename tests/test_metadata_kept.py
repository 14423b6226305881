"""One variant of each metadata kernel, and a kept kernel launched as Triton would launch it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
PROBE = Path(__file__).with_name("metadata_probe.py")


@pytest.mark.parametrize("target", ["gfx942", "gfx950", "sm_90"])
def test_a_hundred_steps_compile_nothing_after_the_first(target, tmp_path):  # V09
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    # The checkout's root, for a run of the tests without an installed package.
    environment["PYTHONPATH"] = os.pathsep.join([str(PROBE.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(PROBE), target, "100"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["launches"] == 2 * 101
    assert report["first"] == report["after"] == report["final"] == [1, 1]
    assert report["same_arguments"] == {form: [True] * 4 for form in ("plain", "spread", "flag", "tuple", "scratch")}
