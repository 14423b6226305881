"""What amdsmi knows of a device that torch sees. Imported only when an AMD device is looked at."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from portable_indexer._identity import Identity, LibraryProblem, LinkList, parent_pci

MISSING = "pip install amdsmi (a version not above ROCm's), or add /opt/rocm/share/amd_smi to PYTHONPATH"
MISMATCH = "install the amdsmi that belongs to this ROCm: its version must not be above ROCm's"
PERMISSION = (
    "let this user open /dev/dri/renderD*: add it to the groups render and video, "
    "in a container pass --device /dev/kfd --device /dev/dri --group-add render"
)
DRIVER = "load the driver (modprobe amdgpu), in a container pass --device /dev/kfd --device /dev/dri"
# Status codes are read by value: they did not move between releases, the names of the exceptions did.
_BY_STATUS = {10: PERMISSION, 14: PERMISSION, 34: DRIVER}


@dataclass(frozen=True)
class _Handle:
    """One processor of amdsmi with the names by which a torch device may be found."""

    raw: Any
    pci: str | None
    uuids: tuple[str, ...]


def facts(me: Identity, peers: Sequence[Identity]) -> dict[str, Any]:
    """Field values of `Device` that amdsmi knows about `me`, unknown ones None.

    Args:
        me: the device, by UUID and PCI address as torch gives them. Indices are never compared: torch's
            follow ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES, amdsmi's do not.
        peers: the other visible devices, for `links`.

    Raises:
        LibraryProblem: if amdsmi cannot be used or does not list the device.
    """
    smi = _load()
    with _session(smi):
        try:
            handles = [_describe(smi, raw) for raw in smi.amdsmi_get_processor_handles()]
        except Exception as error:
            raise LibraryProblem(f"amdsmi cannot list the GPUs: {_text(error)}", MISMATCH) from error
        mine = _match(handles, me)
        if mine is None:
            raise LibraryProblem(
                f"amdsmi lists {len(handles)} GPUs, none of them with UUID {me.uuid} or PCI address {me.pci}",
                "check that the container passes the same devices to /dev/dri and /dev/kfd",
            )
        asic = _ask(smi, "amdsmi_get_gpu_asic_info", mine.raw) or {}
        vram = _ask(smi, "amdsmi_get_gpu_vram_info", mine.raw) or {}
        driver = _ask(smi, "amdsmi_get_gpu_driver_info", mine.raw) or {}
        gigabytes, mebibytes = _positive(vram.get("vram_max_bandwidth")), _positive(vram.get("vram_size"))
        return {
            "pci": mine.pci,
            "pci_device_id": _hexadecimal(asic.get("device_id")),
            "name": _known(asic.get("market_name")),
            "driver": _known(driver.get("driver_version")),
            "memory_bytes": None if mebibytes is None else mebibytes << 20,
            "bandwidth": None if gigabytes is None else gigabytes * 1e9,
            "partition": _partition(smi, mine, handles),
            "links": _links(smi, mine, [_match(handles, peer) for peer in peers]),
        }


def _load() -> ModuleType:
    """Import amdsmi. It prints to standard output where it finds no library, and raises anything at all."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            import amdsmi
    except ModuleNotFoundError as error:
        if error.name == "amdsmi":
            raise LibraryProblem("the Python package amdsmi is not installed", MISSING) from error
        raise LibraryProblem(f"amdsmi cannot be imported: {_text(error)}", MISMATCH) from error
    except Exception as error:
        said = " ".join(printed.getvalue().split())
        raise LibraryProblem(f"amdsmi cannot be imported: {_text(error)} {said}".strip(), MISMATCH) from error
    module: ModuleType = amdsmi
    return module


@contextlib.contextmanager
def _session(smi: ModuleType) -> Iterator[None]:
    try:
        smi.amdsmi_init()
    except Exception as error:
        remedy = _BY_STATUS.get(getattr(error, "err_code", None) or 0, MISMATCH)
        raise LibraryProblem(f"amdsmi_init failed: {_text(error)}", remedy) from error
    try:
        yield
    finally:
        # It counts its users; a failing shutdown leaves nothing to be done.
        with contextlib.suppress(Exception):
            smi.amdsmi_shut_down()


