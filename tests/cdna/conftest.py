"""The `cdna` fixture: the stand-in driver for the architecture that CDNA_ARCH names.

Without the variable, the tests that compile are skipped and only those of single instructions run. One
process executes one architecture: the package under test looks for its device once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from .driver import VARIABLE, CdnaDriver, active, arch_from_environment


@pytest.fixture(scope="session")
def cdna_session() -> Iterator[CdnaDriver]:
    arch = arch_from_environment()
    if arch is None:
        pytest.skip(f"set {VARIABLE}=gfx942 or gfx950 to execute compiled kernels")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1: this process interprets kernels and compiles none")
    with active(arch) as driver:
        yield driver


@pytest.fixture
def cdna(cdna_session: CdnaDriver) -> CdnaDriver:
    """The active driver, its counters at zero."""
    cdna_session.reset()
    return cdna_session
