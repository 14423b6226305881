"""Runs a function on several ranks, each a real process, for tests of what ranks do together.

    answers = run_ranks(body, 3, extra_argument)      # body(rank, world, extra_argument), of a module
    assert [a.value for a in succeeded(answers)] == ...

Ranks meet through a file, so no port is chosen. Whatever happens (an exception, a killed rank, a hang) the call
returns within its time limit and leaves no process behind: ``run_ranks`` kills what still runs, and a rank
whose parent is gone ends itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any


@dataclass
class Answer:
    """What became of one rank: a value, an error's text, or only an exit code.

    ``seconds`` is from the start of ``body`` to its end, as the rank saw it.
    """

    rank: int
    pid: int = 0
    value: Any = None
    error: str | None = None
    exitcode: int | None = None
    seconds: float = field(default=0.0, compare=False)
    hung: bool = False

    @property
    def ok(self) -> bool:
        return self.error is None and self.exitcode == 0 and not self.hung


def run_ranks(
    body: Callable[..., Any],
    world: int,
    *arguments: Any,
    backend: str | None = "gloo",
    group_timeout: float = 20.0,
    limit: float = 90.0,
    env: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
) -> list[Answer]:
    """Call ``body(rank, world, *arguments)`` in ``world`` processes; what came back, in rank order.

    Args:
        body: a module-level function (it is pickled by name).
        backend: of the default group; None leaves torch.distributed alone.
        group_timeout: seconds, the default group's.
        limit: seconds after which ranks that still run are killed and marked as hung.
        env: environment variables for all ranks, or one mapping for each.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    answers = [Answer(rank) for rank in range(world)]
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes, pipes = [], []
        try:
            for rank in range(world):
                mine = dict(env if isinstance(env, Mapping) else env[rank] if env else {})
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_rank,
                    args=(theirs, folder, body, rank, world, arguments, backend, group_timeout, mine),
                    daemon=True,
                )
                process.start()
                answers[rank].pid = process.pid or 0
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            deadline = time.monotonic() + limit
            open_pipes = {pipe: answer for pipe, answer in zip(pipes, answers, strict=True)}
            while open_pipes and (left := deadline - time.monotonic()) > 0:
                for pipe in wait(list(open_pipes), timeout=left):
                    answer = open_pipes.pop(pipe)  # type: ignore[call-overload]
                    # One that died before it could answer leaves EOF; its exit code says how.
                    with contextlib.suppress(EOFError, ConnectionError):
                        answer.value, answer.error, answer.seconds = pipe.recv()  # type: ignore[union-attr]
            for answer in open_pipes.values():
                answer.hung = True
            for process, answer in zip(processes, answers, strict=True):
                process.join(0 if answer.hung else max(1.0, min(15.0, deadline - time.monotonic())))
                answer.hung = answer.hung or process.is_alive()
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()
    for process, answer in zip(processes, answers, strict=True):
        answer.exitcode = process.exitcode
    return answers


def succeeded(answers: Sequence[Answer]) -> list[Answer]:
    """The answers, if every rank came to a good end; else an AssertionError with all that went wrong."""
    wrong = [
        f"rank {a.rank}: {'hung' if a.hung else f'exit code {a.exitcode}'}\n{a.error or ''}"
        for a in answers
        if not a.ok
    ]
    if wrong:
        raise AssertionError("\n".join(wrong))
    return list(answers)


def _rank(
    pipe: Connection,
    folder: str,
    body: Callable[..., Any],
    rank: int,
    world: int,
    arguments: Sequence[Any],
    backend: str | None,
    group_timeout: float,
    env: Mapping[str, str],
) -> None:
    os.environ.update(env)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    value, error = None, None
    begin = time.monotonic()
    try:
        if backend is not None:
            dist.init_process_group(
                backend,
                init_method=(Path(folder) / "store").as_uri(),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=group_timeout),
            )
            # A body may end without a word to the others, who would still be connecting to this rank.
            dist.barrier()
        begin = time.monotonic()
        value = body(rank, world, *arguments)
    except BaseException:
        error = traceback.format_exc()
    pipe.send((value, error, time.monotonic() - begin))
    pipe.close()
    if error is not None:
        # The others may be gone or waiting: leave without the goodbyes that torch exchanges at exit.
        os._exit(1)
    if backend is not None:
        dist.destroy_process_group()


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
