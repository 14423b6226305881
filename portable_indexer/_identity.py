"""How one device is named across torch, HIP or CUDA, and the vendors' management libraries."""

from __future__ import annotations

from dataclasses import dataclass

# Kind ("xgmi", "nvlink", "pcie") and bandwidth (bytes/s in one direction, None where unknown) to each peer.
LinkList = list[tuple[str, float | None]]


@dataclass(frozen=True)
class Identity:
    """A device as torch names it: `uuid` as torch prints it, `pci` as "0000:c1:00.0", `visible` as it stands
    in CUDA_VISIBLE_DEVICES where that names it by UUID."""

    uuid: str | None
    pci: str | None
    visible: str | None = None


class LibraryProblem(Exception):
    """A management library that cannot be used: the cause, and what the user can do about it."""

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(f"{cause}; {remedy}")
        self.cause = cause
        self.remedy = remedy


def parent_pci(pci: str) -> str:
    """The address of the card that a partition belongs to: its function 0."""
    return pci[:-1] + "0"


def normal_pci(pci: str) -> str:
    """NVML's "00000000:C1:00.0" as "0000:c1:00.0"."""
    domain, rest = pci.strip().lower().split(":", 1)
    return f"{int(domain, 16):04x}:{rest}"
