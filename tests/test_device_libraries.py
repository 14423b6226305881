"""`detect` on the real amdsmi and nvidia-ml-py packages, loaded against stand-in C libraries."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from standin_libraries import AMD_SERIAL, AmdGpu, Node, NvidiaGpu, hip_uuid, look

GiB = 1 << 30
Values = dict[str, object]
H200_UUIDS = [f"7c0de0aa-0000-4111-8222-00000000000{i}" for i in range(2)]


def amd_torch(serial: str, units: int, memory: int, arch: str, name: str, bus: int | None = None) -> Values:
    values: Values = {
        "name": name,
        "gcnArchName": f"{arch}:sramecc+:xnack-",
        "multi_processor_count": units,
        "total_memory": memory,
        "warp_size": 64,
        "uuid": hip_uuid(serial),
    }
    if bus is not None:
        values.update(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)
    return values


def mi325x_node() -> Node:
    """Two of a node's eight MI325X, visible in the opposite order of amdsmi's."""
    serials = [AMD_SERIAL.format(i) for i in range(8)]
    gpus = [
        AmdGpu(
            (0, 0x05 + 0x10 * i, 0, 0),
            s.upper(),
            s,
            0x74A5,
            304,
            262_128,
            "AMD Radeon Graphics",
            bandwidth_gb=6000,
        )
        for i, s in enumerate(serials)
    ]
    torch = [amd_torch(serials[i], 304, 256 * GiB - 16 * (1 << 20), "gfx942", "AMD Radeon Graphics") for i in (5, 2)]
    return Node("amd", gpus, torch, "7.0.51831")


def cpx_node() -> Node:
    """One MI300X in CPX/NPS4: eight partitions, of which only the first says so."""
    serials = [AMD_SERIAL.format(0x100 + i) for i in range(8)]
    gpus = [
        AmdGpu(
            (0, 0x0C, 0, i),
            AMD_SERIAL.format(0x100).upper(),  # the card's serial, the same on each
            s,
            0x74A1,
            38,
            49_152,
            "AMD Instinct MI300X",
            "CPX" if i == 0 else "N/A",
            "NPS4" if i == 0 else None,
        )
        for i, s in enumerate(serials)
    ]
    torch = [amd_torch(serials[i], 38, 48 * GiB, "gfx942", "AMD Instinct MI300X") for i in range(8)]
    return Node("amd", gpus, torch, "6.4.43482", current=3)


def h200_node(mig: bool = False) -> Node:
    gpus = [
        NvidiaGpu(f"GPU-{u}", f"00000000:{0x19 + i:02X}:00.0", 0x2335, 150_754_820_096, "NVIDIA H200")
        for i, u in enumerate(H200_UUIDS)
    ]
    if not mig:
        torch = [nvidia_torch(u, 132, 150_754_820_096, "NVIDIA H200") for u in reversed(H200_UUIDS)]
        return Node("nvidia", gpus, torch, "13.0")
    uuid = "11111111-2222-5333-8444-555555555555"
    slice_ = NvidiaGpu(f"MIG-{uuid}", "", 0, 35 * GiB, "NVIDIA H200 MIG 2g.35gb", 0, 4, 0, parent_status=4)
    torch = [nvidia_torch(uuid, 32, 34 * GiB, "NVIDIA H200 MIG 2g.35gb")]
    return Node("nvidia", [*gpus, slice_], torch, "13.0", env={"CUDA_VISIBLE_DEVICES": f"MIG-{uuid}"})


def nvidia_torch(uuid: str, units: int, memory: int, name: str) -> Values:
    return {
        "name": name,
        "major": 9,
        "minor": 0,
        "multi_processor_count": units,
        "total_memory": memory,
        "warp_size": 32,
        "uuid": uuid,
    }


# D14
def test_mi325x(tmp_path: Path) -> None:
    seen = look(mi325x_node(), tmp_path)
    device = seen.device
    assert seen.warnings == []
    assert (device["vendor"], device["arch"], device["product"]) == ("amd", "gfx942", "mi325x")
    assert (device["units"], device["wave_size"], device["lds_bytes"]) == (304, 64, 65_536)
    assert device["memory_bytes"] == 256 * GiB - 16 * (1 << 20)
    assert (device["fp8"], device["bandwidth"]) == ("fnuz", 6.0e12)
    assert device["partition"] == "SPX/NPS1"
    assert device["links"] == [{"kind": "xgmi", "peers": 1, "bandwidth": 64e9}]
    assert (device["driver"], device["runtime"]) == ("6.14.14", "7.0.51831")
    # torch's device 0 is amdsmi's device 5.
    assert (device["pci"], device["pci_device_id"]) == ("0000:55:00.0", 0x74A5)
    sources = device["sources"]
    assert (sources["units"], sources["partition"], sources["product"]) == ("torch", "amdsmi", "pci id")
    assert (sources["fp8"], sources["lds_bytes"]) == ("architecture", "architecture")
    assert set(sources) == {name for name, value in device.items() if value is not None and name != "sources"}


# D06
def test_mi300x_partition_inherits_the_cards_mode(tmp_path: Path) -> None:
    seen = look(cpx_node(), tmp_path)
    assert seen.warnings == []
    assert (seen.device["product"], seen.device["partition"]) == ("mi300x", "CPX/NPS4")
    assert (seen.device["units"], seen.device["memory_bytes"]) == (38, 48 * GiB)
    assert seen.device["pci"] == "0000:0c:00.3"
    assert seen.device["links"] == [{"kind": "xgmi", "peers": 7, "bandwidth": 64e9}]


def test_partitions_that_hide_their_uuid_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    node = replace(cpx_node(), not_supported=("amdsmi_get_gpu_enumeration_info",))
    node.torch = [{**values, "pci_domain_id": 0, "pci_bus_id": 0x0C, "pci_device_id": 0} for values in node.torch]
    seen = look(node, tmp_path)
    # The shared serial of eight partitions names none of them; the card's address names the card.
    assert (seen.device["product"], seen.device["partition"]) == ("mi300x", "CPX/NPS4")
    assert seen.device["units"] == 38
    assert seen.device["links"] is None


# D14
def test_mi355x(tmp_path: Path) -> None:
    serial = AMD_SERIAL.format(9)
    gpu = AmdGpu((0, 0x75, 0, 0), serial.upper(), serial, 0x75A3, 256, 294_896, "AMD Instinct MI355X-O")
    torch = [amd_torch(serial, 256, 287 * GiB, "gfx950", "AMD Instinct MI355X-O", bus=0x75)]
    seen = look(Node("amd", [gpu], torch, "7.1.0"), tmp_path)
    device = seen.device
    assert (device["product"], device["arch"], device["fp8"]) == ("mi355x", "gfx950", "fn")
    assert (device["lds_bytes"], device["bandwidth"]) == (163_840, 8.0e12)
    assert (device["links"], device["pci"]) == ([], "0000:75:00.0")
    assert seen.warnings == []


def test_h200(tmp_path: Path) -> None:
    seen = look(h200_node(), tmp_path)
    device = seen.device
    assert seen.warnings == []
    assert (device["vendor"], device["arch"], device["product"], device["fp8"]) == (
        "nvidia",
        "sm_90",
        "h200",
        "fn",
    )
    assert (device["units"], device["wave_size"], device["lds_bytes"]) == (132, 32, 233_472)
    # torch's device 0 is NVML's device 1.
    assert (device["pci"], device["pci_device_id"], device["driver"]) == (
        "0000:1a:00.0",
        0x2335,
        "580.159.04",
    )
    assert device["links"] == [{"kind": "nvlink", "peers": 1, "bandwidth": 450e9}]
    assert (device["partition"], device["bandwidth"]) == (None, 4.8e12)


# D08
def test_h200_mig_whose_card_is_off_limits(tmp_path: Path) -> None:
    seen = look(h200_node(mig=True), tmp_path)
    device = seen.device
    assert seen.warnings == []
    assert (device["units"], device["memory_bytes"]) == (32, 34 * GiB)
    assert (device["product"], device["partition"]) == ("h200", "MIG 2g.35gb")
    assert (device["pci"], device["pci_device_id"], device["links"]) == (None, None, None)
    assert device["sources"]["product"] == "marketing name"


# D08
def test_mig_container_that_may_not_start_nvml(tmp_path: Path) -> None:
    seen = look(replace(h200_node(mig=True), init_status=4), tmp_path)
    assert (seen.device["units"], seen.device["memory_bytes"]) == (32, 34 * GiB)
    assert seen.device["product"] == "h200"
    assert len(seen.warnings) == 1 and "NoPermission" in seen.warnings[0] and "MIG" in seen.warnings[0]


# D09
def test_unknown_memory_comes_from_the_next_source_and_is_never_zero(tmp_path: Path) -> None:
    node = h200_node()
    node.torch[0] = {**node.torch[0], "raises": ["total_memory"]}
    del node.torch[0]["total_memory"]
    seen = look(node, tmp_path / "a")
    assert (seen.device["memory_bytes"], seen.device["sources"]["memory_bytes"]) == (150_754_820_096, "nvml")
    assert seen.device["product"] == "h200"
    for gpu in node.gpus:
        gpu.memory_status = 4
    seen = look(node, tmp_path / "b")
    assert seen.device["memory_bytes"] is None and "memory_bytes" not in seen.device["sources"]
    assert (seen.device["product"], seen.device["units"]) == ("h200", 132)


# D01
def test_amdsmi_with_a_symbol_that_the_library_lacks(tmp_path: Path) -> None:
    seen = look(replace(mi325x_node(), leave_out=("amdsmi_reset_gpu",)), tmp_path)
    assert_torch_alone(seen.device)
    assert len(seen.warnings) == 1
    assert "undefined symbol: amdsmi_reset_gpu" in seen.warnings[0] and "not be above ROCm's" in seen.warnings[0]


# D02
@pytest.mark.parametrize("content", [None, b"not a library"], ids=["absent", "broken"])
def test_amdsmi_without_a_library_that_loads(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "lib").mkdir()
        (tmp_path / "lib" / "libamd_smi.so").write_bytes(content)
    pytest.importorskip("importlib.util").find_spec("amdsmi") or pytest.skip(
        "the stand-in library needs the package amdsmi"
    )
    seen = look(
        mi325x_node(),
        tmp_path,
        library={"ROCM_PATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path / "lib")},
    )
    assert_torch_alone(seen.device)
    assert len(seen.warnings) == 1 and "amdsmi cannot be imported" in seen.warnings[0]
    assert seen.stdout == "", "what amdsmi prints at import must not reach the caller's standard output"


# D01 D02
@pytest.mark.parametrize("error", ["AttributeError", "OSError", "KeyError", "RuntimeError", "SystemError"])
def test_amdsmi_that_raises_anything_at_import(tmp_path: Path, error: str) -> None:
    (tmp_path / "amdsmi.py").write_text(f"print('noise')\nraise {error}('broken here')\n")
    node = replace(mi325x_node(), before=f"sys.path.insert(0, {str(tmp_path)!r})")
    seen = look(node, tmp_path, library={})
    assert_torch_alone(seen.device)
    assert len(seen.warnings) == 1 and error in seen.warnings[0] and "broken here" in seen.warnings[0]


# D03
@pytest.mark.parametrize("status", [10, 14])
def test_no_permission_for_the_render_node(tmp_path: Path, status: int) -> None:
    seen = look(replace(mi325x_node(), init_status=status), tmp_path)
    assert_torch_alone(seen.device)
    assert len(seen.warnings) == 1
    assert "groups render and video" in seen.warnings[0] and "/dev/dri" in seen.warnings[0]


# D04
def test_no_amdsmi(tmp_path: Path) -> None:
    seen = look(replace(mi325x_node(), before="sys.modules['amdsmi'] = None"), tmp_path, library={})
    assert_torch_alone(seen.device)
    assert len(seen.warnings) == 1
    assert "not installed" in seen.warnings[0] and "/opt/rocm/share/amd_smi" in seen.warnings[0]


# D05
def test_metrics_newer_than_the_library(tmp_path: Path) -> None:
    node = mi325x_node()
    for gpu in node.gpus:
        gpu.units = 0xFFFFFFFF  # the binding turns it into "N/A"
    node.not_supported = ("amdsmi_get_gpu_vram_info", "amdsmi_get_gpu_driver_info")
    seen = look(node, tmp_path)
    assert (seen.device["units"], seen.device["product"]) == (304, "mi325x")
    assert (seen.device["driver"], seen.device["sources"]["bandwidth"]) == (None, "datasheet")
    assert seen.warnings == []


# D16
@pytest.mark.parametrize("how", ["not supported", "renamed"])
def test_partition_calls_that_a_virtual_machine_or_version_lacks(tmp_path: Path, how: str) -> None:
    node = mi325x_node()
    calls = ("amdsmi_get_gpu_compute_partition", "amdsmi_get_gpu_memory_partition")
    if how == "not supported":
        node.not_supported = calls
    else:
        node.before = "import amdsmi\n" + "\n".join(f"del amdsmi.{name}" for name in calls)
    seen = look(node, tmp_path)
    assert seen.device["partition"] is None and "partition" not in seen.device["sources"]
    assert (seen.device["product"], seen.warnings) == ("mi325x", [])


# D11
def test_names_in_bytes(tmp_path: Path) -> None:
    node = h200_node()
    del node.torch[0]["name"]
    node.before = "import pynvml\npynvml.nvmlDeviceGetName = lambda handle: b'NVIDIA H200'"
    seen = look(node, tmp_path)
    assert (seen.device["name"], seen.device["sources"]["name"]) == ("NVIDIA H200", "nvml")


# D11
def test_an_old_pynvml_that_hides_nvidia_ml_py(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("class NVMLError(Exception): pass\ndef nvmlInit(): pass\n")
    node = replace(h200_node(), before=f"sys.path.insert(0, {str(tmp_path)!r})")
    seen = look(node, tmp_path, library={})
    assert seen.device["product"] == "h200"
    assert len(seen.warnings) == 1
    assert str(tmp_path / "pynvml.py") in seen.warnings[0] and "pip uninstall pynvml" in seen.warnings[0]


# D13
def test_driver_and_library_of_different_versions(tmp_path: Path) -> None:
    seen = look(replace(h200_node(), init_status=18), tmp_path)
    device = seen.device
    assert (device["product"], device["units"], device["driver"]) == ("h200", 132, None)
    assert len(seen.warnings) == 1
    assert "LibRmVersionMismatch" in seen.warnings[0] and "reload the driver or reboot" in seen.warnings[0]


@pytest.mark.parametrize("vendor", ["amd", "nvidia"])
def test_a_device_that_the_library_does_not_list(tmp_path: Path, vendor: str) -> None:
    node = mi325x_node() if vendor == "amd" else h200_node()
    node.gpus = node.gpus[:1]
    seen = look(node, tmp_path)
    # Never another device's values: unknown, and one warning.
    assert (seen.device["pci"], seen.device["links"]) == (None, None)
    assert len(seen.warnings) == 1 and node.torch[0]["uuid"] in seen.warnings[0]


def test_sysfs_knows_what_the_library_does_not(tmp_path: Path) -> None:
    node = mi325x_node()
    node.before = "sys.modules['amdsmi'] = None"
    node.torch[0].update(pci_domain_id=0, pci_bus_id=0x55, pci_device_id=0)
    folder = tmp_path / "sys" / "bus" / "pci" / "devices" / "0000:55:00.0"
    folder.mkdir(parents=True)
    (folder / "device").write_text("0x74a5\n")
    (folder / "current_compute_partition").write_text("DPX\n")
    (folder / "current_memory_partition").write_text("NPS2\n")
    module = tmp_path / "sys" / "module" / "amdgpu"
    module.mkdir(parents=True)
    (module / "version").write_text("6.12.12\n")
    seen = look(node, tmp_path, library={})
    assert (seen.device["partition"], seen.device["driver"]) == ("DPX/NPS2", "6.12.12")
    assert (seen.device["pci_device_id"], seen.device["sources"]["product"]) == (0x74A5, "pci id")


def assert_torch_alone(device: dict[str, Any]) -> None:
    """What is left of the MI325X node where amdsmi is of no use."""
    assert (device["vendor"], device["arch"], device["product"]) == ("amd", "gfx942", "mi325x")
    assert (device["units"], device["wave_size"], device["fp8"]) == (304, 64, "fnuz")
    assert (device["partition"], device["links"], device["pci_device_id"]) == (None, None, None)
    assert device["sources"]["product"] == "architecture, units, memory"


@pytest.mark.parametrize("variable", ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
def test_visibility_by_index_does_not_shift_the_match(tmp_path: Path, variable: str) -> None:
    node = h200_node() if variable.startswith("CUDA") else mi325x_node()
    node.env = {variable: "5,2"}
    seen = look(node, tmp_path)
    assert seen.device["pci"] == ("0000:1a:00.0" if node.vendor == "nvidia" else "0000:55:00.0")
    assert os.environ.get(variable) is None
