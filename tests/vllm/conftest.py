"""Jobs of real vLLM processes, each run once for all tests that look at its results.

Collected only where PORTABLE_INDEXER_VLLM_TESTS=1 says so (``make vllm-test``): they need an environment made by
ci/vllm/setup.sh.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
if os.environ.get("PORTABLE_INDEXER_VLLM_TESTS") != "1":
    collect_ignore_glob = ["*"]
if os.environ.get("PORTABLE_INDEXER_ENGINE_TEST") != "1":
    collect_ignore = ["test_engine.py"]  # needs another environment, of ci/vllm/run_engine.sh

Job = Callable[..., list[dict[str, Any]]]
# Jobs of the same ranks and settings that share their processes, since starting those takes longest.
TOGETHER = ("needles", "kpool", "cuda_op", "extras")


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """``job(name, tp, ranks=tp, **environment)``: what each rank returned and its plugin's state."""
    done: dict[Any, list[dict[str, Any]]] = {}

    def run(name: str, tp: int, ranks: int | None = None, **environment: str) -> list[dict[str, Any]]:
        names = TOGETHER if name in TOGETHER and tp == 2 else (name,)
        key = (names, tp, ranks or tp, *sorted(environment.items()))
        if key not in done:
            out = tmp_path_factory.mktemp(name) / "out"
            done[key] = _run(names, tp, ranks or tp, environment, out)
        return [entry | {"results": entry["results"][name]} for entry in done[key]]

    return run


def _run(names: tuple[str, ...], tp: int, ranks: int, environment: dict[str, str], out: Path) -> list[dict[str, Any]]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PORTABLE_INDEXER_")}
    clean |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} | environment
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = []
    for rank in range(ranks):
        arguments = [",".join(names), *map(str, (rank, ranks, tp, port, out))]
        with open(f"{out}.log{rank}", "w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(HERE / "worker.py"), *arguments], env=clean, stdout=log, stderr=log
                )
            )
    try:
        for process in processes:
            process.wait(timeout=600)
    finally:
        for process in processes:
            process.kill()
    logs = [Path(f"{out}.log{rank}").read_text() for rank in range(ranks)]
    if any(process.returncode for process in processes):
        pytest.fail("\n".join(f"rank {rank}:\n{text[-4000:]}" for rank, text in enumerate(logs)))
    found = [torch.load(f"{out}.{rank}", weights_only=False) for rank in range(ranks)]
    for entry, text in zip(found, logs, strict=True):
        entry["log"] = text
    return found
