"""`portable-indexer demo`: requests become steps, several ranks run them sharded, and one answer is right.

Each step runs twice on every rank: sharded, where a rank computes only its own rows and ids are exchanged,
and replicated, where it computes all. The two must be the same bytes on every rank.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from portable_indexer.steps import DEFAULT_MAX_BATCHED_TOKENS, schedule
from portable_indexer.traces import Request, read, scaled

if TYPE_CHECKING:
    from portable_indexer.cli._demo_rank import Job

MISMATCH, BAD_INPUT, RANK_FAILED = 1, 2, 3
MAX_TOPK = 4096

# Short, long and mixed requests, lengths in tokens: many in one step, one over many steps, a short question
# about a long history whose keys are stored, and answers that decode beside other requests' prompts.
BUILT_IN = (
    Request(0.0, 300, 48),
    Request(0.0, 1_200, 80),
    Request(0.0, 700, 33),
    Request(0.0, 2_600, 64),
    Request(0.1, 90, 96),
    Request(0.2, 22_000, 40),
    Request(0.3, 5_400, 20),
    Request(0.4, 101_000, 32, cached_tokens=96_000),
    Request(0.5, 640, 16),
    Request(0.6, 9_100, 48),
    Request(0.7, 3_000, 1),
    Request(0.8, 1_900, 30),
    Request(0.9, 16_500, 33),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `demo`."""
    add = parser.add_argument
    add("--ranks", type=positive, help="processes (default: 4, on GPUs one for each, at most 4)")
    add("--trace", metavar="FILE", help="Mooncake JSONL or Azure CSV (default: a built-in mix)")
    add("--limit", type=positive, help="requests to read from the trace (default: 48)")
    add("--steps", type=_count, default=16, help="steps to run, 0 for all (default: %(default)s)")
    add("--scale", type=positive, help="divide all lengths by this (default: 16 on a CPU, 1 on GPUs)")
    add(
        "--max-batched-tokens",
        type=positive,
        help=f"most rows of a step (default: {DEFAULT_MAX_BATCHED_TOKENS} / scale)",
    )
    add("--max-running", type=positive, help="most requests in work at a time (default: no limit)")
    add("--prefix-cache", action="store_true", help="reuse prefixes that the trace's hash ids share")
    add("--heads", type=positive, help="index heads (default: 16 on a CPU, 64 on GPUs)")
    add("--head-dim", type=positive, default=128, help="head dimension (default: %(default)s)")
    add("--topk", type=positive, help=f"ids a row, up to {MAX_TOPK} (default: 2048 / scale)")
    add("--compress-ratio", type=positive, default=1, help="tokens for each key (default: %(default)s)")
    add("--seed", type=_count, default=0, help="of the random operands (default: %(default)s)")
    add("--device", choices=("auto", "cpu", "gpu"), default="auto", help="(default: GPUs where there are any)")
    add("--backend", help="backend by name (default: the best for the device)")
    add("--port", type=_port, default=0, help="where the ranks meet on this machine (default: a free one)")
    add("--timeout", type=_seconds, default=600.0, help="seconds of silence that count as a hang (default: 600)")
    add("--json", action="store_true", help="one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0: all steps equal on all ranks, 1: a mismatch, 2: bad input, 3: a rank failed."""
    try:
        import torch
    except ModuleNotFoundError:
        return _fail(args, "needs torch, which this Python does not have", BAD_INPUT)
    from portable_indexer.cli._demo_rank import run_rank
    from portable_indexer.cli._demo_report import Report
    from portable_indexer.cli._processes import RanksFailed, run_ranks

    try:
        setup = Setup.of(args, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    except (ValueError, OSError) as error:
        return _fail(args, str(error), BAD_INPUT)
    report = Report(setup, quiet=args.json)
    try:
        report.follow(run_ranks(run_rank, setup.ranks, setup.job, **setup.meeting))
    except OSError as error:
        return _fail(args, str(error), BAD_INPUT)
    except RanksFailed as error:
        if error.trace:
            print(error.trace, file=sys.stderr)
        return _fail(args, f"{_where(setup, error.heard)}: {error}", RANK_FAILED)
    if args.json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        print(report.summary())
    return 0 if report.ok else MISMATCH


def _fail(args: argparse.Namespace, text: str, code: int) -> int:
    print(f"portable-indexer demo: {text}", file=sys.stderr)
    if args.json:
        print(json.dumps({"ok": False, "error": text}))
    return code


def _where(setup: Setup, heard: int) -> str:
    """What a rank was at after so many messages: one when it is ready, then one for each step."""
    if heard == 0:
        return "while starting"
    steps = setup.job.steps
    return f"in step {steps[heard - 1].index}" if heard <= len(steps) else "after the last step"


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {value}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {value}")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"must be from 0 to 65535, got {value}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {value}")
    return value


@dataclass(frozen=True)
class Setup:
    """All that is decided before a process starts."""

    job: Job
    ranks: int
    source: str
    requests: int
    scale: int
    max_batched_tokens: int
    steps_in_all: int
    note: str | None
    meeting: dict[str, Any]

    @classmethod
    def of(cls, args: argparse.Namespace, gpus_here: int) -> Setup:
        from portable_indexer.cli._demo_rank import Job

        if args.device == "gpu" and not gpus_here:
            raise ValueError("--device gpu: torch sees no GPU here")
        gpus = 0 if args.device == "cpu" else gpus_here
        ranks = args.ranks or (min(4, gpus) if gpus > 1 else 4)
        scale = args.scale or (1 if gpus else 16)
        budget = args.max_batched_tokens or max(1, DEFAULT_MAX_BATCHED_TOKENS // scale)
        topk = args.topk or max(1, 2048 // scale)
        if topk > MAX_TOPK:
            raise ValueError(f"--topk must be at most {MAX_TOPK}, got {topk}")
        group, note = "gloo", None
        if gpus >= ranks:
            group = "cpu:gloo,cuda:nccl"
        elif not gpus:
            note = "times on a CPU say nothing about a GPU: the reference also scores keys that a row may not see"
        else:
            note = (
                f"{ranks} ranks share {gpus} GPU{'s' if gpus > 1 else ''}: ids travel over gloo and times "
                "say nothing about a node"
            )
        requests = read(args.trace, args.limit or 48) if args.trace else list(BUILT_IN[: args.limit])
        steps = list(
            schedule(
                scaled(requests, scale),
                budget,
                max_running=args.max_running,
                prefix_cache=args.prefix_cache,
            )
        )
        job = Job(
            steps=tuple(islice(steps, args.steps or None)),
            num_heads=args.heads or (64 if gpus else 16),
            head_dim=args.head_dim,
            topk=topk,
            compress_ratio=args.compress_ratio,
            seed=args.seed,
            gpus=gpus,
            backend=args.backend,
        )
        source = args.trace or "built-in mix"
        meeting = {"group": group, "port": args.port, "timeout_s": args.timeout}
        return cls(job, ranks, source, len(requests), scale, budget, len(steps), note, meeting)
