"""What Linux itself says of a device, where /sys is readable: no vendor library needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from portable_indexer._identity import Identity, parent_pci

ROOT = Path("/sys")


def facts(vendor: str, device: Identity) -> dict[str, Any]:
    """Field values of `Device` that sysfs knows, unknown ones None.

    The driver's version, and for a known PCI address the device id and AMD's partition modes, which only
    function 0 of a card has.
    """
    module = "amdgpu" if vendor == "amd" else "nvidia"
    values: dict[str, Any] = {"driver": _line(ROOT / "module" / module / "version")}
    if device.pci is None:
        return values
    folder = ROOT / "bus" / "pci" / "devices" / device.pci
    card = ROOT / "bus" / "pci" / "devices" / parent_pci(device.pci)
    text = _line(folder / "device") or _line(card / "device")
    values["pci_device_id"] = int(text, 16) if text else None
    if vendor == "amd":
        parts = [_line(card / f"current_{part}_partition") for part in ("compute", "memory")]
        values["partition"] = "/".join(part for part in parts if part) or None
    return values


def pci_devices() -> list[tuple[str, int, int]]:
    """Address, vendor id and device id of every GPU (display class 0x03, or AMD's 0x12) on the PCI bus."""
    found: list[tuple[str, int, int]] = []
    try:
        folders = sorted((ROOT / "bus" / "pci" / "devices").iterdir())
    except OSError:
        return found
    for folder in folders:
        vendor, device, kind = (_line(folder / name) for name in ("vendor", "device", "class"))
        if vendor and device and kind and kind[:4] in ("0x03", "0x12") and vendor in ("0x1002", "0x10de"):
            found.append((folder.name, int(vendor, 16), int(device, 16)))
    return found


def _line(path: Path) -> str | None:
    """The file's text, None where it is missing, unreadable, empty or "N/A"."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return text if text and text.upper() != "N/A" else None
