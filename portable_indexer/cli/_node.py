"""What can be wrong with a node before the first kernel: packages, vendors, permissions. No GPU is touched."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from portable_indexer import _sysfs
from portable_indexer._version import __version__

VENDORS = {0x1002: "amd", 0x10DE: "nvidia"}
DEV = Path("/dev")
TRITON_TESTED = ((3, 6), (3, 9))
_PACKAGES = ("torch", "triton", "amdsmi", "nvidia-ml-py", "numpy", "vllm")
# Several distributions can hold these, so what counts is what the import says of itself.
_IMPORTED = ("torch", "triton")


@dataclass(frozen=True)
class Finding:
    """Something wrong, or worth knowing: an error keeps the indexer from running as it should."""

    level: Literal["error", "warning", "note"]
    what: str
    remedy: str = ""


def versions() -> dict[str, str | None]:
    """Versions of the packages that matter, None where absent: torch's and Triton's as imported, if they import."""
    found: dict[str, str | None] = {"portable-indexer": __version__, **recorded(_PACKAGES)}
    for name in _IMPORTED:
        # Any error: a broken torch fails in many ways, and is reported where it is used.
        with contextlib.suppress(Exception):
            found[name] = str(importlib.import_module(name).__version__)
    return found


def recorded(names: Sequence[str]) -> dict[str, str | None]:
    """Versions that installed distributions record, the first of each name on the path; None where absent."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def owners(package: str) -> list[str]:
    """Distributions that installed files into the import directory `package`."""
    return sorted(set(importlib.metadata.packages_distributions().get(package, [])))


def package_findings(torch_runtime: str | None, hip: bool, arch: str) -> list[Finding]:
    """Packages that fight over a directory or do not fit each other.

    Args:
        torch_runtime: version of HIP or CUDA that torch was built for, None for a CPU build.
        hip: whether that is HIP.
        arch: the device's architecture.
    """
    found: list[Finding] = []
    both = owners("triton")
    if len(both) > 1:
        keep = "pytorch-triton-rocm" if hip else "triton"
        found.append(
            Finding(
                "error",
                f"{len(both)} distributions own the directory triton/: {', '.join(both)}; each overwrote the other",
                f"pip uninstall {' '.join(both)}, then install only the one that torch was built with (likely {keep})",
            )
        )
    seen = versions()
    for name, listed in recorded(_IMPORTED).items():
        real = seen.get(name)
        # A build's own label ("+cu130") need not be recorded.
        if listed and real and real.partition("+")[0] != listed.partition("+")[0]:
            where = getattr(importlib.import_module(name), "__file__", None)
            record = importlib.metadata.distribution(name).locate_file("")
            found.append(
                Finding(
                    "warning",
                    f"{name} {real} is imported, from {where}, but {name} {listed} is recorded first, in {record}",
                    f"keep one installation of {name} on the path: installers go by the record",
                )
            )
    if "pynvml" in owners("pynvml"):
        found.append(
            Finding(
                "warning",
                "the distribution pynvml is installed; old ones hide nvidia-ml-py, which has the same module name",
                "pip uninstall pynvml, then pip install --force-reinstall nvidia-ml-py",
            )
        )
    amdsmi = seen["amdsmi"]
    if hip and amdsmi and torch_runtime and numbers(amdsmi)[:2] > numbers(torch_runtime)[:2]:
        found.append(
            Finding(
                "warning",
                f"amdsmi {amdsmi} is newer than ROCm {torch_runtime}",
                "install an amdsmi whose version is not above ROCm's",
            )
        )
    triton = seen["triton"]
    if triton is not None and not arch.startswith("cpu"):
        if arch == "gfx950" and numbers(triton)[:3] == (3, 7, 0):
            found.append(Finding("error", "Triton 3.7.0 miscompiles for gfx950", "install Triton 3.6 or 3.9"))
        elif numbers(triton)[:2] not in TRITON_TESTED:
            tested = ", ".join(".".join(map(str, version)) for version in TRITON_TESTED)
            found.append(Finding("warning", f"Triton {triton} is not one of those tested ({tested})"))
    return found


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "7.0.51831-abc" is (7, 0, 51831)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def vendor_findings(bus: Sequence[tuple[str, int, int]], torch_vendor: str | None, visible: int) -> list[Finding]:
    """GPUs that torch cannot drive.

    Args:
        bus: GPUs on the PCI bus (`_sysfs.pci_devices`).
        torch_vendor: "amd" or "nvidia" as torch was built, None for a CPU build.
        visible: GPUs that torch sees.
    """
    vendors = {VENDORS[vendor] for _, vendor, _ in bus if vendor in VENDORS}
    if not vendors or visible:
        return []
    have = f"{len(bus)} {' and '.join(sorted(vendors))} GPU(s) on the PCI bus"
    wanted = {"amd": "ROCm", "nvidia": "CUDA"}
    if torch_vendor not in vendors:
        build = {"amd": "for ROCm", "nvidia": "for CUDA", None: "for the CPU only"}[torch_vendor]
        names = " or ".join(wanted[vendor] for vendor in sorted(vendors))
        return [
            Finding(
                "error",
                f"{have}, but this torch was built {build}",
                f"install the {names} build of torch; give its index alone (--index-url), since a second index can "
                "silently bring another build",
            )
        ]
    hidden = [name for name in os.environ if name.endswith("VISIBLE_DEVICES")]
    reason = f" ({', '.join(f'{name}={os.environ[name]!r}' for name in hidden)})" if hidden else ""
    return [
        Finding(
            "error",
            f"{have}, but torch sees none{reason}",
            "check driver, device files and *_VISIBLE_DEVICES; in a container, pass the devices",
        )
    ]


