"""The contract of ``fp8_mqa_logits``, on the backend under test: values, encodings, bounds, guards, layouts."""

from __future__ import annotations

import os

import problems
import pytest
import torch

import portable_indexer as pi

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
GUARD = 7.0
SHORT, SHORT_BITS = 2e-4, 13  # tolerance and bits of accumulators that keep fewer than float32


def oracle(o: problems.Operands, absolute: bool = False) -> torch.Tensor:
    """float64 logits [M, N] of the dequantised operands; -inf outside [ks, ke). With |weights| if ``absolute``."""
    q, k = o.q.cpu().to(torch.float64), o.k.cpu().to(torch.float64)
    weights = o.weights.cpu().double()
    heads = torch.relu(torch.einsum("mhd,nd->mhn", q, k))
    logits = torch.einsum("mhn,mh->mn", heads, weights.abs() if absolute else weights)
    logits = logits * o.k_scale.cpu().double()[None, :]
    column = torch.arange(k.shape[0])
    valid = (column >= o.ks.cpu()[:, None]) & (column < o.ke.cpu()[:, None])
    return logits.masked_fill(~valid, -torch.inf)


def rounding(o: problems.Operands, bits: int) -> torch.Tensor:
    """The error [M, N] that accumulators may cause which keep ``bits`` bits after the largest term's first.

    The products of a head cancel, so its error goes with the sum of their magnitudes and not with what is left. Each
    step of 32 channels and each head adds an error of its own.
    """
    q, k = o.q.cpu().double(), o.k.cpu().double()
    terms = torch.einsum("mhd,nd->mhn", q.abs(), k.abs()) * o.weights.cpu().double()[..., None]
    return 2.0**-bits * max(q.shape[2] / 32, 1) ** 0.5 * terms.norm(dim=1) * o.k_scale.cpu().double()[None, :]


def allowed(o: problems.Operands, tolerance: float) -> torch.Tensor:
    """The norm [M] that a row's error may have.

    ``tolerance`` times the norm that its logits would have without cancelling weights. A row of few keys may cancel
    to nearly nothing in each head, too: a single key's rounding is always allowed, which is less in long rows. One
    bit is to spare, since draws differ.
    """
    right = oracle(o, absolute=True)
    valid = torch.isfinite(right)
    norm = right.masked_fill(~valid, 0).norm(dim=1)
    single = rounding(o, SHORT_BITS - 1 if tolerance >= SHORT else 23).masked_fill(~valid, 0).amax(dim=1)
    return torch.maximum(tolerance * norm, single)


def check(o: problems.Operands, backend: str, tolerance: float) -> torch.Tensor:
    """Score into a poisoned buffer, compare each row with the oracle, and see that the rest is untouched."""
    rows, keys = o.q.shape[0], o.k.shape[0]
    out = torch.full((rows, keys), GUARD, device=o.q.device)
    pi.fp8_mqa_logits(*o.args, out=out, backend=backend)
    right = oracle(o)
    got = out.cpu().double()
    valid = torch.isfinite(right)
    assert (got[~valid] == GUARD).all()
    error = (got - right).masked_fill(~valid, 0).norm(dim=1)
    limit = allowed(o, tolerance)
    assert (error <= limit).all(), (error / limit).nan_to_num().max()
    return out


@pytest.fixture(scope="module")
def tolerance(backend_name: str, device: torch.device) -> float:
    """Relative error that a row may have: Hopper accumulates fp8 products in fewer bits."""
    return SHORT if device.type == "cuda" and backend_name == "triton_cuda" else 1e-5


