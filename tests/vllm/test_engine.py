"""Whole engines of vLLM's CPU build: ``ci/vllm/run_engine.sh`` makes the environment and starts this.

One checkpoint on disk, five prompts (four of them longer than the top-k reaches, one needle in each), five engines:
vLLM alone; the plugin on one rank and on two with this package's kernels, on two with vLLM's; and one whose
attention is kept from seeing some entries. ``e2e/checkpoint.py`` says why ranks cannot differ by rounding.
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
pytestmark = pytest.mark.timeout(3600)
TOPK = 512
ON = {"PORTABLE_INDEXER_VLLM": "on", "PORTABLE_INDEXER_SHARD": "on"}
OURS = ON | {"PORTABLE_INDEXER_VLLM_KERNELS": "ours"}
# The entries made of the first prompt's needle, and of the last one's but for its first.
FORGOTTEN = {"PORTABLE_INDEXER_E2E_FORGET": "2 3 4"}
ENGINES = {
    "stock": (1, {"PORTABLE_INDEXER_VLLM": "off"}),
    "ours, one rank": (1, OURS),
    "ours, two ranks": (2, OURS),
    "vllm's, two ranks": (2, ON),
    "forgetful": (1, {"PORTABLE_INDEXER_VLLM": "off"} | FORGOTTEN),
}
SHARDED = ["ours, two ranks", "vllm's, two ranks"]


class Run:
    """What an engine generated, and for each indexer call, in order, what each rank asked and chose."""

    def __init__(self, out: Path, ranks: int) -> None:
        self.answers = json.loads((out / "answers.json").read_text())
        self.log = (out / "log").read_text()
        self.version = (out / "version").read_text()
        self.names = sorted(path.name.removesuffix("-rank0.pt") for path in out.glob("*-rank0.pt"))
        self.calls = [[torch.load(out / f"{name}-rank{rank}.pt") for name in self.names] for rank in range(ranks)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("engine")
    sys.path.insert(0, str(HERE))
    import checkpoint

    checkpoint.write(folder / "model")
    found = {}
    for number, (name, (ranks, environment)) in enumerate(ENGINES.items()):
        out = folder / str(number)
        out.mkdir()
        _run(ranks, folder / "model", out, environment)
        found[name] = Run(out, ranks)
    return found


def _run(ranks: int, model: Path, out: Path, settings: dict[str, str]) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PORTABLE_INDEXER_")}
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), os.environ.get("PORTABLE_INDEXER_ENGINE_PATH")))),
        "PORTABLE_INDEXER_E2E": str(out),
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # all prompts are queued before the first step: one schedule
        "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": "2",  # long prompts are scored in several chunks
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "2400",  # interpreted kernels on a busy machine
    }
    with open(out / "log", "w") as log:
        subprocess.run(
            [sys.executable, str(HERE / "generate.py"), str(ranks), str(model), str(out)],
            env=clean | environment | settings,
            stdout=log,
            stderr=log,
            timeout=3000,
        )
    if not (out / "answers.json").exists():
        pytest.fail((out / "log").read_text()[-6000:])


def sets(call: dict[str, Any]) -> torch.Tensor:
    return call["ids"].sort(dim=1).values


def prefill_ids(call: dict[str, Any]) -> torch.Tensor:
    return call["ids"][call["decode"] :]


def test_it_is_this_vllm_and_each_worker_is_hooked(runs: dict[str, Run]) -> None:
    # V01
    for name, run in runs.items():
        assert run.version.startswith(os.environ.get("PORTABLE_INDEXER_ENGINE_VERSION", "0.3"))
        lines = [line for line in run.log.splitlines() if "portable_indexer, " in line]
        who = "this package's" if name.startswith("ours") else "vLLM's"
        active = f"ROCm indexer op: active: prefill rows are sharded and exchanged, scored and selected by {who}"
        hooked = {line.split("(", 1)[1].split(")", 1)[0] for line in lines if active in line}
        ranks = len(run.calls)
        workers = 0 if ENGINES[name][1]["PORTABLE_INDEXER_VLLM"] == "off" else 1 if ranks == 1 else ranks + 1
        assert len(hooked) == workers, (name, hooked)
        assert sum("sharding: mode on among 2 ranks" in line for line in lines) == (ranks if name in SHARDED else 0)


def test_two_ranks_generate_what_one_does(runs: dict[str, Run]) -> None:
    """Tokens, and the eight best log-probabilities of each, to the bit; the same as vLLM alone."""
    for name in ("ours, one rank", *SHARDED):
        assert runs[name].answers == runs["stock"].answers, name
    tokens = [answer["tokens"] for answer in runs["stock"].answers]
    assert len({token for answer in tokens for token in answer}) > len(tokens) * 3  # not one token again and again


def test_two_ranks_choose_what_one_does(runs: dict[str, Run]) -> None:
    """Every call of every layer: asked the same to the bit, and answered with the same ids in the same order."""
    one, two = runs["ours, one rank"], runs["ours, two ranks"]
    assert one.names == two.names
    for calls in zip(*one.calls, *two.calls, strict=True):
        for call in calls[1:]:
            for part in ("q", "weights", "request", "visible"):
                assert torch.equal(call[part], calls[0][part])
            assert torch.equal(call["ids"], calls[0]["ids"])


@pytest.mark.parametrize("name", ["ours, one rank", *SHARDED])
def test_vllm_alone_chooses_the_same_sets(runs: dict[str, Run], name: str) -> None:
    for ranks in runs[name].calls:
        for stock, call in zip(runs["stock"].calls[0], ranks, strict=True):
            assert torch.equal(call["q"], stock["q"]) and torch.equal(call["weights"], stock["weights"])
            assert torch.equal(sets(call), sets(stock))
            if name == "vllm's, two ranks":
                assert torch.equal(call["ids"], stock["ids"])


@pytest.mark.parametrize("name", SHARDED)
def test_the_steps_are_the_hard_ones(runs: dict[str, Run], name: str) -> None:
    """Sharded, beside decode rows, in chunks that reuse gathered keys; a chunk that is cut by a shard's end."""
    calls = runs[name].calls[0]
    sharded = [call for call in calls if call["sizes"] is not None]
    assert len(sharded) >= 8 and all(len(call["sizes"]) == 2 and min(call["sizes"]) > 0 for call in sharded)
    assert all(sum(call["sizes"]) == len(prefill_ids(call)) for call in sharded)
    assert sum(call["decode"] > 0 for call in sharded) >= 4
    assert any(True in call["chunks"] for call in sharded)
    assert all(call["sizes"] is None for call in runs["stock"].calls[0])
    assert all(call["sizes"] is None for call in runs["ours, one rank"].calls[0])


