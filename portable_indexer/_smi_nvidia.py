"""What NVML knows of a device that torch sees, through nvidia-ml-py. Imported only for an NVIDIA device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from portable_indexer._identity import Identity, LibraryProblem, LinkList, normal_pci

MISSING = "pip install nvidia-ml-py"
SHADOWED = "an old pynvml hides nvidia-ml-py: pip uninstall pynvml, pip install --force-reinstall nvidia-ml-py"
NOT_FOUND = "install the driver; start a container with its GPUs and NVIDIA_DRIVER_CAPABILITIES=compute,utility"
MISMATCH = "driver and libnvidia-ml.so differ in version: reload the driver or reboot; restart the container"
PERMISSION = "expected within a MIG container; elsewhere let this user open /dev/nvidiactl and /dev/nvidia*"
_BY_ERROR = {
    "NVMLError_LibraryNotFound": NOT_FOUND,
    "NVMLError_DriverNotLoaded": NOT_FOUND,
    "NVMLError_LibRmVersionMismatch": MISMATCH,
    "NVMLError_NoPermission": PERMISSION,
}
_NEEDED = ("nvmlInit", "nvmlDeviceGetHandleByUUID", "NVMLError", "NVML_P2P_CAPS_INDEX_NVLINK")
_NVLINKS = 18
# Bytes/s of one link in one direction, by NVLink version.
_NVLINK_BANDWIDTH = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}


def facts(me: Identity, peers: Sequence[Identity]) -> dict[str, Any]:
    """Field values of `Device` that NVML knows about `me`, unknown ones None.

    Args:
        me: the device, by UUID and PCI address as torch gives them. Indices are never compared: torch's
            follow CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, NVML's do not.
        peers: the other visible devices, for `links`.

    Raises:
        LibraryProblem: if NVML cannot be used or does not list the device.
    """
    nvml = _load()
    with _session(nvml):
        handle = _find(nvml, me)
        mig = bool(_ask(nvml, "nvmlDeviceIsMigDeviceHandle", handle))
        # A MIG instance has no PCI address or links of its own; its card may be off limits.
        card = _ask(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) if mig else handle
        pci = _ask(nvml, "nvmlDeviceGetPciInfo", card) if card is not None else None
        memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
        address = _text(getattr(pci, "busId", None))
        combined = getattr(pci, "pciDeviceId", 0)
        return {
            "pci": normal_pci(address) if address else None,
            "pci_device_id": (combined >> 16) or None,  # the lower half is the vendor
            "name": _text(_ask(nvml, "nvmlDeviceGetName", handle)),
            "driver": _text(_ask(nvml, "nvmlSystemGetDriverVersion")),
            "memory_bytes": getattr(memory, "total", None) or None,
            "links": None if mig else _links(nvml, handle, peers),
        }


def _load() -> ModuleType:
    try:
        import pynvml
    except ModuleNotFoundError as error:
        raise LibraryProblem("the Python package nvidia-ml-py is not installed", MISSING) from error
    except Exception as error:
        raise LibraryProblem(f"pynvml cannot be imported: {_describe(error)}", MISSING) from error
    missing = [name for name in _NEEDED if not hasattr(pynvml, name)]
    if missing:
        where = getattr(pynvml, "__file__", "an unknown place")
        raise LibraryProblem(f"the module pynvml at {where} lacks {', '.join(missing)}", SHADOWED)
    module: ModuleType = pynvml
    return module


@contextlib.contextmanager
def _session(nvml: ModuleType) -> Iterator[None]:
    try:
        nvml.nvmlInit()
    except Exception as error:
        raise LibraryProblem(f"nvmlInit failed: {_describe(error)}", _remedy(error)) from error
    try:
        yield
    finally:
        # It counts its users; a failing shutdown leaves nothing to be done.
        with contextlib.suppress(Exception):
            nvml.nvmlShutdown()


def _find(nvml: ModuleType, device: Identity) -> Any:
    """NVML's handle of a torch device."""
    last: Exception | None = None
    for name in (device.visible, *(f"{kind}-{device.uuid}" for kind in ("GPU", "MIG") if device.uuid)):
        if name is None:
            continue
        try:
            return nvml.nvmlDeviceGetHandleByUUID(name.encode())
        except Exception as error:
            last = error
    if device.pci is not None:
        try:
            return nvml.nvmlDeviceGetHandleByPciBusId(device.pci.encode())
        except Exception as error:
            last = error
    cause = f"NVML does not give the GPU with UUID {device.uuid} and PCI address {device.pci}"
    reason = f": {_describe(last)}" if last else ": torch names neither"
    remedy = _remedy(last) if last else "a newer torch reports the UUID of a device"
    raise LibraryProblem(cause + reason, remedy)


def _links(nvml: ModuleType, handle: Any, peers: Sequence[Identity]) -> LinkList | None:
    """Kind and bandwidth (bytes/s, one direction) to each peer; None where any of them is unknown."""
    found: LinkList = []
    port = _nvlink_bandwidth(nvml, handle) if peers else None
    for peer in peers:
        try:
            other = _find(nvml, peer)
            status = nvml.nvmlDeviceGetP2PStatus(handle, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        except Exception:
            return None
        linked = status == nvml.NVML_P2P_STATUS_OK
        found.append(("nvlink", port) if linked else ("pcie", None))
    return found


def _nvlink_bandwidth(nvml: ModuleType, handle: Any) -> float | None:
    total = 0.0
    for link in range(_NVLINKS):
        if _ask(nvml, "nvmlDeviceGetNvLinkState", handle, link) == 1:
            version = _ask(nvml, "nvmlDeviceGetNvLinkVersion", handle, link)
            if version not in _NVLINK_BANDWIDTH:
                return None
            total += _NVLINK_BANDWIDTH[version]
    return total or None


def _ask(nvml: ModuleType, name: str, *arguments: Any) -> Any:
    """The answer of one call, None where the call is missing from this version, refused or failing."""
    call: Callable[..., Any] | None = getattr(nvml, name, None)
    if call is None:
        return None
    try:
        return call(*arguments)
    except Exception:
        return None


def _text(value: Any) -> str | None:
    """Text of what some versions return as bytes, None where empty."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return text if isinstance(text, str) and text else None


def _remedy(error: Exception) -> str:
    return _BY_ERROR.get(type(error).__name__, NOT_FOUND)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
