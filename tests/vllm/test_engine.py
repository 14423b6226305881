"""A whole engine of vLLM's CPU build, two ranks, several prompts: ``ci/vllm/run_engine.sh`` sets it up and starts this.

Every indexer call of the run is repeated replicated, by the plugin and by vLLM's op, on the same tensors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent / "e2e"
pytestmark = pytest.mark.skipif(
    os.environ.get("PORTABLE_INDEXER_ENGINE_TEST") != "1", reason="ci/vllm/run_engine.sh runs this"
)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """For each rank, what each indexer call chose, in the same order."""
    out = tmp_path_factory.mktemp("engine")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PORTABLE_INDEXER_")} | {
        "PYTHONPATH": str(HERE),
        "PORTABLE_INDEXER_E2E": str(out),
        "PORTABLE_INDEXER_VLLM": "on",
        "PORTABLE_INDEXER_VLLM_KERNELS": "ours",
        "PORTABLE_INDEXER_SHARD": "on",
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "2400",  # interpreted kernels on a busy machine
    }
    with open(out / "log", "w") as log:
        subprocess.run(
            [sys.executable, str(HERE / "generate.py"), "2", str(out)],
            env=environment,
            stdout=log,
            stderr=log,
            timeout=3000,
        )
    if not (out / "tokens.json").exists():
        pytest.fail((out / "log").read_text()[-6000:])
    assert [len(tokens) for tokens in json.loads((out / "tokens.json").read_text())] == [2, 2, 2]
    names = sorted(path.name.removesuffix("-rank0.pt") for path in out.glob("*-rank0.pt"))
    return [[torch.load(out / f"{name}-rank{rank}.pt") for name in names] for rank in range(2)]


@pytest.mark.timeout(3600)
def test_sharded_calls_are_the_replicated_ones(calls: Any) -> None:
    sharded = 0
    for one, other in zip(*calls, strict=True):
        assert torch.equal(one["ids"], other["ids"])
        if one["sizes"] is not None:
            sharded += 1
            assert len(one["sizes"]) == 2 and min(one["sizes"]) > 0
            assert torch.equal(one["ids"], one["replicated"])
    assert sharded >= 4  # two layers, at least two steps with prompts


def test_rows_choose_among_their_keys(calls: Any) -> None:
    """The weights tell rows apart: long rows choose differently, so equal answers mean something."""
    long = [call["ids"][call["decode"] :] for call in calls[0] if call["sizes"] is not None]
    rows = torch.cat([ids[(ids >= 512).any(dim=1)] for ids in long])
    assert len(rows) > 100 and len(torch.unique(rows, dim=0)) > len(rows) // 2
