"""`portable-indexer replay`: sums that can be checked by hand, and real traces."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from portable_indexer.cli import main
from portable_indexer.cli.replay import Work, simulate
from portable_indexer.policy import ShardPolicy
from portable_indexer.tuning import Costs, Exchange, packaged

COSTS = Costs(
    0.0, 10e-6, 0.0, 1e-12, 1e15, 10e-6, 2e-12, 0.0, 0.0, 2e-12, (Exchange(2, 40e-6, 1e11), Exchange(4, 50e-6, 2e11))
)
STEPS = [Work(100, 5_050), Work(8_192, 8_192 * 500_000), Work(65_536, 65_536 * 40_000), Work(32_768, 32_768 * 20_000)]


@pytest.fixture(autouse=True)
def no_user_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PORTABLE_INDEXER_TUNING", raising=False)
    monkeypatch.delenv("PORTABLE_INDEXER_SHARD", raising=False)


def test_the_sums_are_those_of_the_steps() -> None:
    policy = ShardPolicy(costs=COSTS)
    found = simulate(STEPS, "x", policy, 2, "here")
    times = [policy.estimate(rows=s.rows, pairs=s.pairs, tp_size=2) for s in STEPS]
    whole = [t.replicated_s for t in times]
    shared = [t.sharded_s or 0.0 for t in times]
    assert (found.steps, found.sharded_steps) == (4, 3)
    assert found.replicated_s == pytest.approx(sum(whole))
    assert found.policy_s == pytest.approx(whole[0] + sum(shared[1:]))
    # 65,536 rows of the step; 16,384 rows a rank is 32,768 of the step at two ranks.
    assert found.vllm_step_rows_s == pytest.approx(whole[0] + whole[1] + shared[2] + whole[3])
    assert found.vllm_rank_rows_s == pytest.approx(whole[0] + whole[1] + shared[2] + shared[3])
    assert sorted(found.by_context) == [1_024, 32_768, 65_536, 524_288]
    assert found.by_context[524_288][1:] == pytest.approx([whole[1], shared[1]])


def test_off_saves_nothing_and_unknown_ranks_neither() -> None:
    off = simulate(STEPS, "x", ShardPolicy("off", costs=COSTS), 2, "here")
    assert off.sharded_steps == 0 and off.policy_s == off.replicated_s
    unknown = simulate(STEPS, "x", ShardPolicy(costs=COSTS), 6, "here")
    assert unknown.sharded_steps == 0
    assert unknown.policy_s == unknown.vllm_step_rows_s == unknown.replicated_s


def small_trace(path: Path) -> Path:
    lines = [{"timestamp": 1000 * i, "input_length": 3_000 * (i + 1), "output_length": 3} for i in range(6)]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def replay(capsys: pytest.CaptureFixture[str], *command: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["replay", *command, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_a_small_trace_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(small_trace(tmp_path / "t.jsonl"))
    options = ("--device", "mi325x", "h200", "--tp", "4", "8", "--max-batched-tokens", "4096")
    report = replay(capsys, trace, *options)
    assert report["requests"] == 6 and report["rows"] == sum(3_000 * (i + 1) for i in range(6))
    # Causal attention of whole prompts: the pairs do not depend on how the scheduler cuts them.
    assert report["pairs"] == sum(n * (n + 1) // 2 for n in (3_000 * (i + 1) for i in range(6)))
    assert [(o["device"], o["tp_size"]) for o in report["outcomes"]] == [
        ("mi325x", 4), ("mi325x", 8), ("h200", 4), ("h200", 8)
    ]  # fmt: skip
    assert "no GPU ran" in report["note"]
    for outcome in report["outcomes"]:
        assert outcome["policy_saved"] == pytest.approx(1 - outcome["policy_s"] / outcome["replicated_s"])
        assert sum(entry["steps"] for entry in outcome["by_context"]) == outcome["steps"] == report["steps"]
        assert outcome["vllm_step_rows_saved"] == 0.0, "no step of at most 4,096 rows has 65,536"
    layers = replay(capsys, trace, *options, "--layers", "61")
    assert layers["outcomes"][0]["replicated_s"] == pytest.approx(61 * report["outcomes"][0]["replicated_s"])
    fewer = replay(capsys, trace, *options, "--heads", "32", "--compress-ratio", "4", "--topk", "512")
    assert fewer["outcomes"][0]["replicated_s"] < report["outcomes"][0]["replicated_s"] / 3


def test_the_models_error_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    tuned = packaged("h200")
    assert tuned is not None
    error = {"shapes": 12, "seen_by_the_fit": False, "median": 0.031, "worst": 0.092}
    runs = {"r": {"date": "2026-01-02", "versions": {}, "error": error}}
    monkeypatch.setattr("portable_indexer.cli.replay.tuning_for", lambda device: replace(tuned, runs=runs))
    trace = str(small_trace(tmp_path / "t.jsonl"))
    assert main(["replay", trace, "--device", "h200"]) == 0
    text = capsys.readouterr().out
    assert "on 2026-01-02: off by 3.1% in the median and 9.2% at worst over 12 shapes" in text
    assert "shapes that the fit did not see" in text
    monkeypatch.setattr("portable_indexer.cli.replay.tuning_for", lambda device: replace(tuned, runs={}))
    assert main(["replay", trace, "--device", "h200"]) == 0
    assert "never compared with a measurement" in capsys.readouterr().out


def test_a_plot_is_a_file_or_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "saved.png"
    code = main(["replay", str(small_trace(tmp_path / "t.jsonl")), "--plot", str(plot), "--quiet"])
    if importlib.util.find_spec("matplotlib") is None:
        assert code == 2 and "pip install 'portable-indexer[plot]'" in capsys.readouterr().err
    else:
        assert code == 0 and plot.read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (the extra plot)")
    plot = tmp_path / "no folder" / "saved.png"
    assert main(["replay", str(small_trace(tmp_path / "t.jsonl")), "--plot", str(plot), "--quiet"]) == 2
    assert str(plot) in capsys.readouterr().err


def test_ranks_without_numbers_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(small_trace(tmp_path / "t.jsonl")), "--device", "h200", "--tp", "4", "16"]) == 0
    assert "no numbers for an exchange among 16 ranks: every step counts as replicated" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "mi999x"], "unknown device 'mi999x'; known: "),
        (["--tp", "0"], "--tp must be at least 1"),
        (["--layers", "0"], "--layers must be at least 1"),
        (["--max-batched-tokens", "0"], "max_batched_tokens must be 1 or more"),
        (["--heads", "0"], "num_heads must be at least 1"),
        (["--limit", "0"], "limit must be an integer of 1 or more"),
    ],
)
def test_bad_options_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["replay", str(small_trace(tmp_path / "t.jsonl")), *options]) == 2
    assert message in capsys.readouterr().err


def test_bad_traces_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err
    (tmp_path / "bad.jsonl").write_text('{"timestamp": 0, "input_length": -3, "output_length": 1}\n')
    assert main(["replay", str(tmp_path / "bad.jsonl")]) == 2
    assert "bad.jsonl, line 1: input_length" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mooncake_conversation_first3000.jsonl", "azure_llm_code_first4000.csv"])
def test_real_traces(capsys: pytest.CaptureFixture[str], traces: Path, name: str) -> None:
    trace = traces / name
    report = replay(capsys, str(trace), "--device", "h200", "--tp", "4", "--limit", "300")
    (outcome,) = report["outcomes"]
    assert report["requests"] == 300 and 0 < outcome["sharded_steps"] <= outcome["steps"]
    # The policy never predicts a loss: it shards only where it predicts a saving.
    assert 0 < outcome["policy_s"] < outcome["replicated_s"] == outcome["vllm_step_rows_s"]
