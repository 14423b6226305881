"""The contract of ``pool_topk``: pools chosen as by ``index_topk``, and the newest tokens always in the answer."""

from __future__ import annotations

import problems
import pytest
import torch

import portable_indexer as pi
from portable_indexer.registry import get_backend

POISON = 2**31 - 1


def expected(pool_ids: list[int], visible: int, position: int, pool: int, width: int) -> list[int]:
    """Pools' tokens and the tail, spelled out."""
    tail = list(range(pool * max(visible, 0), position + 1))[-width:]
    tokens = [p * pool + t for p in pool_ids if p >= 0 for t in range(pool)][: width - len(tail)]
    return (tokens + tail + [-1] * width)[:width]


@pytest.mark.parametrize("pool,topk", [(4, 64), (1, 33), (8, 64), (3, 50)])
def test_pools_and_tail(
    pool: int, topk: int, backend_name: str, device: torch.device, generator: torch.Generator
) -> None:  # T15
    rows, pools = 6, 400
    o = problems.make(rows, pools, 4, 32, generator, levels=2, device=device)
    o.ks = torch.tensor([0, 0, 100, 399, 7, 50], dtype=torch.int32, device=device)
    o.ke = torch.tensor([400, 3, 250, 400, 7, 40], dtype=torch.int32, device=device)
    visible = (o.ke - o.ks).tolist()
    positions = [pool * max(v, 0) + m % pool - (m == 1) for m, v in enumerate(visible)]
    ids = pi.index_topk(*o.args, topk // pool, backend=backend_name).tolist()
    width = topk + pool - 1
    out = torch.full((rows, width + 5), POISON, dtype=torch.int32, device=device)
    got = pi.pool_topk(
        *o.args,
        topk,
        pool=pool,
        positions=torch.tensor(positions, dtype=torch.int32, device=device),
        out=out,
        backend=backend_name,
    )
    assert got is out
    assert (out[:, width:] == POISON).all()
    for m in range(rows):
        assert out[m, :width].tolist() == expected(ids[m], visible[m], positions[m], pool, width), m


def test_short_row_keeps_its_newest_token(
    backend_name: str, device: torch.device, generator: torch.Generator
) -> None:  # T14
    """Five tokens, pools of 4: one pool and a tail of one."""
    o = problems.make(1, 1, 4, 32, generator, device=device)
    positions = torch.tensor([4], dtype=torch.int32, device=device)
    got = pi.pool_topk(*o.args, 2048, pool=4, positions=positions, backend=backend_name)
    assert got.shape == (1, 2051)
    assert got[0].tolist() == [0, 1, 2, 3, 4] + [-1] * 2046


def test_tail_goes_before_pools(backend_name: str, device: torch.device) -> None:  # T15
    ids = torch.tensor([[0, 2, 5], [1, -1, -1]], dtype=torch.int32, device=device)
    ks, ke = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([0, 3], [6, 5]))
    positions = torch.tensor([26, 40], dtype=torch.int32, device=device)
    out = torch.full((2, 10), POISON, dtype=torch.int32, device=device)
    out[:, :3] = ids
    get_backend(backend_name).expand_pools(out[:, :3], ks, ke, positions, 4, out)
    assert out.tolist() == [[0, 1, 2, 3, 8, 9, 10, 24, 25, 26], list(range(31, 41))]


def test_padding_row_is_empty(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    o = problems.make(2, 50, 4, 32, generator, device=device)
    o.ke = torch.tensor([0, -2], dtype=torch.int32, device=device)
    positions = torch.tensor([-1, -1], dtype=torch.int32, device=device)
    assert (pi.pool_topk(*o.args, 16, pool=4, positions=positions, backend=backend_name) == -1).all()


@pytest.mark.parametrize(
    "change,message",
    [
        ({"pool": 0}, "pool"),
        ({"pool": 65}, "pool"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, "positions"),
        ({"positions": torch.zeros(2, dtype=torch.int32)}, "positions"),
        ({"out": torch.zeros(3, 66, dtype=torch.int32)}, "out"),
    ],
)
def test_refusals(change: dict[str, object], message: str, generator: torch.Generator) -> None:
    o = problems.make(3, 50, 4, 32, generator)
    arguments = {"pool": 4, "positions": torch.zeros(3, dtype=torch.int32), **change}
    with pytest.raises((TypeError, ValueError), match=message):
        pi.pool_topk(*o.args, 64, backend="reference", **arguments)
