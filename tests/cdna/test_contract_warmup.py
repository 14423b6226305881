"""Every variant of every kernel that the backend ships loads: each instruction of it is known."""

from __future__ import annotations

import pytest
import torch

from portable_indexer.registry import get_backend

from . import ops


@pytest.mark.parametrize(("heads", "dim", "topk"), [(64, 128, 2048), (32, 128, 512)])
def test_every_variant_loads(cdna, heads, dim, topk):
    """A kernel is decoded as it is loaded, and an unknown instruction refuses it by name."""
    compiled = get_backend("triton_rocm").warmup(torch.device("cpu"), heads, dim, topk)
    assert compiled > 0 and sum(cdna.launches.values()) > 0
    assert {name for name in cdna.mnemonics if not ops.known(name)} == set()
    matrix = sorted(name for name in cdna.mnemonics if "mfma" in name)
    print(f"{compiled} variants, {len(cdna.mnemonics)} instructions, {', '.join(matrix)}")
    assert any("fp8" in name or "f8f6f4" in name for name in matrix)
