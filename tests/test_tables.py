"""The script that makes the tables of ci/measurements: from JSON as the commands write it, into marked places."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("tables", ROOT / "ci" / "tables.py")
assert spec and spec.loader
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)


def exchanges() -> list[dict[str, Any]]:
    """100 us + bytes at 200 GB/s, launched in 90 us; padding doubles the bytes of uneven lists."""
    found = []
    for rows in (32, 4096, 65_536):
        for plan in ("even", "causal", "at 128K"):
            for pitched in (False, True):
                for way in ("grouped", "padded"):
                    received = rows * 2048 * 4 / 2 * (2 if way == "padded" and plan != "even" else 1)
                    us = 100 + received / 200e3
                    found.append(
                        {"rows": rows, "plan": plan, "pitched": pitched, "algorithm": way, "us": us, "host_us": 95.0,
                         "received_gb_s": rows * 2048 * 4 / 2 / us / 1e3}
                    )  # fmt: skip
    return found


def test_an_exchange_in_short(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"results": exchanges()}))
    text = tables.exchange(str(tmp_path / "x.json"))
    assert "| 65,536 | 1,442 / 1,442 | 1,442 / 2,784 | 1,442 / 2,784 | 186 | 95 |" in text
    flat = text.replace("\n", " ")
    assert "grouped is faster by more than 5% in 8 (with a pitch: at 4,096, 65,536 rows)" in flat
    assert "all sizes together fit 100 us + bytes at 200 GB/s" in flat and "of the device's time up to 32 rows" in flat


def test_the_models_check(tmp_path: Path) -> None:
    columns = ["kind", "rows", "pairs", "heads", "k", "requests", "host_s", "measured_s", "predicted_s"]
    unseen = [
        ["step", 100, 200_000, 64, 512, 1, 3e-4, 1e-3, 1.1e-3],
        ["step", 50, 10_000, 32, 2048, 4, 3e-4, 2e-3, 2e-3],
    ]
    content = {"numbers": {"launch_s": {"value": 3e-4, "source": "measured"}}}
    (tmp_path / "t.json").write_text(json.dumps({"columns": columns, "unseen": unseen, "content": content}))
    text = tables.tune(str(tmp_path / "t.json"))
    assert "| 100 | 2,000 | 64 | 512 | 0.30 ms | 1.000 ms | 1.100 ms | +10.0% |" in text
    assert "| 50 | 200 in 4 requests | 32 |" in text and "Median error 5.0%, worst 10.0%." in text
    assert "| `launch_s` | 0.0003 | measured |" in text


def test_a_table_goes_between_its_lines(tmp_path: Path) -> None:
    place = tmp_path / "page.md"
    place.write_text("above\n<!-- break-even:x -->\nold\n<!-- end -->\nbelow\n<!-- other -->\nstays\n<!-- end -->\n")
    assert tables.main(["--into", str(place), "break-even:x=h200"]) == 0
    text = place.read_text()
    assert text.startswith("above\n<!-- break-even:x -->\n\n| h200, H 64, k 2048 | a new prompt |")
    assert "old" not in text and text.endswith("<!-- end -->\nbelow\n<!-- other -->\nstays\n<!-- end -->\n")
    assert tables.main(["--into", str(place), "break-even:x=h200"]) == 0 and place.read_text() == text


def test_what_cannot_be_made_leaves_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "page.md"
    place.write_text("<!-- break-even -->\n<!-- end -->\n")
    assert tables.main(["--into", str(place), "break-even=h200", "sharding=none.json"]) == 1
    assert "none.json" in capsys.readouterr().err and place.read_text() == "<!-- break-even -->\n<!-- end -->\n"
    assert tables.main(["--into", str(place), "break-even:there=h200"]) == 1
    assert "lacks the lines <!-- break-even:there -->" in capsys.readouterr().err


def test_every_page_has_what_its_command_fills() -> None:
    for name in ("policy", "sharding"):
        text = (ROOT / "ci" / "measurements" / f"{name}.md").read_text()
        marks = [line[5:-4] for line in text.splitlines() if line.startswith("<!-- ") and line != "<!-- end -->"]
        assert marks and text.count("<!-- end -->") == len(marks)
        assert {mark.partition(":")[0] for mark in marks} <= set(tables.KINDS)
