"""PORTABLE_INDEXER_CHECK=1: plans that differ and ranks that fail or die become errors on every rank, in time."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Answer, run_ranks, succeeded

from portable_indexer.exchange import ExchangeError, all_gatherv, failure_reported, report_failure
from portable_indexer.sharding import PrefillRowShard

CHECK = {"PORTABLE_INDEXER_CHECK": "1"}
TIMEOUT = 8.0
# Torch 2.13 renamed it.
EVEN = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def differing(rank: int, world: int, mine: list[dict[str, Any]]) -> str:
    """Each rank exchanges with its own arguments; all must raise, and write nothing."""
    arguments = dict(mine[rank])
    buffer = torch.full(arguments.pop("shape"), rank, dtype=torch.int32)
    with pytest.raises(ExchangeError) as caught:
        all_gatherv(buffer, arguments.pop("sizes"), **arguments)
    assert (buffer == rank).all()
    # The group is still good for a plan that all ranks share.
    good = torch.full((world, 2), rank, dtype=torch.int32)
    all_gatherv(good, [1] * world)
    assert good[:, 0].tolist() == list(range(world))
    return str(caught.value)


BASE: dict[str, Any] = {"sizes": [10, 6, 0], "shape": (20, 4)}


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": [10, 5, 1]},
        {"sizes": [11, 6, 0]},
        {"start": 2},
        {"width": 3},
        {"shape": (21, 4)},
        {"algorithm": "padded"},
    ],
    ids=str,
)
def test_a_differing_plan_is_an_error_on_every_rank(change: dict[str, Any]) -> None:  # X14
    mine = [BASE, {**BASE, **change}, BASE]
    answers = succeeded(run_ranks(differing, 3, mine, env=CHECK, group_timeout=TIMEOUT))
    for answer in answers:
        assert f"this is rank {answer.rank}" in answer.value
        assert "ranks 0, 2: sizes [10, 6, 0] from row 0" in answer.value
        assert "; rank 1: sizes" in answer.value or answer.value.count("rank 1: sizes") == 1
        assert answer.seconds < TIMEOUT


def local_error(rank: int, world: int) -> str:
    """Rank 2's own buffer is too short: its ValueError, and an error that names it on the others."""
    buffer = torch.zeros(20 if rank != 2 else 3, 4, dtype=torch.int32)
    with pytest.raises((ValueError, ExchangeError)) as caught:
        all_gatherv(buffer, [10, 6, 0])
    return f"{type(caught.value).__name__}: {caught.value}"


def test_one_rank_with_a_bad_buffer() -> None:  # X04 X14
    answers = succeeded(run_ranks(local_error, 3, env=CHECK, group_timeout=TIMEOUT))
    assert answers[2].value.startswith("ValueError: sizes must fit the buffer's 3 rows")
    for answer in answers[:2]:
        assert answer.value.startswith("ExchangeError: ") and "rank 2 failed: ValueError: sizes" in answer.value


def raises_in_compute(rank: int, world: int, group_of: list[int] | None) -> str:
    """Rank 1 of the group raises in scoring; rank 2 owns no row."""
    group = None if group_of is None else dist.new_group(group_of)
    if group_of is not None and rank not in group_of:
        return ""
    own = rank if group_of is None else group_of.index(rank)
    shard = PrefillRowShard(1, (4, 3, 0), own)
    buffer = torch.full((9, 2), -7, dtype=torch.int32)

    def compute() -> None:
        if own == 1:
            raise ArithmeticError("no scores on " + "x" * 2000)

    with pytest.raises((ArithmeticError, ExchangeError)) as caught:
        shard.run(compute, buffer, group=group)
    assert (buffer == -7).all()
    with failure_reported(group):  # reported once: this must not wait for the others again
        pass
    report_failure(group, caught.value)
    # The next layer works again.
    shard.exchange_topk(buffer, group=group)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("group_of", [None, [0, 2, 3]])
