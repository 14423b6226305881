"""Compiled kernels executed and compared with NumPy or torch: the executor's own test on real code."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from . import kernels
from .driver import CdnaDriver

NATIVE = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}


@pytest.fixture
def native(cdna: CdnaDriver) -> torch.dtype:
    """The fp8 format that the architecture multiplies."""
    return NATIVE[cdna.arch]


def poison(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An output that shows where a kernel has not written."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else -77, dtype=dtype)


@pytest.mark.parametrize("n", [1, 63, 64, 1000, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int8])
def test_vector_add(cdna, generator, n, dtype):
    x, y = (torch.randint(-50, 50, (n,), generator=generator).to(dtype) for _ in "xy")
    guard = poison(n + 64, dtype=torch.float32 if dtype.is_floating_point else torch.int32).to(dtype)
    out = guard.clone()
    kernels.add[(-(-n // 512),)](x, y, out[:n], n, BLOCK=512)
    assert torch.equal(out[:n], x + y)
    assert out[n:].view(torch.uint8).equal(guard[n:].view(torch.uint8))
    assert cdna.launches == {"add": 1}


@pytest.mark.parametrize("warps", [1, 4, 8])
def test_softmax(cdna, generator, warps):
    x = torch.randn(9, 777, generator=generator) * 5
    out = poison(9, 777)
    kernels.softmax[(9,)](x, out, 777, 777, BLOCK=1024, num_warps=warps)
    torch.testing.assert_close(out, torch.softmax(x, 1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("warps", [1, 4])
def test_cumsum(cdna, generator, warps):
    x = torch.randint(-1000, 1000, (3 * 1024,), generator=generator, dtype=torch.int32)
    out = poison(3 * 1024, dtype=torch.int32)
    kernels.cumsum[(3,)](x, out, BLOCK=1024, num_warps=warps)
    assert torch.equal(out.view(3, 1024), x.view(3, 1024).cumsum(1).to(torch.int32))


def test_cumsum_float(cdna, generator):
    x = torch.randint(-8, 8, (2 * 512,), generator=generator).float()
    out = poison(1024)
    kernels.cumsum[(2,)](x, out, BLOCK=512)
    assert torch.equal(out.view(2, 512), x.view(2, 512).cumsum(1))


def test_histogram(cdna, generator):
    x = torch.randint(0, 256, (8 * 1024,), generator=generator, dtype=torch.int32)
    out = torch.zeros(256, dtype=torch.int32)
    kernels.histogram[(8,)](x, out, BLOCK=1024, BINS=256)
    assert torch.equal(out, torch.bincount(x, minlength=256).to(torch.int32))


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.int64])
def test_sort(cdna, generator, descending, dtype):
    x = torch.randint(-100, 100, (2 * 512,), generator=generator).to(dtype)
    out = torch.empty_like(x)
    kernels.sort[(2,)](x, out, BLOCK=512, DESCENDING=descending)
    assert torch.equal(out.view(2, 512), x.view(2, 512).sort(1, descending=descending).values)


@pytest.mark.parametrize("name", ["native", "float8_e5m2"])
def test_quantise(cdna, generator, name):
    dtype = NATIVE[cdna.arch] if name == "native" else getattr(torch, name)
    limit = torch.finfo(dtype).max
    x = torch.randn(6, 512, generator=generator) * torch.logspace(-3, 3, 512)
    out, scale = torch.zeros(6, 512, dtype=dtype), poison(6)
    kernels.quantise[(6,)](x, out, scale, LIMIT=limit, BLOCK=512)
    torch.testing.assert_close(scale, x.abs().amax(1) / limit, rtol=1e-6, atol=0)
    expected = (x / scale[:, None]).clamp(-limit, limit).to(dtype)
    codes = [t.view(torch.uint8).int() for t in (out, expected)]
    # The quotient's last bit may turn a tie; everything else is the same code.
    assert (codes[0] - codes[1]).abs().max() <= 1
    assert (codes[0] != codes[1]).float().mean() < 0.01


@pytest.mark.parametrize("name", ["native", "float8_e5m2"])
def test_all_codes_widen(cdna, name):
    dtype = NATIVE[cdna.arch] if name == "native" else getattr(torch, name)
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    out = poison(256)
    kernels.widen[(1,)](codes, out, BLOCK=256)
    np.testing.assert_array_equal(out.numpy(), codes.float().numpy())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8, "fp8"])
@pytest.mark.parametrize(("m", "n", "k", "instr"), [(64, 64, 128, 0), (32, 64, 128, 16), (64, 32, 256, 32)])
@pytest.mark.parametrize("flip", [False, True])
def test_dot(cdna, native, generator, dtype, m, n, k, instr, flip):
    dtype = native if dtype == "fp8" else dtype
    small = torch.randint(-8, 9, (2 * m + n, k), generator=generator).float() / (1 if dtype == torch.int8 else 4)
    a, b = small[: 2 * m].to(dtype), small[2 * m :].to(dtype)
    stored = b if flip else b.t().contiguous()
    out = poison(2 * m, n, dtype=torch.int32 if dtype == torch.int8 else torch.float32)
    kernels.matmul[(2,)](a, stored, out, k, M=m, N=n, BK=128, FLIP=flip, num_warps=4, matrix_instr_nonkdim=instr)
    assert torch.equal(out, (a.double() @ b.double().t()).to(out.dtype))
    assert any(name.startswith("v_mfma") for name in cdna.mnemonics)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integer_division(cdna, generator, dtype):
    n, top = 1000, torch.iinfo(dtype).max
    x = torch.randint(-top, top, (n,), generator=generator, dtype=dtype)
    y = torch.randint(-top, top, (n,), generator=generator, dtype=dtype)
    y[::3] = torch.randint(1, 100, y[::3].shape, generator=generator, dtype=dtype)
    y[::7] = -y[::7]
    y[y == 0] = 1
    x[:4], y[:4] = torch.tensor([top, -top, 0, 5], dtype=dtype), torch.tensor([1, -1, top, top], dtype=dtype)
    quotient, rest = poison(n, dtype=dtype), poison(n, dtype=dtype)
    kernels.divide[(4,)](x, y, quotient, rest, n, BLOCK=256)
    assert torch.equal(quotient, torch.div(x, y, rounding_mode="trunc"))
    assert torch.equal(rest, torch.fmod(x, y))


def test_correctly_rounded_division_and_root(cdna, generator):
    bits = torch.randint(-(2**31), 2**31 - 1, (2, 1024), generator=generator, dtype=torch.int64).to(torch.int32)
    x, y = bits.view(torch.float32)
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0, 1e-45, 3e38])
    x[:64], y[:64] = special.repeat(8), special.repeat_interleave(8)
    out, root = poison(1024), poison(1024)
    kernels.divide_rounded[(4,)](x, y, out, root, BLOCK=256)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(out.numpy(), x.numpy() / y.numpy())
        # Triton 3.6 refines a reciprocal root without scaling: not exact near the smallest numbers.
        large = (x.abs() > 1e-30) | (x == 0) | x.isnan()
        np.testing.assert_array_equal(root[large].numpy(), np.sqrt(np.abs(x[large].numpy())))


def test_gather(cdna, generator):
    x = torch.randn(5000, generator=generator)
    index = torch.randint(0, 5000, (700,), generator=generator)
    out = poison(700)
    kernels.gather[(3,)](x, index, out, 700, BLOCK=256)
    assert torch.equal(out, x[index])


def test_shuffle(cdna, generator):
    x = torch.randn(2, 256, generator=generator)
    index = torch.randint(0, 256, (2, 256), generator=generator, dtype=torch.int32)
    out = poison(2, 256)
    kernels.shuffle[(2,)](x, index, out, BLOCK=256)
    assert torch.equal(out, x.gather(1, index.long()))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_returning_atomics(cdna, generator, dtype):
    amount = torch.randint(1, 9, (1024,), generator=generator, dtype=dtype)
    counter, out = torch.full((4,), 100, dtype=dtype), poison(1024, dtype=dtype)
    kernels.tickets[(4,)](counter, amount, out, BLOCK=256)
    for lane in range(4):  # the draws of a counter tile the range that it went through
        begins, ends = out[lane::4], out[lane::4] + amount[lane::4]
        order = begins.argsort()
        assert begins[order[0]] == 100
        assert torch.equal(begins[order[1:]], ends[order[:-1]])
        assert counter[lane] == ends[order[-1]]


def test_other_atomics(cdna, generator):
    x = torch.randint(0, 1 << 20, (512,), generator=generator, dtype=torch.int32)
    added, top, either = torch.zeros(8), torch.zeros(8, dtype=torch.uint32), torch.zeros(8, dtype=torch.int32)
    first = torch.full((512,), -1, dtype=torch.int32)
    kernels.atomics[(2,)](x, added, top, either, first, BLOCK=256)
    groups = x.view(64, 8)
    torch.testing.assert_close(added, groups.sum(0).float(), rtol=1e-6, atol=0)
    assert torch.equal(top.to(torch.int64), groups.amax(0).to(torch.int64))
    assert torch.equal(either, torch.from_numpy(np.bitwise_or.reduce(groups.numpy(), 0)))
    # The store puts back what the swap has found: -1 where it was the first.
    assert torch.equal(first, torch.full((512,), -1, dtype=torch.int32))


@pytest.mark.parametrize(("m", "n", "warps"), [(32, 64, 4), (1, 1024, 8), (64, 16, 2)])
def test_reductions(cdna, generator, m, n, warps):
    x = torch.randint(-30, 30, (3 * m, n), generator=generator).float()
    total, top, place = poison(3 * m), poison(3 * m), poison(3 * m, dtype=torch.int32)
    kernels.reduce_2d[(3,)](x, total, top, place, M=m, N=n, num_warps=warps)
    assert torch.equal(total, x.sum(1))
    assert torch.equal(top, x.amax(1))
    assert torch.equal(place.long(), torch.from_numpy(x.numpy().argmax(1)))  # the first of equals


@pytest.mark.parametrize("grid", [(5, 1, 1), (3, 4, 1), (2, 3, 4)])
def test_grid_of_three_axes(cdna, grid):
    count = grid[0] * grid[1] * grid[2]
    out = poison(count, 6, dtype=torch.int32)
    kernels.where_am_i[grid](out)
    z, y, x = torch.meshgrid(*(torch.arange(n) for n in grid[::-1]), indexing="ij")
    expected = torch.stack([x, y, z, *(torch.full_like(x, n) for n in grid)], -1).reshape(count, 6)
    assert torch.equal(out, expected.to(torch.int32))


def test_lone_waves_agree_with_lockstep(cdna, generator):
    """Both orders of execution give the same answer; the slow one shows a value that was read too early."""
    x = torch.randn(2, 777, generator=generator)
    together, alone = poison(2, 777), poison(2, 777)
    kernels.softmax[(2,)](x, together, 777, 777, BLOCK=1024)
    cdna.lockstep = False
    try:
        kernels.softmax[(2,)](x, alone, 777, 777, BLOCK=1024)
    finally:
        cdna.lockstep = True
    assert torch.equal(together, alone)


def test_speed(cdna, generator):
    """At least 1e5 wave instructions for each second of one core, compilation and decoding aside."""
    import time

    a = torch.randint(-8, 9, (16 * 64, 256), generator=generator).half()
    b, out = torch.randint(-8, 9, (64, 256), generator=generator).half(), poison(16 * 64, 64)
    for _ in range(2):
        cdna.reset()
        begin = time.process_time()
        kernels.matmul[(16,)](a, b, out, 256, M=64, N=64, BK=64, FLIP=True)
        spent = time.process_time() - begin
    print(f"{cdna.instructions} wave instructions in {spent:.3f} s: {cdna.instructions / spent:.2e} a second")
    assert cdna.instructions / spent > 1e5
