"""PORTABLE_INDEXER_CHECK=1: what ranks tell each other before an exchange, so that no fault hangs."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from portable_indexer.exchange.groups import all_gather_even, backends_of, capturing, member_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

OK, FAILED = 0, 1
_RECORD_BYTES = 512
_TEXT = 33  # after one byte of status and 32 of SHA-256
_log = logging.getLogger(__name__)


class ExchangeError(RuntimeError):
    """Ranks disagree about an exchange, or one of them failed; raised on every rank that is alive."""


def checking() -> bool:
    """Whether PORTABLE_INDEXER_CHECK is set, and to something else than 0, no, off or false."""
    return os.environ.get("PORTABLE_INDEXER_CHECK", "").strip().lower() not in ("", "0", "no", "off", "false")


def report_failure(group: ProcessGroup | None, error: BaseException) -> None:
    """Tell the other ranks, which are or will be in ``all_gatherv``, that this rank failed and will not come.

    Logs the error first, so that no hang can hide it. Under PORTABLE_INDEXER_CHECK=1 the others then raise
    ExchangeError with this rank and the error's text; else nothing is sent. An error is reported once.
    """
    if getattr(error, "_portable_indexer_reported", False):
        return
    with contextlib.suppress(AttributeError):
        error._portable_indexer_reported = True  # type: ignore[attr-defined]
    try:
        member, rank = member_of(group)
    except ValueError:
        return
    _log.error("rank %d failed before an exchange: %s: %s", rank, type(error).__name__, error)
    if checking() and not capturing() and not isinstance(error, ExchangeError):
        try:
            swap_records(member, FAILED, f"{type(error).__name__}: {error}")
        except ExchangeError as answer:
            _log.error("rank %d reported its failure: %s", rank, answer)


@contextlib.contextmanager
def failure_reported(group: ProcessGroup | None) -> Iterator[None]:
    """Around work that precedes an exchange: an exception is passed to ``report_failure``, then raised on."""
    try:
        yield
    except Exception as error:
        report_failure(group, error)
        raise


def swap_records(group: ProcessGroup, status: int, text: str, device: torch.device | None = None) -> None:
    """Send this rank's status and text to all; raise ExchangeError if a rank failed, is gone or differs.

    Every call on one rank meets exactly one call on each other rank, whatever either has to say.
    """
    rank, size = dist.get_rank(group), group.size()
    kinds = backends_of(group)
    # The host side needs no sync, so it is preferred where the group has one.
    where = torch.device("cpu") if "cpu" in kinds else device or torch.device(next(iter(kinds)))
    payload = bytes([status]) + hashlib.sha256(text.encode()).digest() + text.encode()
    own = torch.frombuffer(bytearray(payload[:_RECORD_BYTES].ljust(_RECORD_BYTES, b"\0")), dtype=torch.uint8)
    own = own.to(where)
    everyone = torch.empty(size * _RECORD_BYTES, dtype=torch.uint8, device=where)
    try:
        work = all_gather_even(everyone, own, group, async_op=True)
        if where.type != "cpu":
            _await(work, group, where)
        work.wait()
    except RuntimeError as error:
        raise ExchangeError(
            f"rank {rank} of {size}: not all ranks came to an exchange; one of them has ended, or did not "
            f"come within the group's timeout ({error})"
        ) from error
    records = [bytes(record.tolist()) for record in everyone.cpu().view(size, _RECORD_BYTES)]
    said = [record[_TEXT:].rstrip(b"\0").decode(errors="replace") for record in records]
    failed = [f"rank {r} failed: {said[r]}" for r in range(size) if records[r][0] == FAILED]
    if failed:
        raise ExchangeError(f"no exchange took place (this is rank {rank}): {'; '.join(failed)}")
    groups: dict[bytes, list[int]] = {}
    for r, record in enumerate(records):
        groups.setdefault(record[:_TEXT], []).append(r)
    if len(groups) > 1:
        plans = "; ".join(f"{name_ranks(ranks)}: {said[ranks[0]]}" for ranks in groups.values())
        raise ExchangeError(f"the ranks must exchange the same plan (this is rank {rank}): {plans}")


def _await(work: Any, group: ProcessGroup, device: torch.device) -> None:
    """Wait on the host, and give up before the group's own watchdog would end the process."""
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    seconds = 0.8 * timeout.total_seconds() if timeout is not None else 300.0
    deadline = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {seconds:.0f} s")
        time.sleep(0.0002)


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 1" or "ranks 1, 2", for messages."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
