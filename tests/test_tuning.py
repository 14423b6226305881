"""Tuning data: files, the rule for other devices, the user's file, fitting and `portable-indexer tune`."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from portable_indexer import tuning
from portable_indexer.cli import main
from portable_indexer.device import device_of
from portable_indexer.tuning import Costs, Exchange, TuningError, packaged, store, tuning_for
from portable_indexer.tuning.fit import Sample, error_of, fit, fit_exchange
from portable_indexer.tuning.measure import GPU_SHAPES, GPU_UNSEEN
from portable_indexer.tuning.ranks import faster_algorithm, uneven

FOLDER = Path(tuning.__file__).parent
FILES = sorted(path for path in FOLDER.glob("*.json") if path.name != "schema.json")


@pytest.fixture(autouse=True)
def no_user_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tests' own cache folder, and warnings that are given again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(store.ENVIRONMENT, raising=False)
    tuning._warn_once.cache_clear()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def content_of(name: str = "mi325x") -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def test_the_promised_devices_have_files() -> None:
    assert {"mi325x", "mi300x", "mi355x", "h200", "h100"} <= {path.stem for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_packaged_files_keep_the_schema_for_other_tools(path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema (of the extra test) to read schema.json")
    content = json.loads(path.read_text())
    jsonschema.Draft202012Validator(json.loads((FOLDER / "schema.json").read_text())).validate(content)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_packaged_files_are_whole_and_belong_to_their_product(path: Path) -> None:
    content = json.loads(path.read_text())
    assert store.check(content, path.name) == content
    product = device_of(content["product"])
    assert product.arch == content["arch"] and path.stem == content["product"]
    for entry in content["numbers"].values():
        assert entry["source"] in store.SOURCES


@pytest.mark.parametrize("name", ["mi325x", "mi300x", "mi355x"])
def test_numbers_of_machines_that_nobody_ran_on_say_so(name: str) -> None:
    content = content_of(name)
    assert {entry["source"] for entry in content["numbers"].values()} <= {"datasheet", "reported"}
    assert "Nobody has run" in content["about"] and content["runs"] == {}


Path_ = tuple[str, ...]
BROKEN: list[tuple[Path_, Any, str]] = [
    (("schema",), 2, "schema must be 1"),
    (("arch",), "", "arch must be a string"),
    (("numbers",), [], "numbers must be an object"),
    (("numbers", "score_flops", "value"), 0, "score_flops.value must be above 0"),
    (("numbers", "score_flops", "value"), "1e15", "score_flops.value must be a finite number"),
    (("numbers", "score_flops", "value"), math.nan, "score_flops.value must be a finite number"),
    (("numbers", "score_pair_s", "value"), -1e-12, "score_pair_s.value must be at least 0"),
    (("numbers", "score_row_s", "value"), True, "score_row_s.value must be a finite number"),
    (("numbers", "score_flops", "source"), "guessed", "score_flops.source must be one of"),
    (("numbers", "score_flops", "source"), "measured", "score_flops is measured, so its run must be"),
    (("numbers", "speed"), {"value": 1, "source": "measured"}, "unknown number speed"),
    (("numbers", "exchange.1.bandwidth"), {"value": 1, "source": "reported"}, "at least 2 ranks"),
    (
        ("numbers", "exchange.6.bandwidth"),
        {"value": 1, "source": "reported"},
        "lacks its other half exchange.6.latency_s",
    ),
    (("choices", "exchange_algorithm", "value"), "ring", "must be one of"),
    (("runs",), {"x": {"date": "2026-01-01"}}, "runs.x lacks versions"),
]


@pytest.mark.parametrize(("where", "value", "message"), BROKEN, ids=lambda v: str(v)[:40])
def test_a_broken_file_is_refused_by_name(where: Path_, value: Any, message: str) -> None:
    content = content_of()
    inner = content
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    with pytest.raises(TuningError, match=message) as caught:
        store.check(content, "some.json")
    assert str(caught.value).startswith("some.json: ")


@pytest.mark.parametrize("number", sorted(store.REQUIRED))
def test_a_missing_number_is_refused(number: str) -> None:
    content = content_of()
    del content["numbers"][number]
    with pytest.raises(TuningError, match=f"numbers lacks {number}"):
        store.check(content, "some.json")


def test_a_products_own_file_comes_as_it_is() -> None:
    found = tuning_for(device_of("mi325x"))
    assert found.origin == "packaged mi325x.json"
    numbers = content_of()["numbers"]
    assert found.costs.score_flops == numbers["score_flops"]["value"]
    assert [entry.ranks for entry in found.costs.exchange] == [2, 4, 8]
    assert found.costs.exchange[1] == Exchange(
        4, numbers["exchange.4.latency_s"]["value"], numbers["exchange.4.bandwidth"]["value"]
    )


def test_other_products_take_the_nearest_file_scaled(caplog: pytest.LogCaptureFixture) -> None:
    base = packaged("mi300x")
    assert base is not None
    with caplog.at_level(logging.WARNING, logger="portable_indexer"):
        small = tuning_for(device_of("mi308x"))
        tuning_for(device_of("mi308x"))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no tuning numbers for mi308x" in caplog.text and "`portable-indexer tune`" in caplog.text
    assert small.costs.score_flops == pytest.approx(base.costs.score_flops * 80 / 304)
    assert small.costs.select_pair_s == base.costs.select_pair_s


# D06 D08
@pytest.mark.parametrize(("product", "units", "partition"), [("mi300x", 38, "CPX/NPS4"), ("h200", 32, "MIG 2g.35gb")])
def test_a_partition_is_a_share_and_shares_no_links(product: str, units: int, partition: str) -> None:
    whole = device_of(product)
    assert whole.units is not None
    part = tuning_for(replace(whole, units=units, partition=partition))
    base = tuning_for(whole)
    share = units / whole.units
    assert part.costs.score_flops == pytest.approx(base.costs.score_flops * share)
    assert part.costs.select_pair_s == pytest.approx(base.costs.select_pair_s / share)
    assert part.costs.exchange == ()


# D09
def test_unknown_is_not_zero() -> None:
    bare = replace(device_of("mi308x"), product=None, units=None, memory_bytes=None, bandwidth=None)
    found = tuning_for(bare)
    base = packaged("mi300x")
    assert base is not None
    assert found.costs == base.costs, "unknown units and bandwidth scale nothing"


def test_a_cpu_and_an_unknown_architecture_have_no_exchange() -> None:
    assert tuning_for(device_of("cpu")).costs.exchange == ()
    odd = tuning_for(replace(device_of("h200"), product=None, arch="sm_70"))
    assert odd.costs.exchange == ()


def written(path: Path, arch: str = "gfx942", flops: float = 7e14, **numbers: float) -> dict[str, Any]:
    content = content_of()
    content["arch"] = arch
    for name in [name for name in content["numbers"] if name.startswith("exchange.")]:
        del content["numbers"][name]
    for name, value in {"score_flops": flops, **numbers}.items():
        content["numbers"][name] = {"value": value, "source": "reported"}
    store.write(path, content)
    return content


def test_the_users_file_comes_first_and_keeps_what_it_did_not_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = tmp_path / "cache" / "portable_indexer" / "mi325x.json"
    written(default)
    device = device_of("mi325x")
    found = tuning_for(device)
    assert (found.costs.score_flops, found.origin) == (7e14, str(default))
    base = packaged("mi325x")
    assert base is not None and found.costs.exchange == base.costs.exchange
    named = tmp_path / "named.json"
    written(named, flops=8e14, **{"exchange.6.latency_s": 1e-4, "exchange.6.bandwidth": 2e11})
    monkeypatch.setenv(store.ENVIRONMENT, str(named))
    found = tuning_for(device)
    assert found.costs.score_flops == 8e14
    assert [entry.ranks for entry in found.costs.exchange] == [2, 4, 6, 8]


@pytest.mark.parametrize("damage", ["cut", "other arch", "wrong"])
def test_a_users_file_of_no_use_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    path = tmp_path / "cache" / "portable_indexer" / "mi325x.json"
    content = written(path, arch="sm_90" if damage == "other arch" else "gfx942")
    if damage == "cut":
        path.write_text(json.dumps(content)[:200])
    elif damage == "wrong":
        path.write_text(json.dumps({**content, "schema": 99}))
    with caplog.at_level(logging.WARNING, logger="portable_indexer"):
        assert tuning_for(device_of("mi325x")).origin == "packaged mi325x.json"
        tuning_for(device_of("mi325x"))
    assert len(caplog.records) == 1
    assert str(path) in caplog.text and "`portable-indexer tune`" in caplog.text


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "here" / "x.json"
    content = content_of()
    store.write(path, content)
    before = path.read_bytes()
    assert json.loads(before) == content
    broken = copy.deepcopy(content)
    broken["numbers"]["score_flops"]["value"] = -1
    with pytest.raises(TuningError):
        store.write(path, broken)
    # A disk that fills up half-way, and one that refuses the last step.
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda *_: (_ for _ in ()).throw(OSError("disk full")))
            with pytest.raises(OSError, match="disk full"):
                store.write(path, content)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["x.json"]


def test_a_writer_that_is_killed_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    store.write(path, content_of())
    code = (
        "import os, sys, json\n"
        "from portable_indexer.tuning import store\n"
        "os.fsync = lambda _: os._exit(9)\n"
        "c = json.load(open(sys.argv[1])); c['about'] = 'new'\n"
        "store.write(__import__('pathlib').Path(sys.argv[1]), c)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], timeout=60)
    assert done.returncode == 9
    assert json.loads(path.read_text())["about"] == content_of()["about"]


def random_costs() -> Costs:
    draw = random.SystemRandom()
    return Costs(
        0.0,
        draw.uniform(5e-6, 5e-5),
        draw.uniform(0, 1e-8),
        draw.uniform(1e-13, 3e-12),
        draw.uniform(2e14, 2e15),
        draw.uniform(5e-6, 5e-5),
        draw.uniform(1e-12, 9e-12),
        draw.uniform(0, 5e-5),
        draw.uniform(0, 5e-8),
        draw.uniform(5e-13, 5e-12),
        select_id_s=draw.uniform(0, 2e-11),
    )


def sample(costs: Costs, kind: Any, rows: int, keys: int, heads: int, noise: float, topk: int = 2048) -> Sample:
    pairs = rows * (2 * keys - rows + 1) // 2
    made = Sample(kind, rows, pairs, heads, 128, 1.0, topk=topk)
    return replace(made, seconds=made.predicted(costs) * (1 + random.uniform(-noise, noise)))


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_the_fit_finds_the_costs_behind_the_times(noise: float) -> None:
    costs = random_costs()
    kinds = ("step", "score", "select")
    seen = [(kind, shape, heads) for kind in kinds for shape in GPU_SHAPES for heads in (32, 64)]
    samples = [sample(costs, kind, s.rows, s.keys, h, noise, 2048 // s.pool) for kind, s, h in seen]
    found = fit(samples)
    unseen = [sample(costs, "step", s.rows, s.keys, h, 0.0, 2048 // s.pool) for s, h in GPU_UNSEEN]
    assert error_of(found, unseen).worst < (1e-6 if noise == 0 else 0.04)
    assert min(vars(found)[name] for name in vars(found) if name != "exchange") >= 0


def test_the_fit_refuses_what_it_cannot_fit() -> None:
    costs = random_costs()
    only = [sample(costs, "score", m, 4096, 64, 0.0) for m in (64, 128, 256, 512)]
    with pytest.raises(ValueError, match="must hold scoring and selection"):
        fit(only)
    with pytest.raises(ValueError, match="above 0"):
        fit([replace(sample(costs, "step", 64, 4096, 64, 0.0), seconds=0.0)])


def test_latency_and_bandwidth_from_times() -> None:
    sizes = [1e5, 1e6, 1e7, 1e8]
    latency, bandwidth = fit_exchange([(size, 40e-6 + size / 3e11) for size in sizes])
    assert latency == pytest.approx(40e-6) and bandwidth == pytest.approx(3e11)
    latency, bandwidth = fit_exchange([(1e3, 5e-5), (1e4, 4e-5)])  # falling: latency only
    assert latency >= 0 and bandwidth > 0
    with pytest.raises(ValueError, match="two amounts"):
        fit_exchange([(1e3, 1e-5), (1e3, 2e-5)])


def test_uneven_shards_are_a_causal_prompts() -> None:
    assert uneven(8192, 4) == [4096, 1697, 1301, 1098]
    for ranks in (2, 3, 5, 6, 8):
        assert sum(uneven(1000, ranks)) == 1000


def test_the_faster_algorithm_is_chosen_by_uneven_exchanges() -> None:
    def entries(*seconds: float) -> list[dict[str, float]]:
        return [{"rows": i // 2, "uneven": i % 2, "bytes": 1e6, "seconds": s} for i, s in enumerate(seconds)]

    measured = {"grouped": entries(1e-6, 4e-4, 1e-6, 9e-3), "padded": entries(9e-6, 2e-4, 9e-6, 8e-3)}
    assert faster_algorithm([measured]) == "padded"


# What a new user does on a machine without a GPU, two gloo ranks included.
@pytest.mark.usefixtures("no_gpu")
def test_tune_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "tune",
        "--tp",
        "2",
        "--heads",
        "2",
        "4",
        "--shapes",
        "4x32,8x64,16x128",
        "--budget",
        "0.01",
        "--json",
    ]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    path = Path(report["path"])
    assert path == tmp_path / "cache" / "portable_indexer" / "cpu.json"
    content = json.loads(path.read_text())
    assert content == report["content"] == store.check(content, str(path))
    assert {entry["source"] for entry in content["numbers"].values()} == {"measured"}
    run = content["runs"][content["numbers"]["score_flops"]["run"]]
    assert run["versions"]["torch"] and run["date"]
    assert (run["error"]["shapes"], run["error"]["seen_by_the_fit"]) == (2, False)
    found = tuning_for(device_of("cpu"))
    assert found.origin == str(path) and [entry.ranks for entry in found.costs.exchange] == [2]
    assert len(report["samples"]) == 3 * 3 * 2 and [line[5] for line in report["unseen"]] == [1, 2]
    shares = [abs(predicted / measured - 1) for *_, measured, predicted in report["unseen"]]
    assert run["error"]["worst"] == pytest.approx(max(shares), rel=0.01)


def test_tune_keeps_what_it_did_not_measure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from portable_indexer.cli.tune import _content
    from portable_indexer.tuning.fit import Error

    costs, error = random_costs(), Error(12, 0.03, 0.1)
    old = content_of("h200")["numbers"]
    content = _content(device_of("h200"), costs, {4: Exchange(4, 3e-5, 2e11, 9e-5)}, "padded", error, False)
    assert store.check(content, "new") == content
    assert content["numbers"]["exchange.8.bandwidth"] == old["exchange.8.bandwidth"]
    assert content["numbers"]["exchange.4.bandwidth"]["source"] == "measured"
    assert content["numbers"]["exchange.4.launch_s"]["value"] == 9e-5
    (four,) = (e for e in tuning._tuning(content, "new").costs.exchange if e.ranks == 4)
    assert four == Exchange(4, 3e-5, 2e11, 9e-5)
    assert content["choices"]["exchange_algorithm"]["value"] == "padded"
    spx = _content(replace(device_of("mi325x"), partition="SPX/NPS1"), costs, {}, None, error, False)
    assert spx["numbers"]["exchange.2.latency_s"] == content_of()["numbers"]["exchange.2.latency_s"]
    cpx = _content(replace(device_of("mi300x"), partition="CPX/NPS4", units=38), costs, {}, None, error, False)
    assert not [name for name in cpx["numbers"] if name.startswith("exchange.")]


@pytest.mark.usefixtures("no_gpu")
def test_tune_says_no(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = ["tune", "--tp", "--heads", "2", "--budget", "0.01", "--shapes"]
    assert main([*quick, "64x32"]) == 2
    assert "1 <= ROWS <= KEYS, got '64x32'" in capsys.readouterr().err
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert main([*quick, "4x32,8x64"]) == 1
    assert "was not written" in capsys.readouterr().err
    assert main([*quick, "4x32,8x64", "--dry-run"]) == 0
    assert "nothing was written" in capsys.readouterr().out


def test_a_named_file_that_is_not_there_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(store.ENVIRONMENT, str(tmp_path / "none.json"))
    assert tuning.tuning_for(device_of("h200")).origin == "packaged h200.json"
    assert "none.json" in caplog.text and store.ENVIRONMENT in caplog.text
