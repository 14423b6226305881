"""Which backend serves, and the reasons that are given."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap

import pytest

import portable_indexer as pi
from portable_indexer import registry
from portable_indexer.device import device_of

CPU, MI325X, H200 = device_of("cpu"), device_of("mi325x"), device_of("h200")


def test_lists_every_backend() -> None:
    assert {"reference", "triton_cuda", "triton_rocm"} <= set(pi.list_backends())


def test_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"'flash'.*reference, triton_cuda, triton_rocm"):
        pi.get_backend("flash")


@pytest.mark.parametrize(("name", "device"), [("triton_rocm", H200), ("triton_cuda", MI325X)])
def test_unsupported_name_gives_every_reason(name: str, device: pi.Device) -> None:
    with pytest.raises(ValueError, match=rf"'{name}' cannot serve this: .+ \(.*reference: supported"):
        pi.resolve(device, None, name)


def test_cpu_gets_the_reference() -> None:
    assert pi.resolve(CPU).name == "reference"


@pytest.mark.parametrize(("device", "name"), [(MI325X, "triton_rocm"), (H200, "triton_cuda")])
def test_a_gpu_gets_its_own_backend(device: pi.Device, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process had the GPU: what Triton would compile for is the only thing played."""
    runtime = pytest.importorskip("portable_indexer.backends.triton_common.runtime")
    monkeypatch.setattr(runtime, "runs_on", lambda device_type: device_type == "cuda")
    monkeypatch.setattr(runtime, "target", lambda: (device.vendor, device.arch))
    assert pi.resolve(device).name == name


def test_environment_is_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTABLE_INDEXER_BACKEND", "reference")
    assert pi.resolve(H200).name == "reference"
    monkeypatch.setenv("PORTABLE_INDEXER_BACKEND", "nothing")
    with pytest.raises(ValueError, match="PORTABLE_INDEXER_BACKEND: no backend is called 'nothing'"):
        pi.resolve(H200)


def test_falls_back_with_one_log_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(
        registry, "why_not", lambda name, *_: None if name == "reference" else "made to fail for this test"
    )
    registry._log_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="portable_indexer"):
        assert pi.resolve(H200).name == "reference"
        assert pi.resolve(H200).name == "reference"
    assert [r.getMessage() for r in caplog.records] == ["backend 'triton_cuda' passed over: made to fail for this test"]


def test_entry_points_register(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution's entry point is listed, resolved by name, and a broken one only costs its reason."""
    (tmp_path / "thirdparty.py").write_text(
        textwrap.dedent("""
            class Third:
                name = "third"
                def unsupported(self, device, problem=None):
                    return None if device.vendor == "cpu" else "CPU only"
        """)
    )
    info = tmp_path / "thirdparty-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thirdparty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[portable_indexer.backends]\nthird = thirdparty:Third\nbroken = nowhere:Nothing\nreference = nowhere:Evil\n"
    )
    code = """
        import portable_indexer as pi
        from portable_indexer.device import device_of
        cpu = device_of("cpu")
        assert {"third", "broken", "reference"} <= set(pi.list_backends())
        assert pi.resolve(cpu, None, "third").name == "third"
        assert pi.resolve(cpu).name == "reference", "a plugin cannot take a built-in name"
        try:
            pi.resolve(cpu, None, "broken")
        except ValueError as error:
            assert "nowhere" in str(error), error
        else:
            raise SystemExit("no error")
        try:
            pi.resolve(device_of("h200"), None, "third")
        except ValueError as error:
            assert "CPU only" in str(error), error
        else:
            raise SystemExit("no error")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
    )
    assert done.returncode == 0, done.stderr


def test_a_triton_that_miscompiles_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:  # S40
    runtime = pytest.importorskip("portable_indexer.backends.triton_common.runtime")
    monkeypatch.setattr(runtime, "runs_on", lambda device_type: device_type == "cuda")
    monkeypatch.setattr(runtime, "target", lambda: ("amd", "gfx950"))
    monkeypatch.setattr(runtime, "triton_version", lambda: (3, 7))
    mi355x = device_of("mi355x")
    assert pi.resolve(mi355x).name == "reference"
    with pytest.raises(ValueError, match=r"Triton 3\.7 .*miscompile"):
        pi.resolve(mi355x, None, "triton_rocm")
    monkeypatch.setattr(runtime, "triton_version", lambda: (3, 5))
    with pytest.raises(ValueError, match=r"needs Triton 3\.6 or newer, got 3\.5"):
        pi.resolve(mi355x, None, "triton_rocm")
