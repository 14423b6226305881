"""``index_topk`` with a shard over gloo: byte for byte what one rank alone answers, and refusals that hang nobody."""

from __future__ import annotations

import itertools

import problems
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, succeeded

import portable_indexer as pi
from portable_indexer.sharding import PrefillRowShard, balanced_prefill_row_shard

POISON = 2**31 - 1


def operands(rows: int, keys: int, seed: int) -> problems.Operands:
    """Few distinct scores, so that ties decide most rows; any bounds."""
    return problems.make(rows, keys, 3, 32, torch.Generator().manual_seed(seed), levels=1, ragged=True)


def plans(world: int, rows: int) -> list[list[int]]:
    """Balanced, all on one rank, with empty ranks between, and more ranks than rows."""
    balanced = balanced_prefill_row_shard([rows], [rows], 4, world)
    assert balanced is not None
    uneven = [0 if r % 2 else 1 for r in range(world)]
    return [balanced, [0] * (world - 1) + [rows], uneven, [0] * world, [1] + [0] * (world - 1)]


def compare(rank: int, world: int, members: list[int], seed: int) -> int:
    """Every plan x offset x pitch against the same call without a shard."""
    group = dist.new_group(members)
    if rank not in members:
        return 0
    own, done, topk = members.index(rank), 0, 9
    for sizes, decode, pad in itertools.product(plans(len(members), 13), (0, 2), (0, 3)):
        rows = decode + sum(sizes) + pad
        o = operands(rows, 70, seed + done)
        right = pi.index_topk(*o.args, topk, backend="reference")
        right[:decode] = right[decode + sum(sizes) :] = POISON
        shard = PrefillRowShard(decode, tuple(sizes), own)
        out = torch.full((rows, topk + pad), POISON, dtype=torch.int32)
        need = max(4 * 70, shard.staging_bytes(topk))
        workspace = None if done % 2 else pi.Workspace("cpu", need)
        returned = pi.index_topk(
            *o.args, topk, out=out, shard=shard, group=group, backend="reference", workspace=workspace
        )
        assert returned is out
        assert torch.equal(out[:, :topk], right), (sizes, decode, pad)
        assert (out[:, topk:] == POISON).all()
        fresh = pi.index_topk(*o.args, topk, shard=shard, group=group, backend="reference")
        assert torch.equal(fresh, torch.where(right == POISON, -1, right))
        done += 1
    return done


@pytest.mark.parametrize(("world", "members"), [(2, [0, 1]), (4, [1, 3]), (4, [3, 0, 2]), (5, [0, 1, 2, 3, 4])])
def test_sharded_equals_unsharded(
    world: int, members: list[int], generator: torch.Generator
) -> None:  # T07 P04 P09 X13
    seed = int(torch.randint(1 << 30, (), generator=generator))
    answers = succeeded(run_ranks(compare, world, sorted(members), seed))
    assert [answer.value for answer in answers] == [20 if rank in members else 0 for rank in range(world)]


def too_small(rank: int, world: int, sizes: list[int], keys: int, nbytes: int, pad: int) -> None:
    """Every rank must refuse, also one without rows, before an id is written; then the group still works."""
    o = operands(sum(sizes), keys, 5)
    shard = PrefillRowShard(0, tuple(sizes), rank)
    out = torch.full((sum(sizes), 64 + pad), POISON, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"workspace .*\d+ bytes"):
        pi.index_topk(*o.args, 64, out=out, shard=shard, workspace=pi.Workspace("cpu", nbytes), backend="reference")
    assert (out == POISON).all()
    pi.index_topk(*o.args, 64, out=out, shard=shard, backend="reference")
    assert torch.equal(out[:, :64], pi.index_topk(*o.args, 64, backend="reference"))


@pytest.mark.parametrize(
    ("keys", "nbytes", "pad"),
    [(1000, 256, 0), (8, 256, 2)],
    ids=["no room for a row of logits", "room for logits, none for staging"],
)
def test_a_small_workspace_is_refused_on_every_rank(keys: int, nbytes: int, pad: int) -> None:  # X04 M11
    answers = succeeded(run_ranks(too_small, 3, [3, 5, 0], keys, nbytes, pad, group_timeout=10))
    assert all(answer.seconds < 5 for answer in answers)
