"""A pytest plugin that puts the executor under any test: the shared contract suite, for one.

CDNA_ARCH=gfx942 PORTABLE_INDEXER_TEST_BACKEND=triton_rocm PYTHONPATH=tests pytest -p cdna.plugin tests/test_scoring.py
"""

from __future__ import annotations

import os

import pytest

from .driver import VARIABLE, activate, arch_from_environment, deactivate


def pytest_configure(config: pytest.Config) -> None:
    arch = arch_from_environment()
    if arch is None or os.environ.get("TRITON_INTERPRET") == "1":
        raise pytest.UsageError(f"the executor needs {VARIABLE}=gfx942 or gfx950, and TRITON_INTERPRET unset")
    config.stash[DRIVER] = activate(arch)


def pytest_report_header(config: pytest.Config) -> str:
    return f"kernels are compiled for {config.stash[DRIVER].arch} and executed by NumPy"


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    driver = config.stash[DRIVER]
    terminalreporter.write_line(
        f"executor, {driver.arch}: {sum(driver.launches.values())} launches, {driver.workgroups} workgroups, "
        f"{driver.instructions:.3g} wave instructions"
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    deactivate()


DRIVER = pytest.StashKey()
