"""The device value: from datasheets, by architecture, and on a machine without a GPU."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from portable_indexer import device as device_module
from portable_indexer._products import PRODUCTS, arch_facts, arch_of, identify
from portable_indexer.device import CPU, Device, Facts, detect, device_of

GiB = 1 << 30


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# D02 D04
def test_import_touches_no_library_and_no_gpu() -> None:
    code = """
        import sys
        for name in ("torch", "amdsmi", "pynvml"):
            sys.modules[name] = None
        import portable_indexer, portable_indexer.device, portable_indexer.policy, portable_indexer.tuning
        from portable_indexer.device import detect, device_of
        assert detect().vendor == "cpu", detect()
        assert device_of("mi325x").fp8 == "fnuz"
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and done.stderr == ""


@pytest.mark.usefixtures("no_gpu")
def test_a_machine_without_a_gpu_is_a_cpu_and_nothing_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="portable_indexer"):
        found = detect()
    assert found == CPU and found.vendor == "cpu" and not found.is_gpu
    assert caplog.records == []
    # Unknown is None, never 0.
    assert (found.units, found.memory_bytes, found.fp8, found.links) == (None, None, None, None)


def test_a_cpu_tensor_is_on_the_cpu_wherever_a_gpu_is() -> None:
    assert detect("cpu") == CPU
    assert detect(torch.empty(0).device) == CPU


@pytest.mark.usefixtures("no_gpu")
def test_asking_is_quick() -> None:
    device_module.forget()
    start = time.perf_counter()
    detect()
    first = time.perf_counter() - start
    assert first < 0.05, f"{first * 1e3:.1f} ms"


# S04
@pytest.mark.parametrize(
    ("name", "arch", "fp8"),
    [
        ("gfx942:sramecc+:xnack-", "gfx942", "fnuz"),
        ("gfx950:sramecc+:xnack-", "gfx950", "fn"),
        ("gfx90a:sramecc+:xnack-", "gfx90a", None),
        ("gfx1100", "gfx1100", None),
        ("sm_90", "sm_90", "fn"),
        ("sm_80", "sm_80", None),
    ],
)
def test_native_encoding_is_the_architectures(name: str, arch: str, fp8: str | None) -> None:
    assert arch_of(name) == arch
    facts = arch_facts(arch)
    assert facts is not None and facts.fp8 == fp8


def test_an_architecture_is_not_known_by_its_beginning() -> None:
    assert arch_facts("gfx94") is None and arch_facts("gfx9421") is None and arch_facts("gfx11") is None


# D14
@pytest.mark.parametrize(
    ("pci", "units", "memory", "name", "product", "told_by"),
    [
        (0x74A5, 304, 256 * GiB, "AMD Radeon Graphics", "mi325x", "pci id"),
        (0x74A1, 304, 192 * GiB, "MI300X-O", "mi300x", "pci id"),
        (0x74A1, 38, 48 * GiB, "anything", "mi300x", "pci id"),  # a partition's share of units and memory
        (None, 304, 256 * GiB, "AMD Radeon Graphics", "mi325x", "architecture, units, memory"),
        (None, 304, 192 * GiB, None, "mi300x", "architecture, units, memory"),
        (None, 304, 191 * GiB, "AMD Instinct MI325X", "mi300x", "architecture, units, memory"),
        (None, 38, 24 * GiB, "AMD Instinct MI325X VF", "mi325x", "marketing name"),
    ],
)
def test_product_by_id_then_size_then_name(
    pci: int | None, units: int, memory: int, name: str | None, product: str, told_by: str
) -> None:
    found = identify("gfx942", pci, units, memory, name)
    assert found is not None
    assert (found[0].name, found[1]) == (product, told_by)


def test_products_that_look_alike_are_not_guessed() -> None:
    assert identify("gfx950", None, 256, 288 * GiB, "AMD Radeon Graphics") is None
    found = identify("gfx950", None, 256, 288 * GiB, "AMD Instinct MI355X")
    assert found is not None and found[0].name == "mi355x"
    assert identify("gfx942", 0xFFFF, 304, 256 * GiB, "AMD Radeon Graphics") is None
    assert identify("sm_90", 0x2342, 132, 144_000_000_000, "NVIDIA GH200 480GB") is None
    assert identify("sm_120", None, 132, 141_000_000_000, "NVIDIA H200") is None


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.name)
def test_a_device_from_the_datasheet_is_whole(product: object) -> None:
    made = device_of(product.name.upper())  # type: ignore[attr-defined]
    assert made.product == product.name and made.arch == product.arch  # type: ignore[attr-defined]
    for name in ("units", "wave_size", "lds_bytes", "memory_bytes", "bandwidth", "fp8"):
        assert getattr(made, name), name
        assert made.sources[name] in ("datasheet", "architecture")


def test_an_unknown_name_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match=r"unknown device 'mi999x'; known: mi300x, .*mi325x.*h200, cpu"):
        device_of("mi999x")


def test_the_first_source_that_knows_wins() -> None:
    facts = Facts()
    facts.add("torch", vendor="amd", arch="gfx942", units=304, driver=None)
    facts.add("amdsmi", units=38, driver="6.14")
    made = facts.device()
    assert (made.units, made.sources["units"]) == (304, "torch")
    assert (made.driver, made.sources["driver"]) == ("6.14", "amdsmi")
    assert made.memory_bytes is None and "memory_bytes" not in made.sources


def test_a_device_is_a_value() -> None:
    one, other = device_of("h200"), device_of("h200")
    assert one == other and hash(one) == hash(other) and one != device_of("h100")
    with pytest.raises(AttributeError):
        one.units = 1  # type: ignore[misc]
    assert Device("cpu", "cpu", sources={"arch": "elsewhere"}) == Device("cpu", "cpu")


@pytest.mark.gpu
def test_the_gpu_here() -> None:
    torch.cuda.init()
    took = []
    for _ in range(5):  # other tests may hold the machine at any one time
        device_module.forget()
        start = time.perf_counter()
        found = detect()
        took.append(time.perf_counter() - start)
    assert min(took) < 0.05, f"{min(took) * 1e3:.1f} ms"
    properties = torch.cuda.get_device_properties(found.index)
    assert found.units == properties.multi_processor_count
    assert found.memory_bytes == properties.total_memory
    names = (f"sm_{properties.major}{properties.minor}", arch_of(getattr(properties, "gcnArchName", "")))
    assert found.arch in names
    assert detect(f"cuda:{found.index}") is found and detect(found.index) is found
