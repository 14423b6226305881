"""Launching the multi-query logits kernel: which variant, how many programs, with which arguments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from portable_indexer.backends.triton_common import scoring_kernel
from portable_indexer.backends.triton_common.runtime import interpreting

# Triton's decorator returns no type that says what can be done with a kernel.
mqa_logits_kernel: Any = scoring_kernel.mqa_logits_kernel
fill_outside_kernel: Any = scoring_kernel.fill_outside_kernel

# What a decoded operand is short by, see `_native` in the kernel.
OWED = {"fp8": 1.0, "fn_as_fnuz": 2.0, "fn_as_half": 256.0, "fnuz_as_half": 128.0}
HEAD_DIMS = (32, 64, 128, 256)
MAX_HEADS = 128
# Positions are 32-bit in the kernel, and a tile may reach past the last key.
MAX_KEYS = 2**31 - 4096

# Elements; the same figures stand in the kernel, as what it may assume.
_MAX_KEY_STRIDE = 65536
_MAX_ROW_STRIDE = 16777216
_FILL_WIDTH = 1024
# Key tiles of the longest program.
_MOST_TILES = 128

# Compiled kernels by choice, variant, sizes and device: a kept kernel is launched without Triton looking at every
# argument again, and none is freed while a captured graph may need it.
_kept: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


class Variant(NamedTuple):
    """One compiled form of a choice: with 16-byte accesses, and with K through a tensor descriptor."""

    aligned: bool
    descriptor: bool


@dataclass(frozen=True)
class ScoringChoice:
    """How the kernel is built for one architecture, head count, head dimension and pair of encodings.

    All that fixes the rounding is in here, so nothing in here may follow from the number of rows or keys.

    Attributes:
        rows, keys: tile of a program.
        heads, blocks: heads of one block and number of blocks (1 or 4); their product is H or more.
        lanes, pair: of each run of lanes * pair columns of the product, `lanes` rows own `pair` heads each.
        relu: "max", "sum" or "sum_scalar".
        q_decode, k_decode: "fp8", "fn_as_fnuz", "fn_as_half" or "fnuz_as_half".
        descriptor: K may come through a tensor descriptor (where its base and stride allow it).
        direct: loads of scales and stores of logits in the product's own register layout (PTX).
        resident: programs that a compute unit or SM holds at once.
        options: the compiler's launch options, as (name, value) pairs.
        relaxed: what replaces them in the unaligned variant, whose narrow accesses need more registers.
    """

    rows: int
    keys: int
    heads: int
    blocks: int
    lanes: int
    pair: int
    relu: str
    q_decode: str
    k_decode: str
    descriptor: bool
    direct: bool
    resident: int
    options: tuple[tuple[str, Any], ...]
    relaxed: tuple[tuple[str, Any], ...] = ()

    def launch_options(self, variant: Variant) -> dict[str, Any]:
        """The compiler's options for one variant."""
        return dict(self.options) if variant.aligned else {**dict(self.options), **dict(self.relaxed)}


def too_many(keys: int) -> str | None:
    """Why a kernel's 32-bit key numbers cannot serve so many keys; None where they can."""
    return f"needs at most {MAX_KEYS} keys, got {keys}" if keys > MAX_KEYS else None


def unsupported(heads: int, dim: int, keys: int) -> str | None:
    """Why the kernel cannot serve these sizes; None where it can."""
    if not 1 <= heads <= MAX_HEADS:
        return f"needs 1 to {MAX_HEADS} heads, got {heads}"
    if dim not in HEAD_DIMS:
        return f"needs a head dimension in {HEAD_DIMS}, got {dim}"
    return too_many(keys)


