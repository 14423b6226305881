"""What an install and an import do, and do not do."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import textwrap
from email.message import Message
from email.parser import Parser
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import pytest

import portable_indexer as pi

ROOT = Path(__file__).resolve().parents[1]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from this checkout, without a build environment of its own."""
    target = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(ROOT)],
        check=True,
        capture_output=True,
        timeout=200,
    )
    return next(target.glob("*.whl"))


@pytest.fixture(scope="session")
def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_wheel_holds_every_backend_and_one_name(wheel: Path) -> None:
    assert load(ROOT / "ci" / "check_wheel.py").faults(wheel) == []


def test_wheel_holds_every_module(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.endswith(".py")}
    modules = {
        str(Path("portable_indexer", top, path.relative_to(folder)))
        for top, folder in (("", ROOT / "portable_indexer"), ("backends", ROOT / "backends"))
        for path in folder.rglob("*.py")
    }
    assert held == modules


def test_check_wheel_sees_faults(wheel: Path, tmp_path: Path) -> None:
    """The check itself can fail: a wheel that requires torch, adds a name and lacks a backend."""
    bad = tmp_path / wheel.name
    with ZipFile(wheel) as source, ZipFile(bad, "w") as target:
        for name in source.namelist():
            if "triton_rocm" in name:
                continue
            data = source.read(name)
            if name.endswith("/METADATA"):
                data = data.replace(b"\nRequires-Python", b"\nRequires-Dist: torch>=2.10\nRequires-Python")
            target.writestr(name, data)
        target.writestr("_amd/__init__.py", "")
        target.writestr("portable_indexer/stale.py", "")
    found = "\n".join(load(ROOT / "ci" / "check_wheel.py").faults(bad))
    assert "triton_rocm" in found and "requires torch" in found and "_amd" in found and "stale.py" in found


def test_install_asks_for_nothing(metadata: Message) -> None:  # K01, K03, K06, K08, K10
    required = metadata.get_all("Requires-Dist") or []
    assert [line for line in required if "extra ==" not in line] == []
    extras = {}
    for line in required:
        name = re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0].lower()
        extras.setdefault(re.search(r"extra == ['\"]([a-z]+)", line)[1], set()).add(name)
    assert extras["cuda"] == {"nvidia-ml-py"}
    assert extras["rocm"] == {"amdsmi"}
    assert not any("pynvml" in names for names in extras.values())
    assert {extra for extra, names in extras.items() if names & {"torch", "triton"}} == {"cpu"}
    assert not any("==" in line.partition(";")[0] for line in required), "no pins"
    assert set(metadata.get_all("Provides-Extra")) == {"rocm", "cuda", "cpu", "plot", "test", "lint", "vllm"}


def run_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_import_touches_no_vendor_library_and_no_gpu() -> None:  # D01, D02
    """Every public name is resolved and the command's modules are imported, with traps in the way."""
    run_python("""
        import sys

        class Trap:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {"amdsmi", "pynvml", "vllm"}:
                    raise RuntimeError("imported " + name)

        sys.meta_path.insert(0, Trap())
        import portable_indexer as pi
        assert not {"torch", "triton", "numpy"} & set(sys.modules), "the bare import is light"
        assert "pynvml" not in sys.modules
        sys.meta_path.pop(0)
        import torch  # which may import pynvml for itself
        sys.modules.pop("pynvml", None)
        sys.meta_path.insert(0, Trap())
        torch.cuda._lazy_init = lambda: (_ for _ in ()).throw(RuntimeError("touched the GPU"))
        for name in pi.__all__:
            assert getattr(pi, name) is not None
        from portable_indexer.cli import COMMANDS
        import importlib
        for name in COMMANDS:
            importlib.import_module("portable_indexer.cli." + name)
        assert not torch.cuda.is_initialized()
    """)


def test_package_has_one_import_name() -> None:
    run_python(f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        try:
            import backends
        except ImportError as error:
            assert "portable_indexer.backends" in str(error)
        else:
            raise SystemExit("a second copy could be imported")
        import portable_indexer.backends
    """)


def test_public_names_are_complete() -> None:
    assert sorted(pi.__all__) == sorted(set(pi.__all__))
    assert set(pi._HOME) == set(pi.__all__) - {"__version__"}
    assert set(dir(pi)) >= set(pi.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        pi.nothing  # noqa: B018


def test_public_names_have_docstrings() -> None:
    for name in set(pi.__all__) - {"__version__"}:
        assert (getattr(pi, name).__doc__ or "").strip(), name


def test_no_machine_path_in_the_tree() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    pattern = re.compile("|".join(("/" + "work/", "/" + "root/", "/" + "farm/")))
    for name in tracked.stdout.split():
        path = ROOT / name
        if path.is_file():
            assert not pattern.search(path.read_text(errors="ignore")), name
