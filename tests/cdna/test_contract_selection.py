"""Selection, as compiled for the architecture, through the public functions: the very ids, in order."""

from __future__ import annotations

import pytest
import torch

import portable_indexer as pi

from .sparse import sparse
from .test_contract_scoring import FN, FNUZ, bounds, operands

pytestmark = pytest.mark.usefixtures("cdna")
POISON = -77


def choose(logits, ks, ke, topk, backend="triton_rocm"):
    out = torch.full((logits.shape[0], topk + 3), POISON, dtype=torch.int32)
    pi.top_k_per_row(logits, ks, ke, topk, out=out, backend=backend)
    assert (out[:, topk:] == POISON).all()
    return out[:, :topk]


def check(logits, ks, ke, topk):
    before = logits.clone()
    got = choose(logits, ks, ke, topk)
    assert torch.equal(got, choose(logits, ks, ke, topk, "reference"))
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))


def ragged(rows, keys, generator):
    """Any bounds: inverted ones, one key, no key, before the start and past the end."""
    ks = torch.randint(-2, keys, (rows,), generator=generator, dtype=torch.int32)
    ke = torch.randint(0, keys + 50, (rows,), generator=generator, dtype=torch.int32)
    fixed = torch.tensor([(0, keys), (5, 5), (keys - 1, keys), (9, 3)][:rows], dtype=torch.int32)
    ks[: len(fixed)], ke[: len(fixed)] = fixed[:, 0], fixed[:, 1]
    return ks, ke


def fill(kind, rows, keys, generator):
    if kind == "random":
        return torch.randn(rows, keys, generator=generator)
    if kind == "ties":
        return torch.randint(-2, 3, (rows, keys), generator=generator).float()
    if kind == "one value":
        return torch.full((rows, keys), -1.5)
    if kind == "ascending":
        return torch.arange(rows * keys, dtype=torch.float32).view(rows, keys) - 1000
    special = torch.tensor([float("nan"), -float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-45, -1e-45, 1.0])
    return special[torch.randint(0, len(special), (rows, keys), generator=generator)]


KINDS = ["random", "ties", "one value", "ascending", "special"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("keys", "topk"), [(1, 1), (700, 64), (1000, 512), (5000, 2048)])
def test_short_rows(generator, kind, keys, topk):  # S18
    check(fill(kind, 6, keys, generator), *ragged(6, keys, generator), topk)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("keys", "topk"), [(20_000, 512), (40_001, 2048)])
def test_long_rows(generator, kind, keys, topk):
    check(fill(kind, 3, keys, generator), *ragged(3, keys, generator), topk)


def test_nothing_outside_the_bounds_is_chosen(generator):  # S17
    logits = torch.full((4, 900), float("inf"))
    ks, ke = bounds((100, 500), (0, 10), (899, 900), (300, 300))
    for row in range(4):
        part = slice(int(ks[row]), int(ke[row]))
        logits[row, part] = torch.randn(logits[row, part].shape, generator=generator)
    check(logits, ks, ke, 64)
    check(logits.masked_fill(logits == float("inf"), float("nan")), ks, ke, 64)


@pytest.mark.parametrize(("shift", "pitch"), [(0, 20_480), (1, 20_481), (3, 20_500)])
def test_pitch_and_alignment(generator, shift, pitch):
    storage = torch.full((3, pitch + 8), float("inf"))
    logits = storage[:, shift : shift + 20_300]
    logits.copy_(fill("ties", 3, 20_300, generator))
    check(logits, *bounds((0, 20_300), (7, 20_000), (1, 18_001)), 512)


@pytest.mark.parametrize("width", [3000, 20_000])
def test_a_row_past_2_31(generator, width):
    """Rows 2^30 elements apart: the third begins at 2^31, the fifth at 2^32, 16 GiB into the logits."""
    logits = sparse((6, 1 << 30), torch.float32)[:, 1 << 20 :][:, :width]
    for row in range(6):
        logits[row] = fill("ties", 1, width, generator)[0] + row
    ks, ke = bounds((0, width), (7, 2900), (0, width), (100, width), (5, width), (0, 2000))
    got = choose(logits, ks, ke, 512)
    assert torch.equal(got, choose(logits.clone(), ks, ke, 512, "reference"))


@pytest.mark.parametrize(("q_dtype", "k_dtype"), [(FN, FN), (FNUZ, FNUZ), (FN, FNUZ)])
def test_index_topk_is_score_and_select(generator, q_dtype, k_dtype):
    q, kv, weights = operands(9, 700, 32, 64, generator, q_dtype, k_dtype)
    ks, ke = bounds((0, 700), (0, 3), (5, 600), (20, 20), (9, 2), (0, 64), (699, 700), (-4, 80), (100, 9000))
    scores = pi.fp8_mqa_logits(q, kv, weights, ks, ke, clean_logits=True, backend="triton_rocm")
    expected = choose(scores, ks, ke, 64, "reference")
    out = torch.full((9, 70), POISON, dtype=torch.int32)
    pi.index_topk(q, kv, weights, ks, ke, 64, out=out, backend="triton_rocm")
    assert torch.equal(out[:, :64], expected) and (out[:, 64:] == POISON).all()


def test_index_topk_with_exact_ties_is_the_reference(generator):
    """Small whole numbers: every score is exact, most of them tie."""
    q = torch.randint(-1, 2, (6, 4, 32), generator=generator).float().to(FN)
    k = torch.randint(-1, 2, (900, 32), generator=generator).float().to(FN)
    weights, scale = torch.randint(-2, 3, (6, 4), generator=generator).float(), torch.ones(900)
    ks, ke = bounds((0, 900), (1, 899), (450, 900), (0, 100), (3, 3), (0, 512))
    got, right = (
        pi.index_topk(q, (k, scale), weights, ks, ke, 128, backend=name) for name in ("triton_rocm", "reference")
    )
    assert torch.equal(got, right)