def permission_findings(bus: Sequence[tuple[str, int, int]]) -> list[Finding]:
    """Device files that exist and that this user may not open."""
    vendors = {VENDORS[vendor] for _, vendor, _ in bus if vendor in VENDORS}
    found: list[Finding] = []
    if "amd" in vendors:
        files = [DEV / "kfd", *sorted((DEV / "dri").glob("renderD*"))]
        closed = [str(file) for file in files if file.exists() and not os.access(file, os.R_OK | os.W_OK)]
        if closed:
            found.append(
                Finding(
                    "error" if str(DEV / "kfd") in closed else "warning",
                    f"this user may not open {', '.join(closed)}",
                    "add it to the groups render and video; in a container pass --device /dev/kfd "
                    "--device /dev/dri --group-add render",
                )
            )
        if not (DEV / "kfd").exists():
            found.append(Finding("error", f"{DEV / 'kfd'} is missing", "load amdgpu, or pass --device /dev/kfd"))
    if "nvidia" in vendors:
        file = DEV / "nvidiactl"
        if file.exists() and not os.access(file, os.R_OK | os.W_OK):
            found.append(Finding("error", f"this user may not open {file}", "check its owner and mode"))
    return found


def mixed_finding(names: Sequence[str]) -> list[Finding]:
    """Visible GPUs of different products, given their names."""
    if len(set(names)) < 2:
        return []
    kinds = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
    text = f"the visible GPUs differ: {kinds}; the slowest sets the pace, and other architectures other bits"
    return [Finding("warning", text, "show each job GPUs of one kind (*_VISIBLE_DEVICES)")]


def partition_finding(device: Any) -> Finding | None:
    """What a partition means for the indexer; None for a whole device."""
    name = device.partition
    if name is None or name.startswith("SPX"):
        return None
    text = f"the device is a partition ({name}) with {device.units} units: scoring takes as much longer as units are"
    text += " missing, and an exchange among partitions was never measured, so nothing is sharded by itself"
    return Finding("note", text, "run `portable-indexer tune` on the partitions, or use whole devices (SPX, no MIG)")


def collectives() -> str | None:
    """RCCL or NCCL and its version as torch links it, None without a GPU build."""
    import torch

    if torch.version.hip is None and torch.version.cuda is None:
        return None
    try:
        from torch.cuda import nccl

        number: Any = nccl.version()
    except Exception:
        return None
    text = ".".join(map(str, number)) if isinstance(number, tuple) else str(number)
    return f"{'RCCL' if torch.version.hip else 'NCCL'} {text}"


def bus_devices() -> list[tuple[str, int, int]]:
    """GPUs on the PCI bus, as far as /sys tells."""
    return _sysfs.pci_devices()


def environment() -> Mapping[str, str]:
    """Variables that change what the indexer does or sees."""
    names = ("TRITON_INTERPRET", "VLLM_PLUGINS", "NCCL_DEBUG", "CUDA_DEVICE_ORDER")
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("PORTABLE_INDEXER_") or name.endswith("VISIBLE_DEVICES") or name in names
    }