def _describe(smi: ModuleType, raw: Any) -> _Handle:
    bdf = _known(_ask(smi, "amdsmi_get_gpu_device_bdf", raw))
    enumeration = _ask(smi, "amdsmi_get_gpu_enumeration_info", raw) or {}
    asic = _ask(smi, "amdsmi_get_gpu_asic_info", raw) or {}
    names = (_known(enumeration.get("hip_uuid")), _known(asic.get("asic_serial")))
    return _Handle(raw, bdf.lower() if bdf else None, tuple(_serial(name) for name in names if name))


def _match(handles: Sequence[_Handle], device: Identity) -> _Handle | None:
    """The handle of a torch device: by its own UUID, by a serial that only one handle has, by PCI address."""
    if device.uuid is not None:
        serial = _serial(device.uuid)
        for place in (0, -1):
            found = [handle for handle in handles if handle.uuids and handle.uuids[place] == serial]
            if len(found) == 1:
                return found[0]
    for handle in handles:
        if device.pci is not None and handle.pci == device.pci:
            return handle
    return None


def _serial(uuid: str) -> str:
    """The 16 hexadecimal digits behind "GPU-6f1a...", "0x6F1A..." or torch's form.

    HIP fills the 16 bytes of a UUID with the serial's digits as text, and torch prints those bytes in
    hexadecimal: 36663161-... stands for "6f1a...".
    """
    plain = uuid.lower().removeprefix("gpu-").removeprefix("0x").replace("-", "")
    if len(plain) == 32:
        with contextlib.suppress(ValueError):
            text = bytes.fromhex(plain).decode("ascii")
            int(text, 16)
            return text.lower()
    return plain


def _partition(smi: ModuleType, mine: _Handle, handles: Sequence[_Handle]) -> str | None:
    """ "CPX/NPS4". Only the first partition of a card may answer: the others inherit its answer."""
    first = parent_pci(mine.pci) if mine.pci else None
    raws = [mine.raw, *(handle.raw for handle in handles if first is not None and handle.pci == first)]
    parts: list[str] = []
    for name in ("amdsmi_get_gpu_compute_partition", "amdsmi_get_gpu_memory_partition"):
        part = next((known for raw in raws if (known := _known(_ask(smi, name, raw)))), None)
        if part is not None:
            parts.append(part)
    return "/".join(parts) or None


def _links(smi: ModuleType, mine: _Handle, peers: Sequence[_Handle | None]) -> LinkList | None:
    """Kind and bandwidth (bytes/s, one direction) to each peer; None where any of them is unknown."""
    kinds = getattr(smi, "AmdSmiLinkType", None) or getattr(smi, "AmdSmiIoLinkType", None)
    found: LinkList = []
    for peer in peers:
        answer = _ask(smi, "amdsmi_topo_get_link_type", mine.raw, peer.raw) if peer else None
        if answer is None or kinds is None:
            return None
        try:
            name = kinds(answer["type"]).name
        except (ValueError, KeyError, TypeError):
            return None
        kind = "xgmi" if "XGMI" in name else "pcie" if "PCI" in name else None
        if kind is None or peer is None:
            return None
        limits = _ask(smi, "amdsmi_get_minmax_bandwidth_between_processors", mine.raw, peer.raw) or {}
        megabytes = _positive(limits.get("max_bandwidth"))
        found.append((kind, None if megabytes is None else megabytes * 1e6))
    return found


def _ask(smi: ModuleType, name: str, *arguments: Any) -> Any:
    """The answer of one call, None where the call is missing from this version, refused or failing."""
    call: Callable[..., Any] | None = getattr(smi, name, None)
    if call is None:
        return None
    try:
        return call(*arguments)
    except Exception:
        return None


def _known(value: Any) -> str | None:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return text if isinstance(text, str) and text.strip() and text.strip().upper() != "N/A" else None


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _hexadecimal(value: Any) -> int | None:
    if isinstance(value, int):
        return value or None
    try:
        return int(value, 16) or None
    except (TypeError, ValueError):
        return None


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
