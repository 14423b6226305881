"""Fixtures of the contract suite.

The suite runs once for each backend, in a process of its own, since a Triton process either
interprets or compiles:

    pytest tests                                                      the reference
    TRITON_INTERPRET=1 PORTABLE_INDEXER_TEST_BACKEND=triton_cuda pytest tests/test_scoring.py ...
    PORTABLE_INDEXER_TEST_BACKEND=triton_cuda pytest tests            on a node with a GPU
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"


@pytest.fixture(scope="session")
def backend_name() -> str:
    """The backend under test."""
    return os.environ.get("PORTABLE_INDEXER_TEST_BACKEND", "reference")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the tensors of the contract suite are: a GPU where torch sees one, unless Triton interprets."""
    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def generator() -> torch.Generator:
    """Fresh random data in every run; a failure's seed is printed and can be set again."""
    seed = int(os.environ.get("PORTABLE_INDEXER_TEST_SEED", "0")) or int.from_bytes(os.urandom(4), "big")
    print(f"PORTABLE_INDEXER_TEST_SEED={seed}")
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder of request traces; tests that need it skip where it is absent."""
    if not TRACES.is_dir():
        pytest.skip(f"no request traces beside this checkout ({TRACES.parent.name}/{TRACES.name})")
    return TRACES


def pytest_configure(config: pytest.Config) -> None:
    """Under ``ci/run_job.py`` every pytest process leaves a JUnit report, which tells what was skipped."""
    folder = os.environ.get("PORTABLE_INDEXER_JUNIT")
    if folder and not hasattr(config, "workerinput") and not config.option.xmlpath:
        config.option.xmlpath = os.path.join(folder, f"{os.getpid()}.xml")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    needs = {
        "gpu": gpus > 0,
        "cuda_only": gpus > 0 and torch.version.hip is None,
        "rocm_only": gpus > 0 and torch.version.hip is not None,
        "multi_gpu": gpus > 1,
    }
    for item in items:
        for mark, there in needs.items():
            if not there and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=f"needs {mark}; this machine has {gpus} GPUs"))
