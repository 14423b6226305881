"""What `portable-indexer demo` says: a line for each step, a summary, or one JSON object."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from portable_indexer.cli._bar import Bar
from portable_indexer.cli._demo_rank import Job, Outcome, Ready
from portable_indexer.steps import Step

if TYPE_CHECKING:
    from portable_indexer.cli.demo import Setup

_HEADER = (
    f"{'step':>5} {'decode':>7} {'prefill':>8} {'key-row pairs':>15} {'imbalance':>10} {'exchanged':>11} "
    f"{'sharded ms':>11} {'replicated ms':>14}  {'bytes':7}  prefill rows of each rank"
)


@dataclass(frozen=True)
class Row:
    """One step, all ranks together; a time is the slowest rank's."""

    step: int
    decode_rows: int
    prefill_rows: int
    requests: int
    keys: int  # packed keys of all requests
    key_row_pairs: int
    shard_sizes: list[int]
    imbalance: float  # key-row pairs of the heaviest shard over the mean of the shards, less 1
    exchanged_bytes: int  # ids that the ranks receive, summed over the ranks
    sharded_ms: float
    replicated_ms: float
    digest: str  # of the step's ids
    faults: list[str]

    @classmethod
    def of(cls, job: Job, step: Step, outcomes: Sequence[Outcome]) -> Row:
        ranks = len(outcomes)
        sizes = job.sizes(step, ranks)
        pairs = step.shard_pairs(sizes, job.compress_ratio)
        faults = [f"rank {r}: {fault}" for r, outcome in enumerate(outcomes) for fault in outcome.faults]
        digests = [outcome.digest for outcome in outcomes]
        if len(set(digests)) > 1:
            faults.append(f"the replicated answers of the ranks differ: {', '.join(digests)}")
        return cls(
            step=step.index,
            decode_rows=step.num_decode_rows,
            prefill_rows=step.num_prefill_rows,
            requests=len(step.seq_lens),
            keys=job.keys(step),
            key_row_pairs=step.key_row_pairs(job.compress_ratio),
            shard_sizes=sizes,
            imbalance=max(pairs) * ranks / sum(pairs) - 1 if sum(pairs) else 0.0,
            exchanged_bytes=sum(sizes) * job.topk * 4 * (ranks - 1),
            sharded_ms=1e3 * max(outcome.sharded_s for outcome in outcomes),
            replicated_ms=1e3 * max(outcome.replicated_s for outcome in outcomes),
            digest=digests[0],
            faults=faults,
        )

    def line(self) -> str:
        return (
            f"{self.step:5} {self.decode_rows:7} {self.prefill_rows:8} {self.key_row_pairs:15,} "
            f"{self.imbalance:10.2%} {_size(self.exchanged_bytes):>11} {self.sharded_ms:11.1f} "
            f"{self.replicated_ms:14.1f}  {'DIFFER' if self.faults else 'equal':7}  "
            f"{' '.join(map(str, self.shard_sizes))}"
        )