def bytes_as(values: list[int], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """fp8 of the given bytes, repeated to the shape."""
    flat = torch.tensor(values, dtype=torch.uint8)
    size = torch.Size(shape).numel()
    return flat.repeat(-(-size // len(values)))[:size].reshape(shape).to(device).view(dtype)


def whole(rows: int, keys: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds that let every row see every key."""
    ks = torch.zeros(rows, dtype=torch.int32, device=device)
    return ks, torch.full_like(ks, keys)


@pytest.mark.parametrize(("heads", "dim"), [(1, 32), (1, 128), (8, 32), (8, 256)])
def test_what_short_accumulators_round_is_allowed(heads, dim, generator):
    """All terms of a step of 32 channels, the sum so far among them, cut to 13 bits below the largest one's first."""
    rows, keys = 150, 40
    o = problems.make(rows, keys, heads, dim, generator)
    o.ks, o.ke = torch.arange(rows, dtype=torch.int32) % keys, torch.arange(rows, dtype=torch.int32) % keys + 1
    q, k, total = o.q.double(), o.k.double(), torch.zeros(rows, heads, keys, dtype=torch.float64)
    for step in range(0, dim, 32):
        products = q[:, :, None, step : step + 32] * k[None, None, :, step : step + 32]
        terms = torch.cat([products, total[..., None]], dim=3)
        first = terms.abs().amax(dim=3, keepdim=True).frexp().exponent - 1
        unit = 2.0 ** (first.double() - SHORT_BITS)
        total = ((terms / unit).trunc() * unit).sum(dim=3)
    got = torch.einsum("mhn,mh->mn", total.relu(), o.weights.double()) * o.k_scale.double()
    right = oracle(o)
    error = (got - right).masked_fill(right.isinf(), 0).norm(dim=1)
    assert (error <= allowed(o, SHORT)).all()
    assert (error > 0).any()


@pytest.mark.parametrize("heads", [1, 2, 4, 6, 8, 16, 32, 48, 64, 128])  # S21, S22
def test_heads(heads, backend_name, device, tolerance, generator):
    check(problems.make(5, 150, heads, 64, generator, device=device, ragged=True), backend_name, tolerance)


@pytest.mark.parametrize("dim", [32, 64, 128, 256])
@pytest.mark.parametrize("heads", [16, 64])
def test_dims(heads, dim, backend_name, device, tolerance, generator):
    check(problems.make(7, 140, heads, dim, generator, device=device), backend_name, tolerance)


@pytest.mark.parametrize("rows,keys", [(1, 1), (1, 1000), (3, 127), (4, 128), (5, 129), (33, 257), (130, 64)])
def test_sizes(rows, keys, backend_name, device, tolerance, generator):
    check(problems.make(rows, keys, 32, 32, generator, device=device, ragged=True), backend_name, tolerance)


@pytest.mark.parametrize("rows,keys", [(0, 5), (5, 0), (0, 0)])
def test_empty(rows, keys, backend_name, device, generator):
    o = problems.make(rows, keys, 4, 32, generator, device=device, ragged=True)
    assert pi.fp8_mqa_logits(*o.args, backend=backend_name, clean_logits=True).shape == (rows, keys)


@pytest.mark.parametrize("q_dtype,k_dtype,value", [(FN, FN, 128), (FN, FNUZ, 64), (FNUZ, FN, 64), (FNUZ, FNUZ, 32)])
def test_encoding_belongs_to_the_tensor(q_dtype, k_dtype, value, backend_name, device):  # S01, S03, S07, S31
    q = bytes_as([0x38], (2, 1, 128), q_dtype, device)
    k = bytes_as([0x38], (9, 128), k_dtype, device)
    ones = torch.ones(9, device=device)
    logits = pi.fp8_mqa_logits(q, (k, ones), ones[:2, None], *whole(2, 9, device), backend=backend_name)
    assert (logits == value).all()


@pytest.mark.parametrize("q_dtype", [FN, FNUZ])
@pytest.mark.parametrize("k_dtype", [FN, FNUZ])
def test_every_byte(q_dtype, k_dtype, backend_name, device):  # S02, S03
    """Each byte that is a number, against each: one channel of q and k holds it, and both signs of weight."""
    numbers = [b for b in range(256) if not bytes_as([b], (1,), q_dtype, device).float().isnan()]
    q = torch.zeros((len(numbers), 2, 32), dtype=torch.uint8)
    q[:, :, 3] = torch.tensor(numbers, dtype=torch.uint8)[:, None]
    numbers = [b for b in range(256) if not bytes_as([b], (1,), k_dtype, device).float().isnan()]
    k = torch.zeros((len(numbers), 32), dtype=torch.uint8)
    k[:, 3] = torch.tensor(numbers, dtype=torch.uint8)
    rows = q.shape[0]
    weights = torch.tensor([[1.0, -0.5]]).repeat(rows, 1)
    o = problems.Operands(
        q.to(device).view(q_dtype),
        k.to(device).view(k_dtype),
        torch.ones(len(numbers), device=device),
        weights.to(device),
        *whole(rows, len(numbers), device),
    )
    logits = pi.fp8_mqa_logits(*o.args, backend=backend_name)
    assert torch.equal(logits.cpu().double(), oracle(o))


@pytest.mark.parametrize("q_dtype", [FN, FNUZ])
@pytest.mark.parametrize("k_dtype", [FN, FNUZ])
def test_random_encodings(q_dtype, k_dtype, backend_name, device, tolerance, generator):  # S03
    o = problems.make(6, 150, 32, 64, generator, device=device, q_dtype=q_dtype, k_dtype=k_dtype)
    check(o, backend_name, tolerance)


def test_minus_zero_bytes_are_no_nan(backend_name, device):  # S02
    q = bytes_as([0x38], (1, 1, 128), FN, device)
    for pattern, value in (([0x38] * 127 + [0x80], 127.0), ([0x00, 0x80], 0.0)):
        k = bytes_as(pattern, (3, 128), FN, device)
        one = torch.ones(3, device=device)
        logits = pi.fp8_mqa_logits(q, (k, one), one[:1, None], *whole(1, 3, device), backend=backend_name)
        assert logits.tolist() == [[value] * 3]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter reads NaN bytes as numbers")
@pytest.mark.parametrize("q_dtype,nan_q", [(FN, 0x7F), (FN, 0xFF), (FNUZ, 0x80)])
@pytest.mark.parametrize("k_dtype,nan_k", [(FN, 0x7F), (FN, 0xFF), (FNUZ, 0x80)])
def test_nan_stays_where_it_belongs(q_dtype, nan_q, k_dtype, nan_k, backend_name, device, generator):
    o = problems.make(9, 200, 16, 64, generator, device=device, q_dtype=q_dtype, k_dtype=k_dtype)
    ks, ke = whole(9, 200, device)
    o.ks, o.ke = ks, ke
    before = pi.fp8_mqa_logits(*o.args, backend=backend_name)
    o.k.view(torch.uint8)[[0, 77, 199], [5, 0, 63]] = nan_k
    o.q.view(torch.uint8)[4, 3, 9] = nan_q
    o.weights[4, 3] = 0.0
    after = pi.fp8_mqa_logits(*o.args, backend=backend_name)
    belongs = torch.zeros((9, 200), dtype=torch.bool)
    belongs[:, [0, 77, 199]] = True
    belongs[4] = True
    assert torch.equal(after.isnan().cpu(), belongs)
    assert torch.equal(after.cpu()[~belongs], before.cpu()[~belongs])


def test_relu_comes_before_the_weights(backend_name, device):  # S32
    q = torch.tensor([1.0, -3.0], device=device).reshape(1, 2, 1).repeat(1, 1, 32)
    q[:, :, 1:] = 0
    k = torch.zeros((1, 32), device=device)
    k[0, 0] = 1
    for weights, value in (((1.0, 1.0), 1.0), ((1.0, -1.0), 1.0), ((-2.0, 5.0), -2.0)):
        logits = pi.fp8_mqa_logits(
            q.to(FN),
            (k.to(FN), torch.ones(1, device=device)),
            torch.tensor([weights], device=device),
            *whole(1, 1, device),
            backend=backend_name,
        )
        assert logits.tolist() == [[value]]


@pytest.mark.parametrize("column", [False, True])
def test_every_key_has_its_own_scale(column, backend_name, device):  # S09, S11
    keys = 300
    q = bytes_as([0x38], (2, 64, 128), FN, device)
    k = bytes_as([0x38], (keys, 128), FN, device)
    scale = torch.arange(1, keys + 1, device=device).float()
    given = scale[:, None] if column else scale
    weights = torch.ones((2, 64), device=device)
    logits = pi.fp8_mqa_logits(q, (k, given), weights, *whole(2, keys, device), backend=backend_name)
    assert torch.equal(logits, (scale * 128 * 64).expand(2, -1))


def test_views_keep_their_offset(backend_name, device, generator, tolerance):  # S13, S39
    """Layer 1 of a packed buffer, k from row 3, scales from 12 bytes on, scales as every second element."""
    packed = problems.make(6, 400, 8, 64, generator, device=device)
    packed.k_scale[200:] = 3.0
    o = problems.make(6, 200, 8, 64, generator, device=device)
    o.k, o.k_scale = packed.k[200:], packed.k_scale[200:]
    check(o, backend_name, tolerance)
    o.k, o.k_scale = packed.k[3:203], packed.k_scale[3:203]
    check(o, backend_name, tolerance)
    o.k_scale = packed.k_scale[::2]
    check(o, backend_name, tolerance)


@pytest.mark.parametrize("pitch", [64, 68, 65, 96])
def test_strided_operands(pitch, backend_name, device, generator, tolerance):
    """Rows of K with a pitch (interleaved caches: 132 bytes), heads of q apart, weights of a wider matrix."""
    o = problems.make(6, 150, 6, 64, generator, device=device, ragged=True)
    wide = torch.zeros((150, pitch), dtype=torch.uint8, device=device)
    wide[:, :64] = o.k.view(torch.uint8)
    o.k = wide.view(FN)[:, :64]
    q = torch.zeros((6, 12, pitch), dtype=torch.uint8, device=device)
    q[:, ::2, :64] = o.q.view(torch.uint8)
    o.q = q.view(FN)[:, ::2, :64]
    weights = torch.full((6, 11), torch.nan, device=device)
    weights[:, 5:] = o.weights
    o.weights = weights[:, 5:]
    check(o, backend_name, tolerance)


def test_verify_rows_see_their_own_prefix(backend_name, device, generator):  # S14, S45
    o = problems.make(4, 8, 4, 32, generator, device=device)
    logits = pi.fp8_mqa_logits(*o.args, clean_logits=True, backend=backend_name)
    assert torch.isfinite(logits).sum(1).tolist() == [5, 6, 7, 8]
    assert (logits.isneginf() == ~torch.isfinite(logits)).all()


@pytest.mark.parametrize("rows,keys", [(8, 130), (2, 37), (3, 2049)])
def test_nothing_is_written_beside_the_row(rows, keys, backend_name, device, generator):  # S15, S16
    """A buffer exactly as wide as the keys inside guard columns and rows, cleaned and not."""
    o = problems.make(rows, keys, 4, 32, generator, device=device, ragged=True)
    for clean in (False, True):
        for left in (0, 1, 4):
            whole_buffer = torch.full((rows + 2, keys + 9), GUARD, device=device)
            out = whole_buffer[1:-1, left : left + keys]
            pi.fp8_mqa_logits(*o.args, out=out, clean_logits=clean, backend=backend_name)
            right = torch.isfinite(oracle(o))
            assert (out.cpu()[~right] == (-torch.inf if clean else GUARD)).all()
            assert torch.isfinite(out.cpu()[right]).all()
            out.fill_(GUARD)
            assert (whole_buffer == GUARD).all()


def test_no_valid_key_at_all(backend_name, device, generator):  # S19
    o = problems.make(6, 70, 8, 32, generator, device=device)
    o.ks = torch.tensor([0, 5, 70, 71, -3, 2**31 - 1], dtype=torch.int32, device=device)
    o.ke = torch.tensor([0, 5, 90, 3, -1, -(2**31)], dtype=torch.int32, device=device)
    out = torch.full((6, 70), GUARD, device=device)
    pi.fp8_mqa_logits(*o.args, out=out, backend=backend_name)
    assert (out == GUARD).all()
    pi.fp8_mqa_logits(*o.args, out=out, clean_logits=True, backend=backend_name)
    assert out.isneginf().all()


def test_a_row_far_below_zero_beside_a_whole_one(backend_name, device, generator, tolerance):  # T13
    """ke - ks does not fit into int32; the row's neighbours in the tile keep the program running."""
    o = problems.make(4, 70, 64, 32, generator, device=device)
    o.ks = torch.tensor([5, 0, 69, 1], dtype=torch.int32, device=device)
    o.ke = torch.tensor([-(2**31), 70, -(2**31), -(2**31) + 1], dtype=torch.int32, device=device)
    check(o, backend_name, tolerance)


def test_bounds_beyond_the_keys_are_clamped(backend_name, device, generator, tolerance):
    o = problems.make(4, 70, 8, 32, generator, device=device)
    o.ks = torch.tensor([-5, -(2**31), 10, 0], dtype=torch.int32, device=device)
    o.ke = torch.tensor([80, 2**31 - 1, 1000, 70], dtype=torch.int32, device=device)
    check(o, backend_name, tolerance)


def test_packed_requests(backend_name, device, generator, tolerance):  # S33, S44
    """Two requests of 40 and 37 tokens in one K: request 1 starts at packed key 40, its row 0 sees one key."""
    o = problems.make(77, 77, 8, 32, generator, device=device)
    token = torch.arange(77, dtype=torch.int32, device=device)
    o.ks, o.ke = torch.where(token < 40, 0, 40).int(), token + 1
    out = check(o, backend_name, tolerance)
    assert int((out[40] != GUARD).sum()) == 1


@pytest.mark.parametrize("keys", [2047, 2048, 2049, 4096])
def test_both_sides_of_every_boundary(keys, backend_name, device, generator, tolerance):  # S36
    check(problems.make(2, keys, 32, 128, generator, device=device), backend_name, tolerance)


@pytest.mark.parametrize("rows", [65_536, 70_000])
def test_many_rows(rows, backend_name, device, generator):  # S29, S30
    """Rows past the limit of a grid's second axis; only a few see keys, the last ones among them."""
    o = problems.make(rows, 64, 1, 32, generator, device=device)
    keep = torch.tensor([0, 1, rows // 2, rows - 2, rows - 1], device=device)
    o.ks = torch.zeros(rows, dtype=torch.int32, device=device)
    o.ke = torch.zeros(rows, dtype=torch.int32, device=device)
    o.ke[keep] = 64
    out = torch.full((rows, 64), GUARD, device=device)
    pi.fp8_mqa_logits(*o.args, out=out, backend=backend_name)
    part = problems.Operands(o.q[keep], o.k, o.k_scale, o.weights[keep], o.ks[keep], o.ke[keep])
    assert torch.allclose(out[keep].cpu().double(), oracle(part), rtol=1e-3, atol=1e-3)
    out[keep] = GUARD
    assert (out == GUARD).all()


@pytest.mark.parametrize("rows,pitch", [(520, 1 << 20), (2049, 262_144)])
def test_output_beyond_2_gib(rows, pitch, backend_name, device, generator, tolerance):  # S24, S25
    """Rows whose byte offset passes 2 GiB; on a CPU only the touched pages of the buffer are real."""
    o = problems.make(rows, 40, 2, 32, generator, device=device)
    buffer = torch.empty(rows * pitch, device=device)
    out = buffer.view(rows, pitch)[:, :40]
    out.fill_(GUARD)
    pi.fp8_mqa_logits(*o.args, out=out, backend=backend_name)
    right, sizes = oracle(o), oracle(o, absolute=True)
    for row in (0, 510, 511, 512, 519, rows - 2, rows - 1):
        valid = torch.isfinite(right[row])
        assert (out[row].cpu()[~valid] == GUARD).all()
        error = (out[row].cpu().double() - right[row])[valid].norm()
        assert error <= tolerance * sizes[row][valid].norm()


def test_keys_beyond_2_gib(backend_name, device, generator, tolerance):  # S26, S28
    """Keys 8 MiB apart: the last byte offset is past 2 GiB."""
    o = problems.make(3, 300, 2, 32, generator, device=device)
    apart = torch.empty(300 << 23, dtype=torch.uint8, device=device).view(300, 1 << 23)[:, :32]
    apart.copy_(o.k.view(torch.uint8))
    o.k = apart.view(FN)
    check(o, backend_name, tolerance)


def test_a_row_does_not_depend_on_its_company(backend_name, device, generator):  # S43, S44
    """The same bits for a row alone, in chunks of any size, in a wider buffer, and twenty times over."""
    o = problems.make(17, 200, 64, 128, generator, device=device)
    right = pi.fp8_mqa_logits(*o.args, clean_logits=True, backend=backend_name)
    for _ in range(20 if device.type == "cuda" else 2):
        assert torch.equal(pi.fp8_mqa_logits(*o.args, clean_logits=True, backend=backend_name), right)
    for step in (1, 3, 8):
        out = torch.empty((17, 211), device=device)[:, :200]
        for first in range(0, 17, step):
            part = slice(first, first + step)
            pi.fp8_mqa_logits(
                o.q[part],
                (o.k, o.k_scale),
                o.weights[part],
                o.ks[part],
                o.ke[part],
                out=out[part],
                clean_logits=True,
                backend=backend_name,
            )
        assert torch.equal(out, right)
