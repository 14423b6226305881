"""Bad input: the error names the argument, what came and what is accepted, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from problems import make

import portable_indexer as pi

ROWS, KEYS, HEADS, DIM, TOPK = 6, 40, 4, 32, 8


def arguments() -> dict[str, Any]:
    p = make(ROWS, KEYS, HEADS, DIM, torch.Generator().manual_seed(3))
    return {
        "q": p.q,
        "kv": (p.k, p.k_scale),
        "weights": p.weights,
        "cu_seqlen_ks": p.ks,
        "cu_seqlen_ke": p.ke,
    }


def column_major(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


BAD: list[tuple[str, Callable[[dict[str, Any]], Any], type[Exception], str]] = [
    ("q", lambda a: a["q"].float(), TypeError, r"q must be .*float8_e4m3fn.*got torch.float32 \[6, 4, 32\]"),
    ("q", lambda a: a["q"].view(torch.uint8), TypeError, r"q must be .* no encoding.*view"),  # S05
    ("q", lambda a: a["q"][0], ValueError, "q must have 3 dimensions"),
    (
        "q",
        lambda a: column_major(a["q"].view(torch.uint8)).view(a["q"].dtype),
        ValueError,
        "q must be contiguous",
    ),
    ("q", lambda a: a["q"].to(torch.float8_e5m2), TypeError, "q must be .* got torch.float8_e5m2"),
    ("q", lambda a: a["q"].to("meta"), ValueError, r"kv\[0\] must be on meta"),
    ("q", lambda a: a["q"][:, :0], ValueError, "q must have at least one head"),
    ("q", lambda a: None, TypeError, "q must be a tensor, got NoneType"),
    ("kv", lambda a: a["kv"][0], TypeError, "kv must be a pair"),
    (
        "kv",
        lambda a: (a["kv"][0].view(torch.uint8), a["kv"][1]),
        TypeError,
        "k must be .* no encoding",
    ),  # S05
    ("kv", lambda a: (a["kv"][0][:, :16], a["kv"][1]), ValueError, r"k must be \[N, 32\]"),
    ("kv", lambda a: (a["kv"][0], a["kv"][1].half()), ValueError, r"k_scale must be float32 \[40\]"),
    (
        "kv",
        lambda a: (a["kv"][0], a["kv"][1][:-1]),
        ValueError,
        r"k_scale must be float32 \[40\] or \[40, 1\]",
    ),
    ("kv", lambda a: (a["kv"][0], 1.0), TypeError, "k_scale must be a tensor"),
    ("weights", lambda a: a["weights"].double(), TypeError, "weights must be torch.float32"),
    ("weights", lambda a: a["weights"][:, :3], ValueError, r"weights must be \[6, 4\]"),
    ("weights", lambda a: column_major(a["weights"]), ValueError, "weights must be contiguous"),
    ("cu_seqlen_ks", lambda a: a["cu_seqlen_ks"].long(), TypeError, "cu_seqlen_ks must be torch.int32"),
    ("cu_seqlen_ke", lambda a: a["cu_seqlen_ke"][:-1], ValueError, r"cu_seqlen_ke must be \[6\]"),
    (
        "cu_seqlen_ke",
        lambda a: a["cu_seqlen_ke"].repeat(2)[::2],
        ValueError,
        "cu_seqlen_ke must be contiguous",
    ),
]


# Names of their own: workers must collect the same ones, and a function's text holds its address.
@pytest.mark.parametrize(
    ("name", "change", "error", "message"), BAD, ids=[f"{case[0]}{number}" for number, case in enumerate(BAD)]
)
@pytest.mark.parametrize("operation", ["fp8_mqa_logits", "index_topk"])
def test_bad_operand(
    operation: str, name: str, change: Callable[[dict[str, Any]], Any], error: type[Exception], message: str
) -> None:
    given = arguments()
    given[name] = change(given)
    if operation == "index_topk":
        given["topk"] = TOPK
        out = torch.full((ROWS, TOPK), 77, dtype=torch.int32)
    else:
        out = torch.full((ROWS, KEYS), 77.0)
    with pytest.raises(error, match=message):
        getattr(pi, operation)(**given, out=out)
    assert (out == 77).all()


@pytest.mark.parametrize("topk", [0, -1, 4097, 1.5, True, "8"])
def test_bad_topk(topk: object) -> None:
    given = arguments()
    with pytest.raises((ValueError, TypeError), match="topk"):
        pi.index_topk(**given, topk=topk)  # type: ignore[arg-type]
    with pytest.raises((ValueError, TypeError), match="topk"):
        pi.top_k_per_row(torch.zeros(6, 40), given["cu_seqlen_ks"], given["cu_seqlen_ke"], topk)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.zeros(ROWS, TOPK, dtype=torch.int64), "out must be torch.int32"),
        (torch.zeros(ROWS, TOPK - 1, dtype=torch.int32), r"out must be \[6, at least 8\]"),
        (torch.zeros(ROWS + 1, TOPK, dtype=torch.int32), r"out must be \[6, at least 8\]"),
        (torch.zeros(TOPK, ROWS, dtype=torch.int32).T, "out must be contiguous in its last dimension"),
        (
            torch.zeros(1, TOPK, dtype=torch.int32).expand(ROWS, TOPK),
            "out must have rows that do not overlap",
        ),
        (torch.zeros(ROWS, TOPK, dtype=torch.int32, device="meta"), "out must be on cpu"),
    ],
)
def test_bad_id_buffer(out: torch.Tensor, message: str) -> None:
    given = arguments()
    with pytest.raises((ValueError, TypeError), match=message):
        pi.index_topk(**given, topk=TOPK, out=out)
    logits = torch.zeros(ROWS, KEYS)
    with pytest.raises((ValueError, TypeError), match=message):
        pi.top_k_per_row(logits, given["cu_seqlen_ks"], given["cu_seqlen_ke"], TOPK, out=out)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.zeros(ROWS, KEYS, dtype=torch.float64), "out must be torch.float32"),
        (torch.zeros(ROWS, KEYS + 1), r"out must be \[6, 40\]"),
        (torch.zeros(1, KEYS).expand(ROWS, KEYS), "out must have rows that do not overlap"),
    ],
)
def test_bad_logits_buffer(out: torch.Tensor, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        pi.fp8_mqa_logits(**arguments(), out=out)


def test_more_keys_than_ids_can_name() -> None:
    """Nothing is allocated: a meta tensor, and a view that repeats one key 2^31 times."""
    given = arguments()
    logits = torch.zeros(ROWS, 2**31, device="meta")
    with pytest.raises(ValueError, match="at most 2147483647 columns"):
        pi.top_k_per_row(logits, given["cu_seqlen_ks"], given["cu_seqlen_ke"], TOPK)
    k, scale = given["kv"]
    given["kv"] = k[:1].expand(2**31, DIM), scale[:1].expand(2**31)
    with pytest.raises(ValueError, match="at most 2147483647 rows"):
        pi.fp8_mqa_logits(**given)


def test_bad_logits() -> None:
    given = arguments()
    bounds = given["cu_seqlen_ks"], given["cu_seqlen_ke"]
    for logits, message in (
        (torch.zeros(ROWS, KEYS).half(), "logits must be torch.float32"),
        (torch.zeros(ROWS), "logits must have 2 dimensions"),
        (torch.zeros(KEYS, ROWS).T, "logits must be contiguous"),
        (torch.zeros(ROWS + 1, KEYS), r"cu_seqlen_ks must be \[7\]"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            pi.top_k_per_row(logits, *bounds, TOPK)


def test_integers_of_other_libraries_are_integers() -> None:
    given = arguments()
    right = pi.index_topk(**given, topk=TOPK)
    for topk in (numpy.int64(TOPK), torch.tensor(TOPK)):
        assert torch.equal(pi.index_topk(**given, topk=topk), right)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="topk must be an integer on the host"):
        pi.index_topk(**given, topk=torch.tensor(TOPK, device="meta"))  # type: ignore[arg-type]


@pytest.mark.parametrize("shard", ["on", [3, 3]])
def test_bad_shard(shard: object) -> None:
    with pytest.raises(TypeError, match=r"shard must be a portable_indexer.PrefillRowShard, got (str|list)"):
        pi.index_topk(**arguments(), topk=TOPK, shard=shard)  # type: ignore[arg-type]


def test_bad_workspace() -> None:
    given = arguments()
    with pytest.raises(TypeError, match=r"workspace must be a portable_indexer.Workspace"):
        pi.index_topk(**given, topk=TOPK, workspace=torch.zeros(10))  # type: ignore[arg-type]
    out = torch.full((ROWS, TOPK), 77, dtype=torch.int32)
    with pytest.raises(ValueError, match="too small"):
        pi.index_topk(**given, topk=TOPK, out=out, workspace=pi.Workspace("cpu", 0), backend="reference")
    assert (out == 77).all()


def test_accepted_layouts_give_one_answer() -> None:  # S13, S39, T15, T25
    given = arguments()
    want = pi.index_topk(**given, topk=TOPK)
    k, scale = given["kv"]
    packed = torch.empty(2, KEYS, DIM + 4, dtype=torch.uint8).random_()
    packed[1, :, :DIM] = k.view(torch.uint8)
    packed[1, :, DIM:] = scale[:, None].view(torch.uint8)
    view = packed[1, :, :DIM].view(k.dtype)
    columns = packed[1, :, DIM:].view(torch.float32)
    wide_q = torch.empty(ROWS, HEADS + 3, DIM + 16, dtype=torch.uint8).random_().view(k.dtype)
    wide_q[:, 1 : HEADS + 1, :DIM] = given["q"]
    changed = {**given, "q": wide_q[:, 1 : HEADS + 1, :DIM], "kv": (view, columns)}
    buffer = torch.full((ROWS, TOPK + 5), 77, dtype=torch.int32)
    got = pi.index_topk(**changed, topk=TOPK, out=buffer)
    assert got is buffer and torch.equal(buffer[:, :TOPK], want) and (buffer[:, TOPK:] == 77).all()
