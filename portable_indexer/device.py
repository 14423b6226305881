"""Which device this is, as a value: found on first use, never at import, each field with its source.

Torch's device properties come first; amdsmi or nvidia-ml-py and sysfs fill in what torch does not know. A
field that nobody knows is None, never 0. A library that is missing, broken or forbidden costs one warning.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, cast

from portable_indexer import _sysfs
from portable_indexer._identity import Identity, LibraryProblem, LinkList
from portable_indexer._products import PRODUCTS, Product, arch_facts, arch_of, identify, product_named

logger = logging.getLogger("portable_indexer")

Vendor = Literal["amd", "nvidia", "cpu"]
Fp8 = Literal["fn", "fnuz"]
LinkKind = Literal["xgmi", "nvlink", "pcie"]


@dataclass(frozen=True)
class Link:
    """A kind of connection from this device to other visible devices.

    `kind` is "xgmi", "nvlink" or "pcie"; `peers` counts the devices reached; `bandwidth` is bytes/s in one
    direction to one peer (xgmi) or of the whole port (nvlink, pcie), None where unknown.
    """

    kind: LinkKind
    peers: int
    bandwidth: float | None = None


@dataclass(frozen=True)
class Device:
    """One device as the indexer sees it.

    Attributes:
        vendor: "amd", "nvidia" or "cpu".
        arch: "gfx942", "gfx950", "sm_90", ...; "cpu" without a GPU.
        product: "mi325x", "h200", ... as the tuning files are named.
        units: compute units or SMs that a kernel can use (a partition's share).
        wave_size: threads of a wave or warp.
        lds_bytes: LDS or shared memory of one compute unit.
        memory_bytes: memory of this device or partition.
        bandwidth: memory bandwidth, bytes/s, of the whole product.
        fp8: e4m3 encoding that the matrix units multiply natively.
        partition: "SPX/NPS1", "CPX/NPS4", "MIG 1g.18gb", ...
        links: connections to the other visible devices.
        driver, runtime: versions of the kernel driver and of HIP or CUDA as torch was built for.
        index: torch's index of the device in this process.
        uuid, pci: how the vendor's library knows the same device; pci as "0000:c1:00.0".
        pci_device_id: 0x74a5, 0x2335, ...
        name: the marketing name.
        sources: for each known field, where its value came from. Not part of equality.
    """

    vendor: Vendor
    arch: str
    product: str | None = None
    units: int | None = None
    wave_size: int | None = None
    lds_bytes: int | None = None
    memory_bytes: int | None = None
    bandwidth: float | None = None
    fp8: Fp8 | None = None
    partition: str | None = None
    links: tuple[Link, ...] | None = None
    driver: str | None = None
    runtime: str | None = None
    index: int | None = None
    uuid: str | None = None
    pci: str | None = None
    pci_device_id: int | None = None
    name: str | None = None
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)

    @property
    def is_gpu(self) -> bool:
        """True for AMD and NVIDIA devices."""
        return self.vendor != "cpu"

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON types, `sources` included."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["links"] = None if self.links is None else [vars(link) for link in self.links]
        values["sources"] = dict(self.sources)
        return values


class Facts:
    """Collects field values from sources in order: the first source that knows a field wins."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}

    def add(self, source: str, **values: Any) -> None:
        """Take from `values` what is known (not None) and was not known before."""
        for name, value in values.items():
            if value is not None and name not in self.values:
                self.values[name] = value
                self.sources[name] = source

    def device(self) -> Device:
        """The device that these facts describe."""
        return Device(**self.values, sources=MappingProxyType(dict(self.sources)))


CPU = Device(vendor="cpu", arch="cpu", sources=MappingProxyType({"vendor": "no GPU in use", "arch": "no GPU in use"}))


def device_of(name: str) -> Device:
    """A device from datasheets alone, by product name: for planning, replay and compile-only work.

    Raises:
        ValueError: for an unknown name, with the names that are known.
    """
    if name.lower() == "cpu":
        return CPU
    product = product_named(name)
    if product is None:
        raise ValueError(f"unknown device {name!r}; known: {', '.join(p.name for p in PRODUCTS)}, cpu")
    facts = Facts()
    facts.add(
        "datasheet",
        vendor=product.vendor,
        arch=product.arch,
        product=product.name,
        units=product.units,
        memory_bytes=product.memory * 10**9,
    )
    _add_known(facts, product)
    return facts.device()


def detect(where: Any = None) -> Device:
    """The device that tensors live on, found once and kept.

    Args:
        where: None for torch's current GPU (the CPU if torch sees none), else anything that names a torch
            device: "cpu", "cuda:1", 1, torch.device.

    Returns:
        The device; a CPU device (vendor "cpu") where there is no GPU.

    Asking for a GPU starts torch's CUDA or HIP runtime in this process, so do not call this before a fork.
    """
    index = _torch_index(where)
    return CPU if index is None else _detect_gpu(index)


def forget() -> None:
    """Drop what `detect` remembers: the next call looks again, and warns again."""
    _detect_gpu.cache_clear()
    _warn_once.cache_clear()


def _torch_index(where: Any) -> int | None:
    """Torch's index of the GPU meant by `where`, None for the CPU."""
    try:
        import torch
    except ImportError:
        return None
    if where is None:
        return torch.cuda.current_device() if torch.cuda.is_available() else None
    device = torch.device("cuda", where) if isinstance(where, int) else torch.device(where)
    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _detect_gpu(index: int) -> Device:
    facts = Facts()
    _add_torch(facts, index)
    mine = _identity(index)
    # The libraries are asked by UUID or PCI address: indices differ under *_VISIBLE_DEVICES.
    peers = [_identity(other) for other in range(_visible_count()) if other != index]
    vendor = facts.values["vendor"]
    try:
        known = _query(vendor, mine, peers)
    except LibraryProblem as problem:
        _warn_once(f"device {index} ({facts.values['arch']}): {problem.cause}; {problem.remedy}")
    else:
        links = known.pop("links", None)
        facts.add("amdsmi" if vendor == "amd" else "nvml", links=_gathered(links), **known)
    facts.add("sysfs", **_sysfs.facts(vendor, Identity(mine.uuid, facts.values.get("pci"))))
    found = identify(
        facts.values["arch"],
        facts.values.get("pci_device_id"),
        facts.values.get("units"),
        facts.values.get("memory_bytes"),
        facts.values.get("name"),
    )
    if found is not None:
        facts.add(found[1], product=found[0].name)
    _add_known(facts, found[0] if found else None)
    return facts.device()


def _query(vendor: str, mine: Identity, peers: list[Identity]) -> dict[str, Any]:
    """What the vendor's management library says. Raises LibraryProblem."""
    if vendor == "amd":
        from portable_indexer import _smi_amd

        return _smi_amd.facts(mine, peers)
    from portable_indexer import _smi_nvidia

    return _smi_nvidia.facts(mine, peers)


def _gathered(links: LinkList | None) -> tuple[Link, ...] | None:
    """One Link for each kind and bandwidth."""
    if links is None:
        return None
    counts = Counter(links).items()
    return tuple(Link(cast("LinkKind", kind), count, bandwidth) for (kind, bandwidth), count in counts)


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _add_torch(facts: Facts, index: int) -> None:
    """What torch's device properties say. A property that cannot be read is unknown, not zero."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    amd = torch.version.hip is not None
    name = _read(properties, "name")
    if isinstance(name, bytes):
        name = name.decode("utf-8", "replace")
    mig = re.search(r"\bMIG (\S+)", name or "")
    identity = _identity(index)
    facts.add(
        "torch",
        vendor="amd" if amd else "nvidia",
        arch=arch_of(properties.gcnArchName) if amd else f"sm_{properties.major}{properties.minor}",
        index=index,
        units=_read(properties, "multi_processor_count"),
        memory_bytes=_read(properties, "total_memory"),
        wave_size=_read(properties, "warp_size"),
        uuid=identity.uuid,
        pci=identity.pci,
        name=name,
        partition=f"MIG {mig[1]}" if mig else None,
        runtime=torch.version.hip if amd else torch.version.cuda,
    )


def _read(properties: Any, name: str) -> Any:
    """A property, None where this torch lacks it, refuses it or says 0."""
    try:
        return getattr(properties, name) or None
    except Exception:
        return None


def _visible_count() -> int:
    import torch

    return torch.cuda.device_count()


def _identity(index: int) -> Identity:
    """How torch names one of its devices."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    uuid = _read(properties, "uuid")
    parts = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    known = [part for part in parts if isinstance(part, int)]
    pci = "{:04x}:{:02x}:{:02x}.0".format(*known) if len(known) == 3 else None
    entries = [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    named = entries[index] if index < len(entries) and entries[index].startswith(("GPU-", "MIG-")) else None
    return Identity(None if uuid is None else str(uuid), pci, named)


def _add_known(facts: Facts, product: Product | None) -> None:
    """What follows from the architecture and the product."""
    known = arch_facts(facts.values["arch"])
    if known is not None:
        facts.add("architecture", fp8=known.fp8, wave_size=known.wave_size, lds_bytes=known.lds_bytes)
    if product is not None:
        facts.add("datasheet", bandwidth=product.bandwidth)
