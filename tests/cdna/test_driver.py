"""The stand-in driver: what it tells Triton, what it counts, and that broken kernels are caught."""

from __future__ import annotations

import pytest
import torch
import triton
from triton.runtime.errors import OutOfResources

from . import kernels
from .driver import LDS, CdnaDriver, active, arch_from_environment
from .errors import MemoryFault
from .sparse import sparse


def test_triton_sees_the_architecture(cdna: CdnaDriver):
    target = triton.runtime.driver.active.get_current_target()
    assert (target.backend, target.arch, target.warp_size) == ("hip", arch_from_environment(), 64)
    assert triton.runtime.driver.active.get_active_torch_device() == torch.device("cpu")


def test_counters(cdna):
    x = torch.arange(1000.0)
    out = torch.empty(1000)
    for _ in range(3):
        kernels.add[(4,)](x, x, out, 1000, BLOCK=256, num_warps=4)
    assert torch.equal(out, x + x)
    assert (cdna.launches, cdna.workgroups) == ({"add": 3}, 12)
    assert 12 * 4 * 10 < cdna.instructions < 12 * 4 * 100
    assert "s_endpgm" in cdna.mnemonics


def test_both_architectures_in_one_process(cdna):
    """Triton keeps compiled kernels by device; each architecture is another one."""
    x, out = torch.arange(256.0), torch.empty(256)
    for arch in LDS:
        with active(arch) as driver:
            compiled = kernels.add[(1,)](x, x, out, 256, BLOCK=256)
        assert f"gfx{arch[3:]}" in compiled.asm["amdgcn"].partition("\n")[0]
        assert driver.launches == {"add": 1}
    assert triton.runtime.driver.active is cdna


def test_unknown_architecture_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="gfx90a"):
        CdnaDriver("gfx90a")
    monkeypatch.setenv("CDNA_ARCH", "mi300")
    with pytest.raises(ValueError, match="mi300"):
        arch_from_environment()


def test_empty_grid_and_empty_tensor(cdna):
    nothing = torch.empty(0)
    kernels.add[(1,)](nothing, nothing, nothing, 0, BLOCK=64)
    assert cdna.launches == {"add": 1}


def test_views_and_pitch(cdna):
    """A view's offset and strides count; what lies outside its extent does not belong to the launch."""
    whole = torch.full((4, 300), 7.0)
    part = whole[1:3, 10:266]
    kernels.add[(1,)](part[0], part[0], part[0], 256, BLOCK=256)
    expected = torch.full((4, 300), 7.0)
    expected[1, 10:266] = 14.0
    assert torch.equal(whole, expected)
    other = torch.zeros(4, 300)
    with pytest.raises(MemoryFault, match=r"out_ptr, byte 2264, allowed \[1240, 2264\)"):
        kernels.add[(1,)](whole, whole, other[1, 10:266], 257, BLOCK=512)


def test_a_wrong_mask_is_caught(cdna):
    x, out = torch.ones(1000), torch.zeros(1000)
    with pytest.raises(MemoryFault, match=r"x_ptr.*byte 4000.*\n.*add_past_the_end"):
        kernels.add_past_the_end[(4,)](x, x, out, 1000, BLOCK=256)
    # Within the allocation it is no fault, yet a guard behind the output shows it.
    roomy = torch.zeros(1008)
    kernels.add_past_the_end[(4,)](torch.ones(1008), torch.ones(1008), roomy, 1000, BLOCK=256)
    assert roomy[1000] != 0


def test_too_much_lds_is_caught(cdna):
    """An operand of 128 KiB: more than gfx942 has, not more than gfx950 has."""
    x = torch.randint(-3, 4, (2 * 128, 512), dtype=torch.int32).half()
    out = torch.zeros(128, 128)
    if cdna.arch == "gfx942":
        with pytest.raises(OutOfResources, match="shared memory"):
            kernels.large_tile[(1,)](x, out, M=128, K=512, num_warps=8)
    else:
        compiled = kernels.large_tile[(1,)](x, out, M=128, K=512, num_warps=8)
        assert compiled.metadata.shared > LDS["gfx942"]
        assert torch.equal(out, x[:128].float() @ x[128:].float().t())


@pytest.mark.parametrize("rows", [1 << 20, (1 << 19) + (1 << 18)])
def test_offsets_beyond_2_31(cdna, rows):
    """Rows of 4,096 float32: the last ones start past 2^31 and 2^32 elements, 16 GiB into the tensor."""
    x = sparse((rows + 8, 4096), torch.float32)
    ids = torch.tensor([0, 1, rows - 1, rows, rows + 7], dtype=torch.int32)
    x[ids.long(), :64] = torch.randn(5, 64)
    out = torch.full((5, 64), float("nan"))
    kernels.wide_offsets[(5,)](x, ids, out, 4096, N=64, WIDE=True)
    assert torch.equal(out, x[ids.long(), :64])


def test_a_32_bit_offset_is_caught(cdna):
    """Past 2^31 it is negative: a fault. Past 2^32 it comes back to the start: a wrong answer."""
    half, whole = 1 << 19, 1 << 20
    x = sparse((whole + 8, 4096), torch.float32)
    x[:8, :64], x[whole : whole + 8, :64] = 1.0, 2.0
    out = torch.zeros(1, 64)
    with pytest.raises(MemoryFault, match="no tensor"):
        kernels.wide_offsets[(1,)](x, torch.tensor([half + 4], dtype=torch.int32), out, 4096, N=64, WIDE=False)
    kernels.wide_offsets[(1,)](x, torch.tensor([whole + 4], dtype=torch.int32), out, 4096, N=64, WIDE=False)
    assert not torch.equal(out, x[whole + 4 : whole + 5, :64])


def test_sparse_tensors_cost_nothing():
    x = sparse((1 << 20, 1 << 18), torch.float8_e4m3fn)
    assert x.shape == (1 << 20, 1 << 18) and x.is_contiguous()
    x.view(torch.uint8)[-1, -1] = 0x38
    assert x[-1, -1].float() == 1 and x[12345, 6789].float() == 0
