"""Several ranks of this machine as processes: started, watched, and none left behind, whatever happens.

The parent holds the store where the ranks meet, so a port is either free or refused before anything starts.
It hears from each rank through a pipe and sees a rank's end at once; a rank whose parent is gone ends itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch.distributed as dist
import torch.multiprocessing
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from portable_indexer.exchange import ExchangeError

HOST = "127.0.0.1"
# After a first failure: how long to listen for the failure that caused it.
_GRACE_S = 1.5
# The group gives up this much later than the parent, who can tell which ranks are behind.
_GROUP_LATER_S = 20.0


class RanksFailed(RuntimeError):
    """A rank raised, was killed or hangs; the text says which, and all ranks are gone.

    `heard` is how many messages had come from that rank, `trace` its traceback where it raised.
    """

    def __init__(self, text: str, heard: int, trace: str | None = None) -> None:
        super().__init__(text)
        self.heard = heard
        self.trace = trace


@dataclass(frozen=True)
class Meeting:
    """How a rank joins the default group; `init` does it."""

    rank: int
    ranks: int
    port: int
    group: str  # as init_process_group takes it, e.g. "gloo" or "cpu:gloo,cuda:nccl"
    timeout_s: float

    def init(self, device_id: Any = None) -> None:
        """Join the default group of all ranks; `device_id` is the rank's own GPU for NCCL or RCCL."""
        timeout = timedelta(seconds=self.timeout_s)
        store = TCPStore(HOST, self.port, is_master=False, timeout=timeout)
        dist.init_process_group(
            self.group,
            store=store,
            rank=self.rank,
            world_size=self.ranks,
            timeout=timeout,
            device_id=device_id,
        )


Body = Callable[[Meeting, Callable[[Any], None], Any], None]


def run_ranks(
    body: Body, ranks: int, argument: Any, *, group: str, port: int = 0, timeout_s: float = 600.0
) -> Iterator[tuple[int, Any]]:
    """Run `body(meeting, tell, argument)` in `ranks` processes; yield (rank, message) for each `tell(message)`.

    Args:
        body: a module-level function; it joins the group with `meeting.init()`.
        port: where the ranks meet on this machine; 0 takes a free one.
        timeout_s: how long all ranks together may stay silent; the group's own timeout is a little longer.

    Raises:
        OSError: the port cannot be had; nothing was started then.
        RanksFailed: as its name says. Every process is killed and reaped before this, or any other exception
            in the loop over this iterator, leaves it.
    """
    store = _store(port, timeout_s)
    context = torch.multiprocessing.get_context("spawn")
    watched: list[_Watched] = []
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            meeting = Meeting(rank, ranks, store.port, group, timeout_s + _GROUP_LATER_S)
            process = context.Process(
                target=_rank, args=(body, meeting, theirs, argument), name=f"rank {rank}", daemon=True
            )
            process.start()
            theirs.close()
            watched.append(_Watched(rank, process, ours))
        yield from _listen(watched, timeout_s)
    finally:
        for one in watched:
            if one.process.is_alive():
                one.process.kill()
        for one in watched:
            one.process.join()
            one.pipe.close()


@dataclass
class _Watched:
    rank: int
    process: BaseProcess
    pipe: Connection
    heard: int = 0
    done: bool = False
    open: bool = True
    error: str | None = None
    trace: str | None = None
    raised: tuple[bool, float] = (False, 0.0)  # whether another rank's failure was the reason; when

    @property
    def name(self) -> str:
        return f"rank {self.rank} (pid {self.process.pid})"

    def receive(self) -> list[Any]:
        """Messages that are there now; notes the rank's end."""
        messages: list[Any] = []
        try:
            while self.open and self.pipe.poll():
                kind, value = self.pipe.recv()
                if kind == "tell":
                    self.heard += 1
                    messages.append(value)
                elif kind == "error":
                    self.error, self.trace, self.raised = value
                else:
                    self.done = True
        except (EOFError, OSError):
            self.open = False
        return messages

    def failure(self) -> str | None:
        """What went wrong with this rank itself, as far as is known."""
        code = self.process.exitcode
        if self.error is not None:
            return f"{self.name} failed: {self.error}"
        if code is None or self.done:
            return None
        if code < 0:
            return f"{self.name} was killed by {_signal_name(-code)}"
        return f"{self.name} ended with exit code {code} before its work was done"


def _listen(watched: list[_Watched], timeout_s: float) -> Iterator[tuple[int, Any]]:
    last = time.monotonic()
    while not all(one.done for one in watched):
        sources: list[Any] = [one.pipe for one in watched if one.open]
        sources += [one.process.sentinel for one in watched if not one.done]
        wait(sources, timeout=1.0)
        for one in watched:
            before = one.done
            for message in one.receive():
                last = time.monotonic()
                yield one.rank, message
            if one.done and not before:
                last = time.monotonic()
        failed = [one for one in watched if one.failure()]
        if failed:
            first = _cause(watched, failed)
            raise RanksFailed(f"{first.failure()}; the other ranks were stopped", first.heard, first.trace)
        if time.monotonic() - last > timeout_s:
            least = min(one.heard for one in watched)
            silent = ", ".join(one.name for one in watched if one.heard == least and not one.done)
            raise RanksFailed(f"nothing was heard for {timeout_s:g} s; behind the others or stuck: {silent}", least)
    for one in watched:
        one.process.join(10.0)


def _cause(watched: list[_Watched], failed: list[_Watched]) -> _Watched:
    """The rank whose failure the others follow from: one that ended without a word, else the first that raised."""
    deadline = time.monotonic() + _GRACE_S
    while True:
        silent = [one for one in watched if one.failure() and one.error is None]
        if silent or time.monotonic() > deadline:
            return silent[0] if silent else min(failed, key=lambda one: one.raised)
        time.sleep(0.05)
        for one in watched:
            one.receive()
        failed = [one for one in watched if one.failure()]


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return f"{name} (was the machine out of memory?)" if name == "SIGKILL" else name


def _store(port: int, timeout_s: float) -> TCPStore:
    try:
        return TCPStore(HOST, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:  # torch's own network errors are RuntimeErrors
        reason = "it is in use" if "EADDRINUSE" in str(error) else str(error).splitlines()[0]
        raise OSError(f"port {port} cannot be opened for the ranks to meet: {reason}") from error


def _rank(body: Body, meeting: Meeting, pipe: Connection, argument: Any) -> None:
    # Ctrl-C reaches the whole foreground group: the parent alone answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if sys.platform == "linux":
        # All ranks are on this machine: no need for its name to resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        body(meeting, lambda message: pipe.send(("tell", message)), argument)
        pipe.send(("done", None))
    except BaseException as error:
        # The monotonic clock is the machine's, so ranks can be put in order by it.
        raised = (isinstance(error, ExchangeError), time.monotonic())
        pipe.send(("error", (f"{type(error).__name__}: {error}", traceback.format_exc(), raised)))
        # Without the goodbyes at exit, which may wait for ranks that are stuck.
        os._exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