def test_rows_choose_among_their_keys(runs: dict[str, Run]) -> None:
    """Rows that see more than the top-k choose differently, so equal answers mean something."""
    for layer in ("model.layers.0.", "model.layers.1."):
        run = runs["ours, two ranks"]
        calls = [call for name, call in zip(run.names, run.calls[0], strict=True) if name.startswith(layer)]
        rows = torch.cat([call["ids"][call["visible"] > TOPK] for call in calls])
        assert len(rows) > 1000 and len(torch.unique(rows, dim=0)) > len(rows) // 2
        assert (rows.max(dim=1).values >= TOPK).all()  # none takes the first 512


@pytest.mark.parametrize("name", ["stock", "ours, one rank", *SHARDED])
def test_the_needle_stays_selected_and_is_answered(runs: dict[str, Run], name: str) -> None:
    # S10
    import checkpoint
    import generate

    run = runs[name]
    follows = checkpoint.successors()
    for (_, needle, _), answer in zip(generate.PROMPTS, run.answers, strict=True):
        assert answer["tokens"][0] == follows[needle]
    blocks = _first_blocks(run)
    chosen = 0
    for calls in run.calls:
        for call in calls:
            for length, _, start in generate.PROMPTS:
                entry = start // 4 + 1  # pools the eight tokens from start on
                rows = (call["request"] == blocks[length]) & (call["visible"] > max(entry, TOPK))
                assert (call["ids"][rows] == entry).any(dim=1).all()
                chosen += int(rows.sum())
    assert chosen > 2000 * len(run.calls)


def _first_blocks(run: Run) -> dict[int, int]:
    """The cache block by which a prompt's rows are named, by the prompt's length."""
    layer = [call for name, call in zip(run.names, run.calls[0], strict=True) if name.startswith("model.layers.0.")]
    blocks, rows = torch.unique(torch.cat([call["request"] for call in layer]), return_counts=True)
    later = len(run.answers[0]["tokens"]) - 1  # a row for each token but the last
    return {int(count) - later: int(block) for block, count in zip(blocks, rows, strict=True)}


def test_an_answer_needs_the_needles_entries(runs: dict[str, Run]) -> None:
    """The control: where attention does not see them, the answer is another; the other prompts keep theirs."""
    kept = [
        found["tokens"][0] == wanted["tokens"][0]
        for found, wanted in zip(runs["forgetful"].answers, runs["stock"].answers, strict=True)
    ]
    assert kept == [False, True, True, True, True]