class Report:
    """Follows the ranks: prints what they tell unless `quiet`, and sums it up."""

    def __init__(self, setup: Setup, quiet: bool) -> None:
        self._setup, self._quiet = setup, quiet
        self.rows: list[Row] = []
        self._ready: dict[int, Ready] = {}
        self._heard: dict[int, dict[int, Outcome]] = {}

    @property
    def ok(self) -> bool:
        """Whether every step was run, and equal on every rank."""
        return len(self.rows) == len(self._setup.job.steps) and not any(row.faults for row in self.rows)

    def follow(self, messages: Iterable[tuple[int, Ready | Outcome]]) -> None:
        """Take (rank, message) until the ranks are done."""
        steps = self._setup.job.steps
        with _Progress(len(steps), self._quiet) as progress:
            progress.say(self._introduction())
            for rank, message in messages:
                if isinstance(message, Ready):
                    self._ready[rank] = message
                    if len(self._ready) == self._setup.ranks:
                        progress.say(f"{self._who()}\n\n{_HEADER}")
                    continue
                outcomes = self._heard.setdefault(message.position, {})
                outcomes[rank] = message
                if len(outcomes) == self._setup.ranks:
                    step = steps[message.position]
                    row = Row.of(self._setup.job, step, [outcomes[r] for r in sorted(outcomes)])
                    self.rows.append(row)
                    progress.say("\n".join([row.line(), *(f"      {fault}" for fault in row.faults)]))
                    progress.advance()

    def summary(self) -> str:
        """The last lines of the table."""
        totals, ranks = self._totals(), self._setup.ranks
        bad = sum(bool(row.faults) for row in self.rows)
        if bad:
            verdict = f"MISMATCH in {bad} of {len(self.rows)} steps"
        else:
            verdict = f"all {len(self.rows)} steps are the same bytes, sharded and replicated, on all {ranks} ranks"
        sharded, replicated = totals["sharded_ms"], totals["replicated_ms"]
        ratio = f" ({replicated / sharded:.2f} times as long)" if ranks > 1 and sharded > 0 else ""
        return (
            f"\n{verdict}\n{totals['rows']:,} rows ({totals['decode_rows']:,} decode), "
            f"{totals['key_row_pairs']:,} key-row pairs, {_size(totals['exchanged_bytes'])} of ids exchanged\n"
            f"sharded {sharded:,.0f} ms, replicated {replicated:,.0f} ms{ratio}; ids {totals['digest']}"
        )

    def to_dict(self) -> dict[str, Any]:
        """All of it, in plain JSON types."""
        setup, job = self._setup, self._setup.job
        return {
            "ok": self.ok,
            "ranks": setup.ranks,
            "group": setup.meeting["group"],
            "devices": [vars(self._ready[rank]) for rank in sorted(self._ready)],
            "note": setup.note,
            "source": setup.source,
            "requests": setup.requests,
            "scale": setup.scale,
            "max_batched_tokens": setup.max_batched_tokens,
            "steps_in_all": setup.steps_in_all,
            "num_heads": job.num_heads,
            "head_dim": job.head_dim,
            "topk": job.topk,
            "compress_ratio": job.compress_ratio,
            "seed": job.seed,
            "totals": self._totals(),
            "steps": [asdict(row) for row in self.rows],
        }

    def _totals(self) -> dict[str, Any]:
        rows = self.rows
        return {
            "rows": sum(row.decode_rows + row.prefill_rows for row in rows),
            "decode_rows": sum(row.decode_rows for row in rows),
            "key_row_pairs": sum(row.key_row_pairs for row in rows),
            "exchanged_bytes": sum(row.exchanged_bytes for row in rows),
            "sharded_ms": sum(row.sharded_ms for row in rows),
            "replicated_ms": sum(row.replicated_ms for row in rows),
            "mismatched_steps": [row.step for row in rows if row.faults],
            "digest": hashlib.sha256(" ".join(row.digest for row in rows).encode()).hexdigest()[:16],
        }

    def _introduction(self) -> str:
        setup, job = self._setup, self._setup.job
        text = (
            f"{setup.source}: {setup.requests} requests, lengths / {setup.scale}, "
            f"{len(job.steps)} of {setup.steps_in_all} steps of at most {setup.max_batched_tokens:,} rows\n"
            f"{job.num_heads} heads of {job.head_dim}, top {job.topk}, {job.compress_ratio} tokens a key\n"
        )
        if setup.note:
            text += f"note: {setup.note}\n"
        return text + f"starting {setup.ranks} ranks ..."

    def _who(self) -> str:
        devices = sorted({ready.device for ready in self._ready.values()})
        backends = sorted({ready.backend for ready in self._ready.values()})
        return (
            f"{self._setup.ranks} ranks on {', '.join(devices)}, backend {', '.join(backends)}, "
            f"group {self._setup.meeting['group']}"
        )


class _Progress:
    """Lines on standard output above a bar on standard error: tqdm's, or a plain one where it is not there."""

    def __init__(self, total: int, quiet: bool) -> None:
        self._quiet = quiet
        self._write: Callable[[str], None] = self._print
        self._bar: Any
        try:
            from tqdm import tqdm
        except ModuleNotFoundError:
            bar = Bar(total, "steps")
            self._bar, self.advance = bar, bar.advance
        else:
            # disable=None: silent where standard error is no terminal
            self._bar = tqdm(total=total, desc="steps", unit="step", file=sys.stderr, disable=None, leave=False)
            self._write = functools.partial(tqdm.write, file=sys.stdout)
            self.advance = self._bar.update

    def say(self, text: str) -> None:
        if not self._quiet:
            self._write(text)
            sys.stdout.flush()

    @staticmethod
    def _print(text: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\r\033[K")  # the bar's line
            sys.stderr.flush()
        print(text)

    def __enter__(self) -> _Progress:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
