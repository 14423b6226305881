"""`portable-indexer bench sharding`: ranks over gloo and shards by turns, and its table from known rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from portable_indexer.cli import _sharding_table, bench_sharding, main
from portable_indexer.cli._sharding_ranks import Shape

SMALL = ["--rows", "48", "--contexts", "32", "200", "--heads", "2", "--topk", "16", "--repeats", "2"]


@pytest.fixture(autouse=True)
def no_user_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PORTABLE_INDEXER_TUNING", raising=False)


def test_ranks_over_gloo_and_larger_sizes_by_turns(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "sharding", "--device", "cpu", "--ranks", "2", "3", "--pools", "1", "4", *SMALL, "--json"]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["command"].startswith("portable-indexer bench sharding --ranks 2 3 --rows 48 --contexts 32 200")
    assert report["versions"]["torch"] == torch.__version__ and {"triton", "collectives", "driver"} <= set(
        report["versions"]
    )
    rows = report["rows"]
    # Contexts shorter than the rows are left out.
    assert [(r["tp"], r["context"], r["pool"]) for r in rows] == [(2, 200, 1), (2, 200, 4), (3, 200, 1), (3, 200, 4)]
    for row in rows:
        assert row["equal"] is True and len(row["computes"]) == len(row["sizes"]) == row["tp"]
        assert sum(row["sizes"]) == 48 and row["pairs"] == sum(n // row["pool"] for n in range(153, 201))
        assert 0 < row["balance"] <= 1 and row["replicated"] > 0 and row["predicted_replicated"] > 0
        assert (row["sharded"] is None) == (row["exchange"] is None) == (row["tp"] == 3)
        assert row["estimated"] is None, "a CPU's exchange is unknown: nothing to estimate with"
    assert rows[0]["exchange_share"] > 0 and rows[2]["exchange_share"] is None


def row(tp: int, **values: Any) -> dict[str, Any]:
    known = {
        "tp": tp, "rows": 8192, "context": 131072, "heads": 64, "pool": 1, "topk": 2048, "replicated": 8.0,
        "compute": 2.2, "computes": [2.0, 2.2, 1.8, 2.0], "exchange": 0.2, "sharded": 2.5, "equal": True,
        "predicted_replicated": 8.4, "predicted_exchange": 0.3, "predicted_sharded": 2.45,
    }  # fmt: skip
    return {**known, **values}


def test_the_table_tells_measured_from_estimated() -> None:
    measured = row(4)
    absent = row(8, exchange=None, sharded=None, replicated=16.0, compute=1.7)
    unknown = row(16, exchange=None, sharded=None, predicted_exchange=None, predicted_sharded=None)
    older = {k: v for k, v in row(2, pool=4).items() if k not in ("computes", "predicted_exchange")}
    lines = _sharding_table.table([measured, absent, unknown, older]).splitlines()
    assert lines[2] == (
        "| 4 | 8,192 | 131,072 | 64 | 1 | 8.000 | 8.400 (+5%) | 2.200 | 90.9% | 0.200 | 8.0% | 2.500 | 2.450 (-2%) "
        "| 3.20x |"
    )
    assert lines[3].split(" | ")[9:] == ["0.300 est.", "15.0% est.", "2.000 est.", "2.450", "8.00x est. |"]
    assert lines[4].split(" | ")[9:] == ["unknown", "unknown", "unknown", "unknown", "unknown |"]
    assert lines[5].split(" | ")[8:11] == ["unknown", "0.200", "8.0%"]
    text = " ".join(lines[6:])
    assert "*est.*: not measured" in text and "Of *pool* tokens" in text
    assert "*est.*" not in _sharding_table.table([measured])


def test_unequal_ids_fail_the_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_sharding, "_measure", lambda *_: iter([row(2, equal=False)]))
    assert main(["bench", "sharding", "--device", "cpu", "--ranks", "2"]) == 1
    assert "| 2 | 8,192 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "1"], "--ranks must be at least 2, got [1]"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--rows", "4096", "--contexts", "1024"], "no context of [1024] has so many"),
    ],
)
def test_bad_options_are_named(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert main(["bench", "sharding", "--device", "cpu", *options]) == 1
    assert message in capsys.readouterr().err


def test_without_a_gpu_it_says_what_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "sharding"]) == 1
    assert "--device cpu" in capsys.readouterr().err


def test_pooled_shapes_count_their_keys() -> None:
    shape = Shape(rows=10, context=43, heads=2, pool=4, topk=16)
    assert (shape.keys, shape.width) == (10, 4)
    assert shape.pairs == sum(n // 4 for n in range(34, 44)) and sum(shape.sizes(3)) == 10
