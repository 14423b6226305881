"""Process groups: who is in them, and which library serves a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def capturing() -> bool:
    """Whether the current stream records a CUDA or HIP graph. Initialises no GPU."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def member_of(group: ProcessGroup | None) -> tuple[ProcessGroup, int]:
    """The group, the default one for None, of whatever size, and this process's rank in it."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("group needs torch.distributed to be initialised: call init_process_group first")
    member = dist.group.WORLD if group is None else group
    if not isinstance(member, dist.ProcessGroup):
        raise ValueError(f"group must be a process group that this process belongs to, got {member!r}")
    rank = dist.get_rank(member)
    if rank < 0:
        raise ValueError("group must be a process group that this process belongs to, got one that it is not in")
    return member, rank


def resolve_group(group: ProcessGroup | None, size: int) -> tuple[ProcessGroup, int]:
    """The group (the default one for None) and this process's rank in it.

    Raises:
        ValueError: torch.distributed is not initialised, this process is no member, or the size is another.
    """
    member, rank = member_of(group)
    if member.size() != size:
        which = "the default group, as none was given," if group is None else "group"
        raise ValueError(f"{which} must have one rank for each of the {size} sizes, got {member.size()} ranks")
    return member, rank


def backends_of(group: ProcessGroup) -> dict[str, str]:
    """Device type to backend name."""
    return dict(entry.split(":", 1) for entry in dist.get_backend_config(group).split(","))


def backend_for(group: ProcessGroup, device: torch.device) -> str:
    """Name of the backend that moves tensors of this device."""
    found = backends_of(group)
    if device.type not in found:
        raise ValueError(f"buffer must be on a device type that the group serves ({', '.join(found)}), got {device}")
    return found[device.type]


def all_gather_even(gathered: torch.Tensor, own: torch.Tensor, group: ProcessGroup, *, async_op: bool = False) -> Any:
    """Even shards into one flat tensor, of which ``own`` may be this rank's part. Torch 2.13 renamed the call."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(gathered, own, group=group, async_op=async_op)
