"""What ``all_gatherv`` refuses, before any collective, and how its algorithm is chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, succeeded

from portable_indexer.exchange import all_gatherv, records
from portable_indexer.workspace import Workspace

# Torch 2.13 renamed it.
EVEN = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
BUFFER = torch.zeros(8, 4, dtype=torch.int32)


def bad_arguments(rank: int, world: int) -> None:
    """On one rank alone: an error that came after the collective would hang."""
    if rank != 0:
        return
    staging = torch.zeros(1000, dtype=torch.int32)
    pitched = torch.zeros(8, 6, dtype=torch.int32)[:, :4]
    wide = torch.zeros(80, 6, dtype=torch.int32)[:, :4]
    table: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"buffer": BUFFER.to(torch.int64)}, TypeError, "buffer must be torch.int32, got torch.int64"),
        ({"buffer": BUFFER[0]}, ValueError, "buffer must have 2 dimensions"),
        ({"buffer": BUFFER.t()}, ValueError, "buffer must be contiguous in its last dimension"),
        ({"buffer": BUFFER[:1].expand(8, 4)}, ValueError, "rows that do not overlap"),
        ({"buffer": [1, 2]}, TypeError, "buffer must be a tensor, got list"),
        ({"buffer": BUFFER.to("meta")}, ValueError, "device type that the group serves.*got meta"),
        ({"sizes": torch.tensor([3, 5])}, TypeError, "sizes must be a sequence of host integers"),  # X06
        ({"sizes": [3, 5.0]}, TypeError, r"sizes\[1\] must be an integer, got float"),
        ({"sizes": [9, -1]}, ValueError, r"at least 0 for each rank, got \[9, -1\]"),
        ({"sizes": []}, ValueError, r"one count of at least 0 for each rank, got \[\]"),
        ({"sizes": [4, 5]}, ValueError, r"buffer's 8 rows from start = 0 on, got \[4, 5\]"),
        ({"start": 1}, ValueError, r"buffer's 8 rows from start = 1 on, got \[3, 5\]"),
        ({"start": -1}, ValueError, "start = -1"),
        ({"sizes": [8]}, ValueError, "each of the 1 sizes, got 2 ranks"),
        ({"sizes": [1, 2, 3]}, ValueError, "each of the 3 sizes, got 2 ranks"),
        ({"width": 5}, ValueError, r"width must be in \[1, 4\].*got 5"),
        ({"width": 0}, ValueError, r"width must be in \[1, 4\].*got 0"),
        ({"rank": 1}, ValueError, "rank must be 0.*got 1"),
        ({"algorithm": "fast"}, ValueError, "algorithm must be one of auto, grouped, padded, got 'fast'"),
        ({"group": 3}, ValueError, "group must be a process group.*got 3"),
        ({"buffer": pitched, "staging": staging[:31]}, ValueError, "at least 32 ids.*got 31"),
        ({"buffer": pitched, "staging": staging.to(torch.int64)}, ValueError, "1-D torch.int32.*int64"),
        ({"buffer": pitched, "staging": staging[::2]}, ValueError, "contiguous 1-D"),
        ({"buffer": pitched, "staging": staging.to("meta")}, ValueError, "staging must be on cpu.*got meta"),
        ({"buffer": wide, "sizes": [30, 50], "staging": Workspace("cpu", 16)}, ValueError, "too small"),
        ({"algorithm": "padded", "staging": staging[:39]}, ValueError, "at least 40 ids.*got 39"),
    ]
    for change, error, message in table:
        arguments: dict[str, Any] = {"buffer": BUFFER, "sizes": [3, 5], "algorithm": "grouped", **change}
        with pytest.raises(error, match=message):
            all_gatherv(arguments.pop("buffer"), arguments.pop("sizes"), **arguments)
    assert not BUFFER.any()


def test_bad_arguments_raise_before_the_collective() -> None:  # X06
    succeeded(run_ranks(bad_arguments, 2))
    with pytest.raises(ValueError, match="call init_process_group first"):
        all_gatherv(BUFFER, [8])


def test_bad_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTABLE_INDEXER_EXCHANGE", "quick")
    with pytest.raises(ValueError, match=r"PORTABLE_INDEXER_EXCHANGE must be one of .*got 'quick'"):
        all_gatherv(BUFFER, [8])


def captured(rank: int, world: int) -> None:
    """As on a HIP device whose current stream is captured: refused there, before anything is sent.

    The algorithm is named: to look it up, torch would ask its real devices as a HIP build does.
    """
    version, initialised, capturing = (
        torch.version.hip,
        torch.cuda.is_initialized,
        torch.cuda.is_current_stream_capturing,
    )
    torch.version.hip = "7.0"
    torch.cuda.is_initialized = lambda: True
    torch.cuda.is_current_stream_capturing = lambda: True
    with pytest.raises(RuntimeError, match="must not be captured in a HIP graph"):
        all_gatherv(BUFFER, [3, 5], algorithm="grouped")
    torch.cuda.is_current_stream_capturing = lambda: False
    all_gatherv(BUFFER.clone(), [3, 5], algorithm="grouped")
    torch.version.hip, torch.cuda.is_initialized, torch.cuda.is_current_stream_capturing = (
        version, initialised, capturing,
    )  # fmt: skip


@pytest.mark.parametrize("check", ["0", "1"])
def test_refused_in_hip_capture(check: str) -> None:  # X09 P11 X19
    succeeded(run_ranks(captured, 2, env={"PORTABLE_INDEXER_CHECK": check}))


def environment_choice(rank: int, world: int) -> list[str]:
    seen = []
    for name in ("broadcast", EVEN):
        real = getattr(dist, name)

        def spy(*arguments: Any, _name: str = name, _real: Any = real, **options: Any) -> Any:
            seen.append(_name)
            return _real(*arguments, **options)

        setattr(dist, name, spy)
    buffer = torch.full((4, 2), rank, dtype=torch.int32)
    all_gatherv(buffer, [1, 3])
    assert buffer.tolist() == [[0, 0], [1, 1], [1, 1], [1, 1]]
    return seen


@pytest.mark.parametrize(
    ("choice", "calls"),
    [
        ("grouped", ["broadcast", "broadcast"]),
        ("padded", [EVEN]),
        ("auto", ["broadcast", "broadcast"]),
        ("", ["broadcast", "broadcast"]),
    ],
)
def test_environment_chooses_the_algorithm(choice: str, calls: list[str]) -> None:  # X07 X08
    # A node's own tuning file may name the other algorithm for "auto".
    env = {"PORTABLE_INDEXER_EXCHANGE": choice, "PORTABLE_INDEXER_TUNING": "/no/such/file"}
    answers = succeeded(run_ranks(environment_choice, 2, env=env))
    assert [answer.value for answer in answers] == [calls, calls]


@pytest.mark.parametrize(("text", "wanted"), [("", False), ("0", False), ("off", False), ("No", False), ("1", True)])
def test_what_switches_the_check_on(monkeypatch: pytest.MonkeyPatch, text: str, wanted: bool) -> None:
    monkeypatch.setenv("PORTABLE_INDEXER_CHECK", text)
    assert records.checking() is wanted
