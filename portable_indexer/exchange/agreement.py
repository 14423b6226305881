"""What ranks make sure of at start-up: one policy, one kind of machine, an exchange that works."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from portable_indexer._version import __version__
from portable_indexer.exchange.gather import ALGORITHMS, chosen_algorithm, gather, make_plan
from portable_indexer.exchange.groups import member_of
from portable_indexer.exchange.records import FAILED, OK, ExchangeError, checking, name_ranks, swap_records

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Agreeable(Protocol):
    """A policy that can be sent and compared (see ``ShardPolicy``)."""

    def to_json(self) -> str: ...
    @classmethod
    def from_json(cls, text: str, /) -> Any: ...
    def fingerprint(self) -> str: ...


PolicyT = TypeVar("PolicyT", bound=Agreeable)


def agree(policy: PolicyT, group: ProcessGroup | None = None, *, arch: str | None = None) -> PolicyT:
    """Once at start-up, on every rank: take over rank 0's policy and make sure that all ranks compute alike.

    Args:
        policy: this rank's policy; only rank 0's counts.
        group: process group; None is the default group. With NCCL or RCCL the current device must be set.
        arch: this rank's architecture; None is the detected one.

    Returns:
        Rank 0's policy.

    Raises:
        ExchangeError: on every rank, if the fingerprint of the policy as read, the package, Triton, the
            architecture or the exchange's settings differ from rank 0's; names the ranks and both values.
        ValueError: torch.distributed is not initialised, or this process is no member of the group.
    """
    member, rank = member_of(group)
    sent: list[Any] = [policy.to_json()]
    dist.broadcast_object_list(sent, group=member, group_src=0)
    facts: dict[str, str] = {}
    try:
        agreed = type(policy).from_json(sent[0])
        facts["policy"] = agreed.fingerprint()
        facts["portable_indexer"] = __version__
        facts["Triton"] = _triton_version()
        facts["architecture"] = arch or _architecture()
        facts["exchange algorithm"] = chosen_algorithm(None)
        facts["PORTABLE_INDEXER_CHECK"] = str(int(checking()))
    except Exception as error:  # Every rank must reach the comparison, and learn of it there.
        agreed = policy
        facts["error"] = f"{type(error).__name__}: {error}"
    answers: list[Any] = [None] * member.size()
    dist.all_gather_object(answers, facts, group=member)
    differences = [f"rank {r} failed: {answer['error']}" for r, answer in enumerate(answers) if "error" in answer]
    for name in answers[0] if not differences else ():
        for value in dict.fromkeys(answer[name] for answer in answers):
            ranks = [r for r, answer in enumerate(answers) if answer[name] == value]
            if ranks[0] > 0:
                differences.append(f"{name} is {value} on {name_ranks(ranks)}, {answers[0][name]} on rank 0")
    if differences:
        raise ExchangeError(f"the ranks must be set up alike (this is rank {rank}): {'; '.join(differences)}")
    return agreed  # type: ignore[no-any-return]


def self_test(device: torch.device, group: ProcessGroup | None = None) -> None:
    """Exchange small even, uneven and partly empty shards with each algorithm and compare every id.

    Raises:
        ExchangeError: on every rank, naming the ranks and the algorithms that got a wrong answer.
    """
    member, rank = member_of(group)
    size, wrong = member.size(), []
    for algorithm in ALGORITHMS:
        for sizes in ([1] * size, [r % 3 for r in range(size)], [size - r for r in range(size)]):
            wanted = torch.arange(sum(sizes) * 48, dtype=torch.int32, device=device).view(-1, 48)
            own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
            buffer = torch.full_like(wanted, -1)
            buffer[own] = wanted[own]
            try:
                gather(make_plan(buffer, sizes, member, 0, None, None, algorithm, rank))
            except Exception as error:  # The others wait in the comparison below.
                wrong.append(f"{algorithm} exchange of {sizes} rows: {type(error).__name__}: {error}")
                continue
            if not torch.equal(buffer, wanted):
                wrong.append(f"{algorithm} exchange of {sizes} rows is wrong")
    swap_records(member, FAILED if wrong else OK, "; ".join(wrong), device)


def _architecture() -> str:
    from portable_indexer.device import detect

    return detect().arch


def _triton_version() -> str:
    try:
        import triton
    except Exception:  # A broken install must be named on every rank, not end this one.
        return "missing"
    return str(triton.__version__)
