"""Scoring, as compiled for the architecture, through the public function.

What the shared contract suite cannot ask in an interpreter is asked here: NaN and -0 bytes, encodings that the
matrix unit lacks, bits that may not depend on a row's place, rows and keys past 2^31.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import portable_indexer as pi
from portable_indexer.backends.triton_common import scoring
from portable_indexer.registry import get_backend

from .errors import MemoryFault
from .sparse import sparse

pytestmark = pytest.mark.usefixtures("cdna")
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
ENCODINGS = list(itertools.product((FN, FNUZ), repeat=2))
GUARD = 7.0


def operands(rows, keys, heads, dim, generator, q_dtype=FN, k_dtype=FN):
    """q, (k, k_scale), weights of both signs; a third of the bytes are zeros of either sign."""

    def fp8(shape, dtype):
        values = torch.randn(shape, generator=generator).to(dtype).view(torch.uint8)
        zeros = torch.rand(shape, generator=generator)
        values[zeros < 0.2] = 0
        if dtype == FN:
            values[zeros > 0.9] = 0x80
        return values.view(dtype)

    scale = torch.rand(keys, generator=generator) + 0.5
    weights = torch.randn((rows, heads), generator=generator)
    return fp8((rows, heads, dim), q_dtype), (fp8((keys, dim), k_dtype), scale), weights


def bounds(*pairs):
    ks, ke = zip(*pairs, strict=True)
    return torch.tensor(ks, dtype=torch.int32), torch.tensor(ke, dtype=torch.int32)


def score(q, kv, weights, ks, ke, backend="triton_rocm", **options):
    """Logits in a buffer that holds a guard value wherever nothing was written."""
    out = torch.full((q.shape[0], kv[0].shape[0]), GUARD)
    return pi.fp8_mqa_logits(q, kv, weights, ks, ke, out=out, backend=backend, **options)


def inside(ks, ke, keys):
    column = torch.arange(keys)
    return (column >= ks[:, None]) & (column < ke[:, None])


def assert_close(got, right, valid):
    """Every row within 1e-5 of the reference in norm, the guard everywhere else."""
    assert (got[~valid] == GUARD).all()
    error = (got - right).double().masked_fill(~valid, 0).norm(dim=1)
    assert (error <= 1e-5 * right.double().masked_fill(~valid, 0).norm(dim=1)).all()


RAGGED = [(0, 300), (3, 40), (128, 128), (200, 100), (299, 300), (-5, 17), (0, 1), (127, 129), (250, 900), (64, 192)]


@pytest.mark.parametrize(("q_dtype", "k_dtype"), ENCODINGS)
@pytest.mark.parametrize(("heads", "dim"), [(64, 128), (32, 128), (4, 64)])
def test_close_to_the_reference(cdna, generator, q_dtype, k_dtype, heads, dim):  # S03, S07
    q, kv, weights = operands(10, 300, heads, dim, generator, q_dtype, k_dtype)
    ks, ke = bounds(*RAGGED)
    got = score(q, kv, weights, ks, ke)
    assert_close(got, score(q, kv, weights, ks, ke, "reference"), inside(ks, ke, 300))
    assert cdna.launches["mqa_logits_kernel"] == 1
    native = "fp8" if q_dtype == k_dtype == (FNUZ if cdna.arch == "gfx942" else FN) else None
    if native or cdna.arch == "gfx942":
        assert any("mfma" in name and ("fp8" in name or "f8f6f4" in name) for name in cdna.mnemonics)


@pytest.mark.parametrize(("q_dtype", "k_dtype"), ENCODINGS)
def test_nan_bytes_stay_in_their_column_and_row(generator, q_dtype, k_dtype):  # S02
    q, (k, scale), weights = operands(6, 150, 8, 64, generator, q_dtype, k_dtype)
    for tensor, dtype, places in ((q, q_dtype, [(4, 2, 63)]), (k, k_dtype, [(0, 5), (131, 0), (149, 40)])):
        for n, place in enumerate(places):
            tensor.view(torch.uint8)[place] = 0x80 if dtype == FNUZ else (0x7F, 0xFF)[n % 2]
    ks, ke = bounds(*[(0, 150)] * 6)
    got = score(q, (k, scale), weights, ks, ke)
    nan = torch.zeros(6, 150, dtype=torch.bool)
    nan[4], nan[:, [0, 131, 149]] = True, True
    assert torch.equal(got.isnan(), nan)
    right = score(q, (k, scale), weights, ks, ke, "reference")
    assert_close(got.nan_to_num(nan=0.0), right.nan_to_num(nan=0.0), torch.ones_like(nan))


@pytest.mark.parametrize(
    ("q_dtype", "k_dtype", "value"), [(FN, FN, 128), (FN, FNUZ, 64), (FNUZ, FN, 64), (FNUZ, FNUZ, 32)]
)
def test_every_byte_0x38(q_dtype, k_dtype, value):  # S01, S07
    q = torch.full((2, 1, 128), 0x38, dtype=torch.uint8).view(q_dtype)
    k = torch.full((9, 128), 0x38, dtype=torch.uint8).view(k_dtype)
    got = score(q, (k, torch.ones(9)), torch.ones(2, 1), *bounds((0, 9), (2, 5)))
    assert (got[0] == value).all() and got[1].tolist() == [GUARD] * 2 + [value] * 3 + [GUARD] * 4


def test_negative_zero_is_zero():  # S02
    k = torch.full((4, 128), 0x38, dtype=torch.uint8)
    k[1, 7], k[2, ::2], k[3] = 0x80, 0x80, 0x80
    q = torch.full((1, 1, 128), 0x38, dtype=torch.uint8).view(FN)
    got = score(q, (k.view(FN), torch.ones(4)), torch.ones(1, 1), *bounds((0, 4)))
    assert got.tolist() == [[128, 127, 64, 0]]


@pytest.mark.parametrize(("q_dtype", "k_dtype"), [(FN, FN), (FNUZ, FNUZ)])
@pytest.mark.parametrize("heads", [64, 32])
def test_bits_do_not_depend_on_the_place(generator, q_dtype, k_dtype, heads):
    """One row's logits: in every slot of a tile, any split, at any key offset, in both variants."""
    q, (k, scale), weights = operands(1, 200, heads, 128, generator, q_dtype, k_dtype)
    backend = get_backend("triton_rocm")
    choice = backend.scoring_choice(heads, 128, q_dtype, k_dtype)
    expected = score(q, (k, scale), weights, *bounds((0, 200)))[0]
    assert not torch.equal(expected, torch.full((200,), GUARD))
    rows = 2 * choice.rows + 1
    for shift, splits, aligned in (
        (0, 1, True),
        (0, 3, True),
        (5, 2, True),
        (16, 1, True),
        (131, 1, False),
        (1, 5, False),
    ):
        keys = 200 + shift + 9
        wide_k = torch.zeros((keys, 128), dtype=torch.uint8)
        wide_k[shift : shift + 200] = k.view(torch.uint8)
        wide_scale = torch.full((keys,), float("nan"))
        wide_scale[shift : shift + 200] = scale
        pitch = -(-keys // 4) * 4
        out = torch.full((rows, pitch), GUARD)[:, :keys]
        ks, ke = bounds(*[(shift, shift + 200)] * rows)
        scoring.mqa_logits(
            q.view(torch.uint8).repeat(rows, 1, 1).view(q_dtype), wide_k.view(k_dtype), wide_scale,
            weights.repeat(rows, 1), ks, ke, out, choice=choice, units=4, splits=splits,
            variant=scoring.Variant(aligned, False),
        )  # fmt: skip
        same = out[:, shift : shift + 200].view(torch.int32) == expected.view(torch.int32)
        assert same.all(), (shift, splits, aligned, same.logical_not().nonzero()[:5])
        assert (out[:, :shift] == GUARD).all() and (out[:, shift + 200 :] == GUARD).all()


def test_clean_logits(generator):  # S17
    q, kv, weights = operands(4, 2100, 4, 32, generator)
    ks, ke = bounds((0, 2100), (5, 7), (9, 9), (2000, 2099))
    got = score(q, kv, weights, ks, ke, clean_logits=True)
    right = score(q, kv, weights, ks, ke, "reference", clean_logits=True)
    valid = inside(ks, ke, 2100)
    assert (got[~valid] == float("-inf")).all()
    assert_close(got.masked_fill(~valid, GUARD), right.masked_fill(~valid, GUARD), valid)


@pytest.mark.parametrize("k_dtype", [FN, FNUZ])
def test_rows_and_keys_past_2_31(generator, k_dtype):
    """17.3 million keys (2.2 GB of them) and 130 rows of logits (9 GB), of which a few pages exist."""
    rows, keys, heads = 130, 17_300_000, 8
    q, _, weights = operands(rows, 1, heads, 128, generator, k_dtype=k_dtype)
    k, scale, out = (
        sparse((keys, 128), torch.uint8),
        sparse((keys,), torch.float32),
        sparse((rows, keys), torch.float32),
    )
    assert k.numel() > 2**31 and out.numel() > 2**31
    places = [0, 16_777_000, keys - 300]  # the second spans byte 2^31 of the keys
    for place in places:
        _, (some_k, some_scale), _ = operands(1, 300, 1, 128, generator, k_dtype=k_dtype)
        k[place : place + 300], scale[place : place + 300] = some_k.view(torch.uint8), some_scale
    starts = [places[min(row // 48, 2)] for row in range(rows)]  # rows of one tile see keys side by side
    ks, ke = bounds(*[(start, start + 300) for start in starts])
    pi.fp8_mqa_logits(q, (k.view(k_dtype), scale), weights, ks, ke, out=out, backend="triton_rocm")
    for place in places:
        mine = torch.tensor([row for row, start in enumerate(starts) if start == place])
        part = slice(place, place + 300)
        some_q = q.view(torch.uint8)[mine].view(FN)
        window = bounds(*[(0, 300)] * len(mine))
        right = score(some_q, (k[part].view(k_dtype), scale[part]), weights[mine], *window, "reference")
        assert_close(out[mine, part], right, torch.ones_like(right, dtype=torch.bool))


def test_a_missing_factor_is_caught(cdna, generator, monkeypatch):
    """OCP bytes reread as fnuz without the 2 that each operand owes, as float16 without its 2^8."""
    monkeypatch.setattr(scoring, "OWED", dict.fromkeys(scoring.OWED, 1.0))
    q_dtype = FN if cdna.arch == "gfx942" else FNUZ
    q, kv, weights = operands(2, 64, 32, 64, generator, q_dtype, q_dtype)
    ks, ke = bounds((0, 64), (0, 64))
    got, right = score(q, kv, weights, ks, ke), score(q, kv, weights, ks, ke, "reference")
    factor = 4 if cdna.arch == "gfx942" else 2**14
    with pytest.raises(AssertionError):
        assert_close(got, right, inside(ks, ke, 64))
    assert_close(got * factor, right, inside(ks, ke, 64))


def test_a_store_past_the_row_is_caught(generator):
    """A launch that claims more keys than there are runs off the tensors."""
    q, (_, scale), weights = operands(1, 100, 4, 32, generator)
    choice = get_backend("triton_rocm").scoring_choice(4, 32, FN, FN)
    ks, ke = bounds((0, 108))
    wide = torch.zeros(108, 32, dtype=torch.uint8).view(FN)
    with pytest.raises(MemoryFault):
        scoring.mqa_logits(q, wide, scale, weights, ks, ke, torch.zeros(1, 108), choice=choice, units=4)
    with pytest.raises(MemoryFault):
        scoring.mqa_logits(q, wide, torch.ones(108), weights, ks, ke, torch.zeros(1, 100), choice=choice, units=4)
