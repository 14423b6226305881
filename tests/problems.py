"""Random problems for the contract suite and the benchmarks: operands, ties, ragged rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Operands:
    """The arguments of one scoring call, on one device."""

    q: torch.Tensor  # [M, H, D] fp8
    k: torch.Tensor  # [N, D] fp8
    k_scale: torch.Tensor  # [N] float32
    weights: torch.Tensor  # [M, H] float32
    ks: torch.Tensor  # [M] int32
    ke: torch.Tensor  # [M] int32

    @property
    def args(
        self,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
        """In the order of the public functions, up to the bounds."""
        return self.q, (self.k, self.k_scale), self.weights, self.ks, self.ke


def fp8(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype, levels: int = 0) -> torch.Tensor:
    """Random fp8 numbers; with ``levels``, few distinct small integers, so that scores tie exactly."""
    if levels:
        values = torch.randint(-levels, levels + 1, shape, generator=generator).float()
    else:
        values = torch.randn(shape, generator=generator)
    return values.to(dtype)


def causal_bounds(rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One request: row m, of the last M positions, sees keys up to its own."""
    ke = torch.arange(keys - rows + 1, keys + 1, dtype=torch.int32)
    return torch.zeros_like(ke), ke


def ragged_bounds(rows: int, keys: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Any start and end, empty and inverted rows included."""
    ks = torch.randint(0, keys + 1, (rows,), generator=generator, dtype=torch.int32)
    ke = torch.randint(0, keys + 1, (rows,), generator=generator, dtype=torch.int32)
    return ks, ke


def make(
    rows: int,
    keys: int,
    heads: int,
    dim: int,
    generator: torch.Generator,
    *,
    device: torch.device | str = "cpu",
    q_dtype: torch.dtype = torch.float8_e4m3fn,
    k_dtype: torch.dtype = torch.float8_e4m3fn,
    levels: int = 0,
    ragged: bool = False,
) -> Operands:
    """Random operands; weights have both signs. ``levels`` makes exact ties common."""
    ks, ke = ragged_bounds(rows, keys, generator) if ragged else causal_bounds(rows, keys)
    if levels:
        weights = torch.randint(-2, 3, (rows, heads), generator=generator).float()
        scale = torch.ones(keys)
    else:
        weights = torch.randn((rows, heads), generator=generator)
        scale = torch.rand(keys, generator=generator) + 0.5
    return Operands(
        fp8((rows, heads, dim), generator, q_dtype, levels).to(device),
        fp8((keys, dim), generator, k_dtype, levels).to(device),
        scale.to(device),
        weights.to(device),
        ks.to(device),
        ke.to(device),
    )
