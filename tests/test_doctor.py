"""`portable-indexer doctor` on nodes with something wrong, and on this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from portable_indexer import _sysfs
from portable_indexer.cli import _node, main
from portable_indexer.device import device_of

MI325X = ("0000:05:00.0", 0x1002, 0x74A5)
H200 = ("0000:19:00.0", 0x10DE, 0x2335)


@pytest.fixture(autouse=True)
def plain_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No device on the bus, no device files, no variables of ours."""
    monkeypatch.setattr(_sysfs, "ROOT", tmp_path / "sys")
    monkeypatch.setattr(_node, "DEV", tmp_path / "dev")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in _node.environment():
        if name != "TRITON_INTERPRET":
            monkeypatch.delenv(name)


def install(site: Path, name: str, version: str, package: str) -> None:
    """A distribution that owns a file of `package`; the file must be there, or newer Pythons leave it out."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "RECORD").write_text(f"{package}/part.py,,\n")
    (folder / "top_level.txt").write_text(f"{package}\n")  # all that Python 3.10 looks at
    (site / package).mkdir(exist_ok=True)
    # No __init__.py: the real package, further down the path, is the one that imports.
    (site / package / "part.py").touch()


def put_on_bus(tmp_path: Path, *devices: tuple[str, int, int]) -> None:
    for address, vendor, device in devices:
        folder = tmp_path / "sys" / "bus" / "pci" / "devices" / address
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor:#06x}\n")
        (folder / "device").write_text(f"{device:#06x}\n")
        (folder / "class").write_text("0x120000\n" if vendor == 0x1002 else "0x030200\n")


def doctor(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict]:  # type: ignore[type-arg]
    capsys.readouterr()
    code = main(["doctor", "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def finding(report: dict, words: str) -> dict:  # type: ignore[type-arg]
    found = [entry for entry in report["findings"] if words in entry["what"]]
    assert len(found) == 1, report["findings"]
    return found[0]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch as a build for the CPU sees the node."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", None)


@pytest.mark.usefixtures("no_gpu")
def test_a_machine_without_a_gpu_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = doctor(capsys)
    assert (code, report["ok"], report["self_test"]) == (0, True, "passed")
    assert report["device"]["vendor"] == "cpu"
    assert report["backends"][report["backend"]] is None
    assert report["versions"]["torch"] == torch.__version__
    assert main(["doctor", "--no-self-test"]) == 0
    text = capsys.readouterr().out
    assert "-> " in text and text.splitlines()[-1].startswith("ready") and "self-test" not in text


# K05 K07
@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("device", "build"), [(MI325X, "ROCm"), (H200, "CUDA")])
def test_a_torch_that_cannot_drive_the_nodes_gpus(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, device: tuple[str, int, int], build: str
) -> None:
    put_on_bus(tmp_path, device)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "kfd").touch()
    code, report = doctor(capsys, "--no-self-test")
    assert (code, report["ok"]) == (1, False)
    entry = finding(report, "this torch was built")
    assert entry["level"] == "error" and f"install the {build} build of torch" in entry["remedy"]
    assert report["pci"] == [f"{device[0]} {device[1]:04x}:{device[2]:04x}"]


# K05
def test_vendor_of_torch_against_vendor_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _node.vendor_findings([MI325X], "amd", 1) == []
    assert _node.vendor_findings([], None, 0) == []
    (found,) = _node.vendor_findings([MI325X, MI325X], "nvidia", 0)
    assert found.level == "error" and "2 amd GPU(s)" in found.what and "built for CUDA" in found.what
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    (found,) = _node.vendor_findings([MI325X], "amd", 0)
    assert "torch sees none (HIP_VISIBLE_DEVICES='')" in found.what


# K02
def test_two_distributions_that_own_triton(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("triton", "pytorch-triton-rocm"):
        install(tmp_path / "site", name, "3.5.1", "triton")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    code, report = doctor(capsys, "--no-self-test")
    entry = finding(report, "own the directory triton/")
    assert code == 1 and entry["level"] == "error"
    assert "pytorch-triton-rocm, triton" in entry["what"] and "pip uninstall" in entry["remedy"]


# K02
def test_the_triton_that_imports_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton", reason="without Triton there is no import to compare with")
    install(tmp_path / "site", "triton", "3.5.1", "triton")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert _node.recorded(["triton"]) == {"triton": "3.5.1"} and _node.versions()["triton"] == triton.__version__
    found = [f for f in _node.package_findings("13.0", False, "sm_90") if "3.5.1" in f.what]
    assert [f.level for f in found] == ["warning"]
    assert f"triton {triton.__version__} is imported" in found[0].what and "not one of those tested" not in str(found)


# K08 D11
def test_an_installed_pynvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", "pynvml", "11.5.3", "pynvml")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    found = [f for f in _node.package_findings("13.0", False, "sm_90") if "pynvml" in f.what]
    assert len(found) == 1 and "nvidia-ml-py" in found[0].remedy


# K10
@pytest.mark.parametrize(
    ("amdsmi", "rocm", "wrong"),
    [("7.0.2", "6.4.43482", True), ("7.0.2", "7.0.51831-abc", False), ("6.4.3", "7.1", False)],
)
def test_amdsmi_newer_than_rocm(monkeypatch: pytest.MonkeyPatch, amdsmi: str, rocm: str, wrong: bool) -> None:
    monkeypatch.setattr(_node, "versions", lambda: {"amdsmi": amdsmi, "triton": None})
    found = [f for f in _node.package_findings(rocm, True, "gfx942") if "amdsmi" in f.what]
    assert bool(found) == wrong
    if wrong:
        assert found[0].level == "warning" and amdsmi in found[0].what and rocm in found[0].what


# S40
@pytest.mark.parametrize(
    ("triton", "arch", "level"),
    [("3.7.0", "gfx950", "error"), ("3.7.0", "gfx942", "warning"), ("3.6.0", "gfx950", None), ("3.9.0", "sm_90", None)],
)
def test_versions_of_triton(monkeypatch: pytest.MonkeyPatch, triton: str, arch: str, level: str | None) -> None:
    monkeypatch.setattr(_node, "versions", lambda: {"amdsmi": None, "triton": triton})
    found = [f.level for f in _node.package_findings("7.0", arch.startswith("gfx"), arch) if "Triton" in f.what]
    assert found == ([level] if level else [])


# D03
def test_device_files_that_this_user_may_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dri = tmp_path / "dev" / "dri"
    dri.mkdir(parents=True)
    for file in (tmp_path / "dev" / "kfd", dri / "renderD128", dri / "renderD129"):
        file.touch()
    assert _node.permission_findings([MI325X]) == []
    closed = {str(dri / "renderD129")}
    monkeypatch.setattr(os, "access", lambda file, mode: str(file) not in closed)
    (found,) = _node.permission_findings([MI325X])
    assert found.level == "warning" and found.what.endswith(str(dri / "renderD129"))
    assert "groups render and video" in found.remedy
    closed.add(str(tmp_path / "dev" / "kfd"))
    (found,) = _node.permission_findings([MI325X])
    assert found.level == "error"
    (tmp_path / "dev" / "kfd").unlink()
    assert any("is missing" in f.what for f in _node.permission_findings([MI325X]))
    assert _node.permission_findings([]) == [] and _node.permission_findings([H200]) == []


# D06 D08
@pytest.mark.parametrize(("name", "units"), [("CPX/NPS4", 38), ("MIG 2g.35gb", 32)])
def test_a_partition_is_explained(name: str, units: int) -> None:
    device = replace(device_of("mi300x"), partition=name, units=units)
    found = _node.partition_finding(device)
    assert found is not None and found.level == "note"
    assert name in found.what and f"{units} units" in found.what and "nothing is sharded by itself" in found.what
    assert _node.partition_finding(replace(device, partition="SPX/NPS1")) is None
    assert _node.partition_finding(device_of("h200")) is None


def test_gpus_of_different_kinds_are_told() -> None:
    assert _node.mixed_finding([]) == _node.mixed_finding(["NVIDIA H200"] * 8) == []
    (found,) = _node.mixed_finding(["NVIDIA H200", "NVIDIA L4", "NVIDIA H200"])
    assert found.level == "warning" and "2 NVIDIA H200, 1 NVIDIA L4" in found.what


@pytest.mark.usefixtures("no_gpu")
def test_a_machine_without_numbers_shards_nothing_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-self-test"]) == 0
    text = capsys.readouterr().out
    assert "auto shards no step here" in text and "for tests, not for serving" in text


def test_what_detection_warns_about_is_reported_and_not_printed_twice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    from portable_indexer.device import CPU

    def warns(where: object = None) -> object:
        logging.getLogger("portable_indexer").warning("amdsmi_init failed: code 14; join the group render")
        return CPU

    monkeypatch.setattr("portable_indexer.device.detect", warns)
    code, report = doctor(capsys, "--no-self-test")
    assert code == 0
    assert finding(report, "amdsmi_init failed")["level"] == "warning"
    assert capsys.readouterr().err == ""


def test_a_gpu_that_only_the_reference_serves_is_not_ready(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portable_indexer.device.detect", lambda where=None: device_of("mi325x"))
    monkeypatch.setattr(
        "portable_indexer.registry.why_not", lambda name, *_: None if name == "reference" else "no Triton"
    )
    code, report = doctor(capsys, "--no-self-test")
    assert code == 1
    assert "triton_rocm: no Triton" in finding(report, "only the slow reference backend")["what"]
    assert report["policy"]["tuning"] == "packaged mi325x.json"
    rows = report["policy"]["shards_from_rows"]["8"]
    assert 0 < rows["131,072 keys"] < rows["new prompt"]


@pytest.mark.parametrize("outcome", ["wrong", "failed"])
@pytest.mark.usefixtures("no_gpu")
def test_a_backend_that_computes_wrongly_is_not_ready(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    import portable_indexer as pi

    real = pi.index_topk

    def broken(*arguments: object, backend: str | None = None, **options: object) -> torch.Tensor:
        answer = real(*arguments, backend=backend, **options)  # type: ignore[arg-type]
        if backend is None:
            if outcome == "failed":
                raise RuntimeError("the compiler gave up")
            answer[3, 5] += 1
        return answer

    monkeypatch.setattr(pi, "index_topk", broken)
    code, report = doctor(capsys)
    assert (code, report["self_test"]) == (1, outcome)
    finding(report, "1 of 32 rows" if outcome == "wrong" else "the compiler gave up")


@pytest.mark.parametrize("name", ["SHARD", "EXCHANGE", "LOGITS_MB"])
def test_a_wrong_variable_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(f"PORTABLE_INDEXER_{name}", "maybe")
    code, report = doctor(capsys, "--no-self-test")
    assert code == 1 and f"PORTABLE_INDEXER_{name}" in finding(report, "maybe")["what"]
    assert report["environment"][f"PORTABLE_INDEXER_{name}"] == "maybe"


def test_a_reader_that_closes_early_gets_no_traceback() -> None:
    code = "import sys; from portable_indexer.cli import main; sys.exit(main(['doctor', '--no-self-test']))"
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert writer.stdout is not None and writer.stderr is not None
    writer.stdout.close()
    assert "BrokenPipe" not in writer.stderr.read()
    assert writer.wait(timeout=120) == 1
    writer.stderr.close()


def test_a_missing_torch_is_an_error_not_a_traceback(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from portable_indexer.cli import main; sys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "torch cannot be imported" in done.stdout and "Traceback" not in done.stderr


def test_vllm_that_may_not_load_the_plugin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    status = {"vllm": "0.33.0", "entry_point": True, "mode": "auto", "kernels": "vllm", "hooks": {}}
    monkeypatch.setattr("portable_indexer.vllm_plugin.status", lambda: dict(status))
    assert doctor(capsys, "--no-self-test")[1]["vllm"]["would_load"] is True
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    _, report = doctor(capsys, "--no-self-test")
    assert report["vllm"]["would_load"] is False and finding(report, "VLLM_PLUGINS='other'")["level"] == "note"
