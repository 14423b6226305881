"""What architectures and products are known for: datasheets and instruction sets, no device access.

A product is told apart by architecture, PCI device id, compute units and memory, in that order. Marketing
names come last: one MI300X may call itself "AMD Radeon Graphics".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GiB = 1 << 30


@dataclass(frozen=True)
class ArchFacts:
    """What every device of an architecture shares.

    `fp8` is the e4m3 encoding that its matrix units multiply natively, None where they multiply none.
    `lds_bytes` is the LDS or shared memory of one compute unit.
    """

    fp8: str | None
    wave_size: int
    lds_bytes: int | None


@dataclass(frozen=True)
class Product:
    """One product as sold: `units` are compute units or SMs, `memory` the number on the label in GB.

    `bandwidth` (bytes/s) and `link_bandwidth` (bytes/s, one direction, one device to all others in the usual
    8-GPU node) are datasheet figures; `mesh` says that each pair of devices has its own link.
    """

    name: str
    vendor: str
    arch: str
    units: int
    memory: int
    pci_ids: tuple[int, ...]
    bandwidth: float
    link_bandwidth: float | None
    mesh: bool
    marketing: tuple[str, ...]


ARCHS: dict[str, ArchFacts] = {
    "gfx908": ArchFacts(None, 64, 65_536),
    "gfx90a": ArchFacts(None, 64, 65_536),
    "gfx940": ArchFacts("fnuz", 64, 65_536),
    "gfx941": ArchFacts("fnuz", 64, 65_536),
    "gfx942": ArchFacts("fnuz", 64, 65_536),
    "gfx950": ArchFacts("fn", 64, 163_840),
    "gfx1100": ArchFacts(None, 32, 65_536),
    "gfx1101": ArchFacts(None, 32, 65_536),
    "gfx1151": ArchFacts(None, 32, 65_536),
    "gfx1200": ArchFacts("fn", 32, 65_536),
    "gfx1201": ArchFacts("fn", 32, 65_536),
    "sm_80": ArchFacts(None, 32, 167_936),
    "sm_86": ArchFacts(None, 32, 102_400),
    "sm_89": ArchFacts("fn", 32, 102_400),
    "sm_90": ArchFacts("fn", 32, 233_472),
    "sm_100": ArchFacts("fn", 32, 233_472),
    "sm_103": ArchFacts("fn", 32, 233_472),
    "sm_120": ArchFacts("fn", 32, 102_400),
}

PRODUCTS: tuple[Product, ...] = (
    Product(
        "mi300x",
        "amd",
        "gfx942",
        304,
        192,
        (0x74A1, 0x74A9, 0x74B5, 0x74BD),
        5.3e12,
        448e9,
        True,
        ("MI300X",),
    ),
    Product("mi308x", "amd", "gfx942", 80, 192, (0x74A2, 0x74A8, 0x74B6), 5.3e12, 448e9, True, ("MI308X",)),
    Product("mi300a", "amd", "gfx942", 228, 128, (0x74A0,), 5.3e12, None, True, ("MI300A",)),
    Product("mi325x", "amd", "gfx942", 304, 256, (0x74A5, 0x74B9), 6.0e12, 448e9, True, ("MI325X",)),
    Product("mi350x", "amd", "gfx950", 256, 288, (0x75A0, 0x75B0), 8.0e12, 539e9, True, ("MI350X",)),
    Product("mi355x", "amd", "gfx950", 256, 288, (0x75A3, 0x75B3), 8.0e12, 539e9, True, ("MI355X",)),
    Product("h100", "nvidia", "sm_90", 132, 80, (0x2330,), 3.35e12, 450e9, False, ("H100 80GB HBM3", "H100 SXM")),
    Product("h100-pcie", "nvidia", "sm_90", 114, 80, (0x2331,), 2.0e12, None, False, ("H100 PCIe",)),
    Product("h100-nvl", "nvidia", "sm_90", 132, 94, (0x2321,), 3.9e12, None, False, ("H100 NVL",)),
    Product("h20", "nvidia", "sm_90", 78, 96, (0x2329,), 4.0e12, 450e9, False, ("H20",)),
    Product("h200-nvl", "nvidia", "sm_90", 132, 141, (0x233B,), 4.8e12, None, False, ("H200 NVL",)),
    Product("h200", "nvidia", "sm_90", 132, 141, (0x2335,), 4.8e12, 450e9, False, ("H200",)),
)

_BY_NAME = {product.name: product for product in PRODUCTS}
# Drivers and firmware keep some memory for themselves: a device shows up to this share less than its label.
_MEMORY_SLACK = 0.08


def product_named(name: str) -> Product | None:
    """The product with this lower-case name ("mi325x"), or None."""
    return _BY_NAME.get(name.lower())


def arch_of(gcn_arch_name: str) -> str:
    """The architecture in HIP's "gfx942:sramecc+:xnack-": "gfx942"."""
    return gcn_arch_name.split(":", 1)[0].strip()


def arch_facts(arch: str) -> ArchFacts | None:
    """What is known of an architecture, or None. Asked by the whole name: gfx942 and gfx950 differ."""
    return ARCHS.get(arch)


def identify(
    arch: str,
    pci_device_id: int | None,
    units: int | None,
    memory_bytes: int | None,
    marketing: str | None,
) -> tuple[Product, str] | None:
    """The product and what told it, or None where nothing fits.

    A known PCI device id decides alone, also for a partition, whose units and memory are a share. Without
    one, units and memory must both fit a single product of the architecture. The marketing name comes last:
    it separates products that are alike otherwise and names a partition.
    """
    candidates = [product for product in PRODUCTS if product.arch == arch]
    if pci_device_id is not None:
        for product in candidates:
            if pci_device_id in product.pci_ids:
                return product, "pci id"
    else:
        fitting = [p for p in candidates if units == p.units and _fits(memory_bytes, p.memory)]
        if len(fitting) == 1:
            return fitting[0], "architecture, units, memory"
        candidates = fitting or candidates
    for product in candidates:
        if marketing and any(re.search(rf"\b{word}\b", marketing) for word in product.marketing):
            return product, "marketing name"
    return None


def _fits(memory_bytes: int | None, label: int) -> bool:
    if memory_bytes is None:
        return False
    # "141 GB" is decimal on the label and may be more or less than that in GiB: accept both readings.
    return label * 1e9 * (1 - _MEMORY_SLACK) <= memory_bytes <= label * GiB * 1.02
