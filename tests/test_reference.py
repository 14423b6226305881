"""The oracle itself, against loops over plain Python numbers and hand-worked values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Operands, fp8, make

import portable_indexer as pi

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def naive_logits(p: Operands, row: int, key: int) -> float:
    total = torch.tensor(0.0)
    for h in range(p.q.shape[1]):
        dot = sum(float(a) * float(b) for a, b in zip(p.q[row, h].float(), p.k[key].float(), strict=True))
        total = total + torch.tensor(dot, dtype=torch.float32).relu() * p.weights[row, h]
    return float(total * p.k_scale[key])


def naive_topk(scores: list[float], ks: int, ke: int, topk: int, keys: int) -> list[int]:
    valid = range(max(ks, 0), min(ke, keys))
    rank = sorted(valid, key=lambda n: (math.inf if math.isnan(scores[n]) else -scores[n], n))
    ids = sorted(n - ks for n in rank[:topk])
    return ids + [-1] * (topk - len(ids))


@pytest.mark.parametrize("q_dtype", [FN, FNUZ])
@pytest.mark.parametrize("k_dtype", [FN, FNUZ])
def test_logits_are_the_formula(q_dtype: torch.dtype, k_dtype: torch.dtype, generator: torch.Generator) -> None:
    p = make(5, 23, 3, 8, generator, q_dtype=q_dtype, k_dtype=k_dtype, ragged=True)
    out = torch.full((5, 23), 7.0)
    got = pi.fp8_mqa_logits(*p.args, out=out, backend="reference")
    assert got is out
    for m in range(5):
        for n in range(23):
            valid = p.ks[m] <= n < p.ke[m]
            assert float(out[m, n]) == (naive_logits(p, m, n) if valid else 7.0)
    clean = pi.fp8_mqa_logits(*p.args, clean_logits=True, backend="reference")
    column = torch.arange(23)
    valid = (column >= p.ks[:, None]) & (column < p.ke[:, None])
    assert torch.equal(clean, torch.where(valid, out, -torch.inf))


@settings(deadline=None, max_examples=200)
@given(
    scores=st.lists(
        st.sampled_from([0.0, -0.0, 1.0, 1.0 + 2**-23, -1.0, math.inf, -math.inf, math.nan, 1e-45]),
        max_size=24,
    ),
    ks=st.integers(-3, 26),
    ke=st.integers(-3, 26),
    topk=st.integers(1, 12),
)
def test_choice_is_the_total_order(scores: list[float], ks: int, ke: int, topk: int) -> None:
    logits = torch.tensor([scores], dtype=torch.float32).reshape(1, len(scores))
    bounds = [torch.tensor([value], dtype=torch.int32) for value in (ks, ke)]
    out = torch.full((1, topk), 2**31 - 1, dtype=torch.int32)
    pi.top_k_per_row(logits, *bounds, topk, out=out, backend="reference")
    assert out[0].tolist() == naive_topk(scores, ks, ke, topk, len(scores))


def test_relu_stands_before_the_weights() -> None:  # S32
    q = torch.zeros(2, 2, 16)
    q[:, 0, 0], q[:, 1, 1] = 1.0, 1.0
    k = torch.zeros(1, 16)
    k[0, 0], k[0, 1] = 1.0, -3.0
    weights = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    bounds = torch.zeros(2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    got = pi.fp8_mqa_logits(q.to(FN), (k.to(FN), torch.ones(1)), weights, *bounds)
    assert got.flatten().tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("q_dtype", "k_dtype", "value"), [(FN, FN, 128.0), (FN, FNUZ, 64.0), (FNUZ, FN, 64.0), (FNUZ, FNUZ, 32.0)]
)
def test_encodings_belong_to_tensors(q_dtype: torch.dtype, k_dtype: torch.dtype, value: float) -> None:
    # S01, S03, S07
    q = torch.full((1, 1, 128), 0x38, dtype=torch.uint8).view(q_dtype)
    k = torch.full((1, 128), 0x38, dtype=torch.uint8).view(k_dtype)
    bounds = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    got = pi.fp8_mqa_logits(q, (k, torch.ones(1)), torch.ones(1, 1), *bounds)
    assert float(got) == value


def test_nan_reaches_only_its_own_logits(generator: torch.Generator) -> None:  # S02, S18
    p = make(4, 20, 2, 32, generator)
    p.ks.zero_()
    p.ke.fill_(20)
    p.k.view(torch.uint8)[3, 5] = 0x7F
    p.q.view(torch.uint8)[1, 0, 2] = 0xFF
    got = pi.fp8_mqa_logits(*p.args)
    want = torch.zeros(4, 20, dtype=torch.bool)
    want[:, 3] = True
    want[1, :] = True
    assert torch.equal(got.isnan(), want)
    p.k.view(torch.uint8)[3, 5] = 0x80  # minus zero, in this encoding
    assert not pi.fp8_mqa_logits(*p.args)[0].isnan().any()


@pytest.mark.parametrize("megabytes", ["1", "2", "3", "512"])
def test_answer_does_not_depend_on_the_budget(
    megabytes: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:  # M01, M13, T08, T31
    p = make(70, 9_000, 2, 32, generator, levels=1)
    whole = pi.index_topk(*p.args, 64, backend="reference", workspace=pi.Workspace("cpu", 4 * 70 * 9_000))
    monkeypatch.setenv("PORTABLE_INDEXER_LOGITS_MB", megabytes)
    assert torch.equal(pi.index_topk(*p.args, 64, backend="reference"), whole)
    tiny = pi.Workspace("cpu", 4 * 9_000)
    assert torch.equal(pi.index_topk(*p.args, 64, backend="reference", workspace=tiny), whole)
    logits = pi.fp8_mqa_logits(*p.args, backend="reference")
    assert torch.equal(pi.top_k_per_row(logits, p.ks, p.ke, 64, backend="reference"), whole)


def test_a_row_is_a_function_of_itself(generator: torch.Generator) -> None:  # T08, T16, S43
    p = make(33, 700, 64, 128, generator)
    whole = pi.fp8_mqa_logits(*p.args, clean_logits=True, backend="reference")
    for m in (0, 7, 32):
        one = pi.fp8_mqa_logits(
            p.q[m : m + 1],
            (p.k, p.k_scale),
            p.weights[m : m + 1],
            p.ks[m : m + 1],
            p.ke[m : m + 1],
            clean_logits=True,
            backend="reference",
        )
        assert torch.equal(one[0], whole[m])


def test_all_e4m3_products_are_exact() -> None:
    """Every pair of finite codes: the float64 product rounds to the float32 product."""
    codes = torch.arange(256, dtype=torch.uint8)
    for dtype in (FN, FNUZ):
        values = codes.view(dtype)
        values = values[~values.float().isnan()]
        q = torch.zeros(len(values), 1, 16)
        q[:, 0, 0] = values.float()
        k = torch.zeros(len(values), 16)
        k[:, 0] = values.float()
        bounds = [torch.full((len(values),), b, dtype=torch.int32) for b in (0, len(values))]
        got = pi.fp8_mqa_logits(
            q.to(dtype), (k.to(dtype), torch.ones(len(values))), torch.ones(len(values), 1), *bounds
        )
        assert torch.equal(got, (values.float()[:, None] * values.float()[None]).relu())


def test_nothing_is_recorded_for_gradients(generator: torch.Generator) -> None:
    """A module's own weights ask for gradients: the answer does not, nor does a workspace that lives on."""
    o = make(4, 30, 2, 32, generator)
    right = pi.index_topk(*o.args, 5, backend="reference")
    o.weights.requires_grad_()
    workspace = pi.Workspace("cpu", 4096)
    for _ in range(2):
        assert torch.equal(pi.index_topk(*o.args, 5, backend="reference", workspace=workspace), right)
    assert not workspace.views(((4, 30), torch.float32))[0].requires_grad
    assert not pi.fp8_mqa_logits(*o.args, backend="reference").requires_grad


def test_no_rows_and_no_keys() -> None:  # S19, T12
    generator = torch.Generator().manual_seed(0)
    for rows, keys in ((0, 5), (3, 0), (0, 0)):
        q, k = fp8((rows, 2, 32), generator, FN), fp8((keys, 32), generator, FN)
        bounds = torch.zeros(rows, dtype=torch.int32), torch.full((rows,), keys, dtype=torch.int32)
        args = q, (k, torch.ones(keys)), torch.ones(rows, 2), *bounds
        assert pi.fp8_mqa_logits(*args).shape == (rows, keys)
        assert torch.equal(pi.index_topk(*args, 4), torch.full((rows, 4), -1, dtype=torch.int32))
