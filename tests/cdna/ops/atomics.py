"""The read-modify-write operations, shared by global memory, buffers and LDS."""

from __future__ import annotations

import re

import numpy as np

from ..formats import from_bf16, to_bf16
from .vector_float import maximum, minimum


def increment(old, value):
    return np.where(old >= value, old.dtype.type(0), old + old.dtype.type(1))


def decrement(old, value):
    one = old.dtype.type(1)
    return np.where((old == 0) | (old > value), value, old - one)


def add_halves(old, value):
    """Two float16 additions in one word."""
    left, right = (np.ascontiguousarray(x).reshape(-1).view(np.float16) for x in (old, value))
    return (left + right).view(np.uint32).reshape(np.shape(old))


def add_brains(old, value):
    """Two bfloat16 additions in one word."""
    left, right = (np.ascontiguousarray(x).reshape(-1).view(np.uint16) for x in (old, value))
    return to_bf16(from_bf16(left) + from_bf16(right)).view(np.uint32).reshape(np.shape(old))


def compare_swap(old, value):
    """value [..., 2]: the new number and the one to compare with."""
    return np.where(old == value[..., 1], value[..., 0], old)


def exchange(old, value):
    return value


# name: (dtype of 4 bytes, dtype of 8 bytes, operation)
INTEGER = {
    "add": ("u4", "u8", np.add), "sub": ("u4", "u8", np.subtract),
    "smin": ("i4", "i8", np.minimum), "smax": ("i4", "i8", np.maximum),
    "umin": ("u4", "u8", np.minimum), "umax": ("u4", "u8", np.maximum),
    "and": ("u4", "u8", np.bitwise_and), "or": ("u4", "u8", np.bitwise_or), "xor": ("u4",
    "u8", np.bitwise_xor),
    "inc": ("u4", "u8", increment), "dec": ("u4", "u8", decrement),
    "swap": ("u4", "u8", exchange), "cmpswap": ("u4", "u8", compare_swap),
}  # fmt: skip
FLOAT = {
    "add_f32": ("f4", np.add), "add_f64": ("f8", np.add), "min_f64": ("f8", minimum),
    "max_f64": ("f8", maximum),
    "pk_add_f16": ("u4", add_halves), "pk_add_bf16": ("u4", add_brains),
}  # fmt: skip
GLOBAL = {name: (np.dtype(kind), operation) for name, (kind, operation) in FLOAT.items()}
for _name, (_four, _eight, _operation) in INTEGER.items():
    GLOBAL[_name] = (np.dtype(_four), _operation)
    GLOBAL[f"{_name}_x2"] = (np.dtype(_eight), _operation)

LOCAL_NAME = re.compile(r"ds_(\w+?)(_rtn)?_([uibf])(32|64)$")
LOCAL = {"wrxchg": exchange, "cmpst": compare_swap, "inc": increment, "dec": decrement, "add": np.add,
         "sub": np.subtract, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}  # fmt: skip


def local(name: str):
    """(dtype, operation, returns) of an LDS atomic, or None."""
    if match := re.fullmatch(r"ds_pk_add(_rtn)?_(f16|bf16)", name):
        return np.dtype("u4"), add_halves if match[2] == "f16" else add_brains, bool(match[1])
    match = LOCAL_NAME.match(name)
    if match is None:
        return None
    what, returns, sort, bits = match.groups()
    dtype = np.dtype(f"{'u' if sort == 'b' else sort}{int(bits) // 8}")
    if what in ("min", "max"):
        pair = (minimum, maximum) if sort == "f" else (np.minimum, np.maximum)
        return dtype, pair[what == "max"], bool(returns)
    if what == "rsub" or what not in LOCAL or (sort == "f" and what not in ("add", "cmpst")):
        return None
    return dtype, LOCAL[what], bool(returns)


def apply(array, index, data, operation, returns: bool):
    """`array[i] = operation(array[i], x)` in order; the old values where they are wanted."""
    if not returns and isinstance(operation, np.ufunc):
        operation.at(array, index, data)
        return None
    if len(np.unique(index)) == len(index):
        old = array[index]
        array[index] = operation(old, data)
        return old
    if operation is np.add and array.dtype.kind == "u":
        return _add_in_order(array, index, data)
    old = np.empty(len(index), array.dtype)
    for place, i in enumerate(index.tolist()):
        old[place] = array[i]
        array[i] = np.asarray(operation(array[i : i + 1], data[place : place + 1]))[0]
    return old


def _add_in_order(array, index, data):
    """Running sums of each address, in lane order."""
    order = np.argsort(index, kind="stable")
    sorted_index, before = index[order], np.cumsum(data[order], dtype=data.dtype) - data[order]
    first = np.searchsorted(sorted_index, sorted_index)
    old = np.empty_like(data)
    old[order] = array[sorted_index] + (before - before[first])
    np.add.at(array, index, data)
    return old
