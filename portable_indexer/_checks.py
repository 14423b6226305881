"""Argument checks: each error names the argument, what came and what is accepted."""

from __future__ import annotations

import operator
from typing import Any

import torch


def describe(tensor: Any) -> str:
    """Dtype, shape, strides and device of a tensor, for an error message."""
    if not isinstance(tensor, torch.Tensor):
        return f"{type(tensor).__name__}"
    return f"{tensor.dtype} {list(tensor.shape)} (strides {list(tensor.stride())}) on {tensor.device}"


def check_layout(name: str, tensor: Any, ndim: int) -> None:
    """Refuse what is no strided tensor of ``ndim`` dimensions with a contiguous last one."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {describe(tensor)}")
    if tensor.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, got {describe(tensor)}")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous in its last dimension (stride 1), got {describe(tensor)}")


def check_output(name: str, tensor: Any) -> None:
    """Refuse an output that is no matrix with a contiguous last dimension and rows apart from each other."""
    check_layout(name, tensor, 2)
    if tensor.shape[0] > 1 and tensor.stride(0) < tensor.shape[1]:
        raise ValueError(f"{name} must have rows that do not overlap, got {describe(tensor)}")


def check_float32(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype != torch.float32:
        raise TypeError(f"{name} must be torch.float32, got {describe(tensor)}")


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, as the other operands, got {describe(tensor)}")


def check_integer(name: str, value: Any) -> int:
    """The value as an int; bools, non-integers and tensors of a device (a hidden wait) are refused."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got bool")
    if isinstance(value, torch.Tensor) and not value.is_cpu:
        raise TypeError(f"{name} must be an integer on the host, got {describe(value)}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}") from None


def check_bounds(ks: Any, ke: Any, rows: int, device: torch.device) -> None:
    """Check the two row-bound vectors: int32 [rows], contiguous, on the operands' device."""
    for name, bound in (("cu_seqlen_ks", ks), ("cu_seqlen_ke", ke)):
        check_layout(name, bound, 1)
        if bound.dtype != torch.int32:
            raise TypeError(f"{name} must be torch.int32, got {describe(bound)}")
        if bound.shape[0] != rows:
            raise ValueError(f"{name} must be [{rows}], one bound for each row, got {describe(bound)}")
        check_device(name, bound, device)