@lru_cache(maxsize=4096)
def splits_for(rows: int, keys: int, choice: ScoringChoice, units: int) -> int:
    """Into how many parts each row tile's keys are split, so that programs fill the device in whole waves.

    Args:
        rows, keys: the call's, or upper bounds.
        units: compute units or SMs.
    """
    tiles = -(-rows // choice.rows)
    key_tiles = -(-keys // choice.keys)
    slots = units * choice.resident
    # Short programs even out; shorter ones than four tiles would mostly load queries.
    fewest = -(-key_tiles // _MOST_TILES)
    most = max(1, key_tiles // 4)
    best, best_cost = 1, None
    for waves in range(max(1, tiles * fewest // slots), tiles * fewest // slots + 9):
        splits = min(max(waves * slots // tiles, fewest), most)
        # A program costs its key tiles, and about four more to load its queries and fill its pipeline.
        cost = -(-tiles * splits // slots) * (-(-key_tiles // splits) + 4)
        if best_cost is None or cost < best_cost:
            best, best_cost = splits, cost
    return best


def _fits(stride: int, multiple: int, most: int) -> bool:
    return stride % multiple == 0 and 0 <= stride <= most


def is_aligned(
    q: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> bool:
    """Whether the variant with 16-byte accesses and 32-bit offsets within a tile may be used."""
    tensors = (q, k, k_scale, weights, out)
    return (
        all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        and _fits(q.stride(0), 16, _MAX_ROW_STRIDE)
        and _fits(q.stride(1), 16, _MAX_KEY_STRIDE)
        and _fits(k.stride(0), 16, _MAX_KEY_STRIDE)
        and _fits(weights.stride(0), 4, _MAX_ROW_STRIDE)
        and _fits(out.stride(0), 4, _MAX_ROW_STRIDE)
        and k_scale.stride(0) == 1
    )


def constants(choice: ScoringChoice, heads: int, dim: int, variant: Variant) -> dict[str, Any]:
    """The kernel's compile-time parameters."""
    # The interpreter has no inline instructions; "sum" gives the same bits.
    relu = "sum" if choice.relu == "sum_scalar" and interpreting() else choice.relu
    return {
        "H": heads,
        "D": dim,
        "ROWS": choice.rows,
        "KEYS": choice.keys,
        "HEADS": choice.heads,
        "BLOCKS": choice.blocks,
        "LANES": choice.lanes,
        "PAIR": choice.pair,
        "RELU": relu,
        "Q_DECODE": choice.q_decode,
        "K_DECODE": choice.k_decode,
        "ALIGNED": variant.aligned,
        "DESCRIPTOR": variant.descriptor,
        "DIRECT": choice.direct and not interpreting(),
        "STAGES": choice.launch_options(variant)["num_stages"],
    }


def mqa_logits(
    q: torch.Tensor,  # [M, H, D] fp8
    k: torch.Tensor,  # [N, D] fp8
    k_scale: torch.Tensor,  # [N] float32
    weights: torch.Tensor,  # [M, H] float32
    ks: torch.Tensor,  # [M] int32
    ke: torch.Tensor,  # [M] int32
    out: torch.Tensor,  # [M, >= N] float32
    clean_logits: bool = False,
    *,
    choice: ScoringChoice,
    units: int,
    splits: int | None = None,
    variant: Variant | None = None,
) -> None:
    """Write the logits of every key in [ks, ke) into ``out``; with ``clean_logits``, -inf into its other columns < N.

    Enqueues on the current stream and returns; reads nothing back. The tensors are taken as checked
    (``backend.Problem``). ``splits`` and ``variant`` override what the sizes and addresses would choose: they
    change the time, never a bit; a variant must be one that ``is_aligned`` allows.
    """
    rows, heads, dim = q.shape
    keys = k.shape[0]
    if rows == 0 or keys == 0:
        return
    if clean_logits:
        parts = max(1, min(-(-keys // _FILL_WIDTH), 8 * units // rows))
        fill_outside_kernel[(rows * parts,)](ks, ke, out, keys, parts, out.stride(0), WIDTH=_FILL_WIDTH)
    if splits is None:
        splits = splits_for(rows, keys, choice, units)
    if variant is None:
        aligned = is_aligned(q, k, k_scale, weights, out)
        variant = Variant(aligned, choice.descriptor and aligned)
    arguments = (
        q if choice.q_decode == "fp8" else q.view(torch.uint8),
        _keys_argument(k, choice, variant),
        k_scale,
        weights,
        ks,
        ke,
        out,
        rows,
        keys,
        splits,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k_scale.stride(0),
        weights.stride(0),
        out.stride(0),
        OWED[choice.q_decode] * OWED[choice.k_decode],
    )
    _launch(-(-rows // choice.rows) * splits, arguments, choice, heads, dim, variant, q.device)


def _launch(
    programs: int,
    arguments: tuple[Any, ...],
    choice: ScoringChoice,
    heads: int,
    dim: int,
    variant: Variant,
    device: torch.device,
) -> None:
    if device.type != "cuda":
        named = constants(choice, heads, dim, variant)
        mqa_logits_kernel[(programs,)](*arguments, **named, **choice.launch_options(variant))
        return
    key = (choice, variant, heads, dim, device.index)
    kept = _kept.get(key)
    with torch.cuda.device(device):
        if kept is not None:
            compiled, values = kept
            compiled[(programs, 1, 1)](*arguments, *values)
        else:
            named = constants(choice, heads, dim, variant)
            compiled = mqa_logits_kernel[(programs,)](*arguments, **named, **choice.launch_options(variant))
            _kept[key] = compiled, tuple(named.values())


def _keys_argument(k: torch.Tensor, choice: ScoringChoice, variant: Variant) -> Any:
    if variant.descriptor:
        return TensorDescriptor(k, list(k.shape), [k.stride(0), 1], [choice.keys, k.shape[1]])
    return k if choice.k_decode == "fp8" else k.view(torch.uint8)


def variants(choice: ScoringChoice) -> tuple[Variant, ...]:
    """The closed list of compiled variants of one choice: what addresses and strides can ask for."""
    return Variant(False, False), Variant(True, choice.descriptor)


def warmup(
    device: torch.device, heads: int, dim: int, q_dtype: torch.dtype, k_dtype: torch.dtype, choice: ScoringChoice
) -> int:
    """Compile and load every variant of a choice by scoring one row against one key; returns their number."""
    q = torch.zeros((1, heads, dim), dtype=torch.uint8, device=device).view(q_dtype)
    k = torch.zeros((1, dim), dtype=torch.uint8, device=device).view(k_dtype)
    one = torch.ones(4, dtype=torch.float32, device=device)
    weights = torch.ones((1, max(heads, 4)), dtype=torch.float32, device=device)[:, :heads]
    bounds = torch.tensor([0, 1], dtype=torch.int32, device=device)
    for variant in variants(choice):
        mqa_logits(
            q, k, one[:1], weights, bounds[:1], bounds[1:], one[None, :], True, choice=choice, units=1, variant=variant
        )
    return len(variants(choice))