def test_a_raising_rank_is_an_error_on_every_rank(group_of: list[int] | None) -> None:  # X04 X20
    world = 3 if group_of is None else 4
    answers = succeeded(run_ranks(raises_in_compute, world, group_of, env=CHECK, group_timeout=TIMEOUT))
    for own, rank in enumerate(group_of or [0, 1, 2]):
        text = answers[rank].value
        if own == 1:
            assert text.startswith("ArithmeticError: no scores on")
        else:
            assert text.startswith("ExchangeError") and "rank 1 failed: ArithmeticError: no scores on" in text
        assert answers[rank].seconds < TIMEOUT


def logs_before(rank: int, world: int) -> list[str]:
    """The error must be in the log before anything waits for another rank."""
    import logging

    order: list[str] = []
    real = getattr(dist, EVEN)

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            order.append(record.getMessage())

    def noted(*arguments: Any, **options: Any) -> Any:
        order.append("collective")
        return real(*arguments, **options)

    logging.getLogger("portable_indexer").addHandler(Notes())
    setattr(dist, EVEN, noted)
    with pytest.raises((KeyError, ExchangeError)), failure_reported(None):
        if rank == 1:
            raise KeyError("layer 7")
        all_gatherv(torch.zeros(2, 1, dtype=torch.int32), [1, 1])
    return order


def test_the_error_is_logged_before_the_collective() -> None:  # X20
    order = succeeded(run_ranks(logs_before, 2, env=CHECK, group_timeout=TIMEOUT))[1].value
    assert order[0] == "rank 1 failed before an exchange: KeyError: 'layer 7'" and order[1] == "collective"


def meets(rank: int, world: int, fate: str) -> None:
    """Rank 1 never comes to the exchange: it is killed, or ends, or is stuck."""
    buffer = torch.zeros(6, 4, dtype=torch.int32)
    all_gatherv(buffer, [2, 4, 0])
    if rank == 1:
        if fate == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fate == "raises":
            raise LookupError("rank 1 is lost")
        time.sleep(TIMEOUT + 4)
        raise LookupError("rank 1 is late")
    all_gatherv(buffer, [2, 4, 0])


def ended_well(answers: list[Answer]) -> None:
    for answer in answers:
        with pytest.raises(ProcessLookupError):
            os.kill(answer.pid, 0)
    for answer in (answers[0], answers[2]):
        assert not answer.hung and answer.exitcode == 1 and answer.error is not None
        assert answer.seconds < 2 * TIMEOUT


@pytest.mark.parametrize("check", ["0", "1"])
@pytest.mark.parametrize("fate", ["killed", "raises", "stuck"])
def test_a_rank_that_never_comes(fate: str, check: str) -> None:  # X04 X20
    """No hang past the group's timeout, exit codes that are not 0, and no process left."""
    env = {"PORTABLE_INDEXER_CHECK": check}
    answers = run_ranks(meets, 3, fate, env=env, group_timeout=TIMEOUT)
    ended_well(answers)
    if fate == "killed":
        assert answers[1].exitcode == -signal.SIGKILL and answers[1].error is None
    elif fate == "raises":
        assert answers[1].exitcode == 1 and "rank 1 is lost" in str(answers[1].error)
    else:
        assert "rank 1 is late" in str(answers[1].error)
    if check == "1":
        for answer in (answers[0], answers[2]):
            assert "ExchangeError" in str(answer.error)
            assert f"rank {answer.rank} of 3: not all ranks came to an exchange" in str(answer.error)


def sleeps(rank: int, world: int) -> int:
    if rank == 1:
        time.sleep(600)
    return rank


def test_the_helper_itself_kills_what_hangs() -> None:
    answers = run_ranks(sleeps, 2, backend=None, limit=3.0)
    assert answers[0].ok and answers[0].value == 0
    assert answers[1].hung and not answers[1].ok and answers[1].exitcode == -signal.SIGKILL
    for answer in answers:
        with pytest.raises(ProcessLookupError):
            os.kill(answer.pid, 0)
    with pytest.raises(AssertionError, match="rank 1: hung"):
        succeeded(answers)
