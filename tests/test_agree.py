"""``agree``: rank 0's policy on all ranks, and an error on all ranks where they would not compute alike."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks, succeeded

from portable_indexer.exchange import ExchangeError, agree
from portable_indexer.exchange import agreement as module
from portable_indexer.policy import ShardPolicy
from portable_indexer.sharding import balanced_prefill_row_shard


@dataclass(frozen=True)
class Threshold:
    """The smallest policy that there can be."""

    min_rows: int

    def decide(self, *, rows: int, pairs: int, tp_size: int) -> bool:
        return rows >= self.min_rows

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Threshold:
        return cls(**json.loads(text))

    def fingerprint(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def takes_rank_0s(rank: int, world: int) -> tuple[int, list[int] | None]:
    # P10: what each rank would choose for itself differs, as free memory would.
    agreed = agree(Threshold(100 if rank == 0 else 10_000), arch="gfx942")
    return agreed.min_rows, balanced_prefill_row_shard([500], [500], 1, world, policy=agreed)


def test_rank_0s_policy_counts() -> None:  # P10
    answers = [answer.value for answer in succeeded(run_ranks(takes_rank_0s, 3))]
    assert answers[0][0] == 100 and answers[0][1] is not None
    assert answers == [answers[0]] * 3


def real_policy(rank: int, world: int) -> str:
    policy = ShardPolicy(mode="on" if rank == 0 else "off", min_rows=rank)
    agreed = agree(policy)
    assert agreed.mode == "on" and agreed.min_rows == 0
    return agreed.fingerprint()


def test_the_package_s_own_policy_on_the_detected_device() -> None:
    values = [answer.value for answer in succeeded(run_ranks(real_policy, 2))]
    assert values[0] == values[1] and len(values[0]) == 64


def test_the_environment_of_rank_0_overrides() -> None:
    """PORTABLE_INDEXER_SHARD of rank 0 decides for all."""
    env = [{"PORTABLE_INDEXER_SHARD": "off"}, {"PORTABLE_INDEXER_SHARD": "on"}]
    assert [answer.value for answer in succeeded(run_ranks(mode_of, 2, env=env))] == ["off", "off"]


def mode_of(rank: int, world: int) -> str:
    return agree(ShardPolicy()).mode


def disagree(rank: int, world: int, what: str) -> str:
    arch, policy = "gfx942", Threshold(5)
    if rank == 1:
        if what == "architecture":
            arch = "gfx950"
        elif what == "Triton":
            module._triton_version = lambda: "0.0.1"
        elif what == "portable_indexer":
            module.__version__ = "0.0.2"  # type: ignore[attr-defined]
        elif what == "policy":
            Threshold.fingerprint = lambda self: "feed"  # type: ignore[method-assign]
        elif what == "unreadable":

            def refuse(cls: Any, text: str) -> Threshold:
                raise ValueError("unknown field 'min_rows'")

            Threshold.from_json = classmethod(refuse)  # type: ignore[assignment]
    with pytest.raises(ExchangeError) as caught:
        agree(policy, arch=arch)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("architecture", "architecture is gfx950 on rank 1, gfx942 on rank 0"),
        ("Triton", "Triton is 0.0.1 on rank 1, "),
        ("portable_indexer", "portable_indexer is 0.0.2 on rank 1, "),
        ("policy", "policy is feed on rank 1, "),
        ("unreadable", "rank 1 failed: ValueError: unknown field 'min_rows'"),
    ],
)
def test_every_rank_names_what_differs(what: str, said: str) -> None:
    for answer in succeeded(run_ranks(disagree, 3, what)):
        assert said in answer.value and f"this is rank {answer.rank}" in answer.value


@pytest.mark.parametrize("name", ["PORTABLE_INDEXER_EXCHANGE", "PORTABLE_INDEXER_CHECK"])
def test_settings_of_the_exchange_must_be_the_same(name: str) -> None:
    env = [{}, {name: {"PORTABLE_INDEXER_EXCHANGE": "padded"}.get(name, "1")}]
    for answer in succeeded(run_ranks(settings_differ, 2, env=env)):
        assert "on rank 1" in answer.value and ("padded" in answer.value or "CHECK is 1" in answer.value)


def settings_differ(rank: int, world: int) -> str:
    with pytest.raises(ExchangeError) as caught:
        agree(Threshold(1), arch="sm_90")
    return str(caught.value)


def two_replicas(rank: int, world: int) -> int:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return agree(Threshold(rank), groups[rank // 2], arch="sm_90").min_rows


def test_each_group_agrees_for_itself() -> None:  # X13
    assert [answer.value for answer in succeeded(run_ranks(two_replicas, 4))] == [0, 0, 2, 2]


def test_needs_a_process_group() -> None:
    with pytest.raises(ValueError, match="call init_process_group first"):
        agree(Threshold(1))
