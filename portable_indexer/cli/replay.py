"""`portable-indexer replay`: a request trace through a server's scheduler and the sharding policy's cost model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from portable_indexer.cli._bar import Bar
from portable_indexer.policy import ShardPolicy
from portable_indexer.tuning import Tuning, tuning_for

# vLLM's two rules: rows of the whole step from 0.33 on, rows of each rank in its first version.
VLLM_STEP_ROWS = 65_536
VLLM_RANK_ROWS = 16_384
MODEL_NOTE = "This is a model: no GPU ran. Times are what the numbers below predict for the prefill rows' indexer."


@dataclass(frozen=True)
class Work:
    """The prefill part of one step: rows, and key-row pairs in keys."""

    rows: int
    pairs: int

    @property
    def context(self) -> float:
        """Keys that a row sees in the mean."""
        return self.pairs / self.rows


@dataclass
class Outcome:
    """Seconds of the indexer over all steps of the trace, one layer's, on one device and number of ranks."""

    device: str
    tp_size: int
    origin: str
    steps: int = 0
    sharded_steps: int = 0
    replicated_s: float = 0.0
    policy_s: float = 0.0
    vllm_step_rows_s: float = 0.0
    vllm_rank_rows_s: float = 0.0
    by_context: dict[int, list[float]] = field(default_factory=dict)  # bound -> [steps, replicated, policy]

    def saved(self, seconds: float) -> float:
        """The share of the replicated time that is saved where `seconds` are left."""
        return 1.0 - seconds / self.replicated_s if self.replicated_s else 0.0


def simulate(steps: Iterable[Work], device: str, policy: ShardPolicy, tp_size: int, origin: str) -> Outcome:
    """Add up predicted times of all steps: replicated, by the policy, and by vLLM's two thresholds.

    A step whose exchange the policy's costs do not know stays replicated under every rule.
    """
    outcome = Outcome(device, tp_size, origin)
    for step in steps:
        times = policy.estimate(rows=step.rows, pairs=step.pairs, tp_size=tp_size)
        sharded_s = times.replicated_s if times.sharded_s is None else times.sharded_s
        chosen = policy.decide(rows=step.rows, pairs=step.pairs, tp_size=tp_size)
        own = sharded_s if chosen else times.replicated_s
        outcome.steps += 1
        outcome.sharded_steps += chosen
        outcome.replicated_s += times.replicated_s
        outcome.policy_s += own
        outcome.vllm_step_rows_s += sharded_s if step.rows >= VLLM_STEP_ROWS else times.replicated_s
        outcome.vllm_rank_rows_s += sharded_s if step.rows >= VLLM_RANK_ROWS * tp_size else times.replicated_s
        entry = outcome.by_context.setdefault(_bound(step.context), [0, 0.0, 0.0])
        entry[0] += 1
        entry[1] += times.replicated_s
        entry[2] += own
    return outcome


def _bound(context: float) -> int:
    """The power of two, at least 1,024, up to which a context counts."""
    bound = 1_024
    while bound < context:
        bound *= 2
    return bound


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the subcommand."""
    parser.add_argument("trace", type=Path, help="Mooncake JSONL or Azure CSV of request lengths")
    parser.add_argument(
        "--device", nargs="+", metavar="NAME", help="products, such as mi325x h200 (default: the one here, else these)"
    )
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 4, 8], help="numbers of ranks (default: 2 4 8)")
    parser.add_argument("--max-batched-tokens", type=int, default=8192, help="rows of a step at most (default: 8192)")
    parser.add_argument("--max-running", type=int, default=256, help="requests at a time at most (default: 256)")
    parser.add_argument("--limit", type=int, help="first requests of the trace only")
    parser.add_argument("--prefix-cache", action="store_true", help="reuse equal prefixes, where the trace tells them")
    parser.add_argument("--heads", type=int, default=64, help="index heads (default: 64)")
    parser.add_argument("--head-dim", type=int, default=128, help="head dimension (default: 128)")
    parser.add_argument("--topk", type=int, default=2048, help="ids a row (default: 2048)")
    parser.add_argument("--compress-ratio", type=int, default=1, help="tokens for each key (default: 1)")
    parser.add_argument("--layers", type=int, default=1, help="layers with an indexer (default: 1)")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw time saved by context length (needs matplotlib)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Replay the trace; exit code 2 for a trace or an option of no use."""
    try:
        devices = _devices(args.device)
        policies = {name: _policy(tuning, args) for name, tuning in devices.items()}
        steps, requests = steps_of(args)
        if args.plot is not None:
            _plotting()
    except ModuleNotFoundError:
        raise  # told apart by the command
    except (OSError, ValueError, ImportError) as error:
        print(f"portable-indexer replay: {error}", file=sys.stderr)
        return 2
    outcomes = [
        simulate(steps, name, policies[name], tp_size, devices[name].origin) for name in devices for tp_size in args.tp
    ]
    if args.plot is not None:
        try:
            _plot(args.plot, outcomes, args)
        except (OSError, ValueError) as error:  # a folder that is not there, an ending that names no format
            print(f"portable-indexer replay: --plot {args.plot}: {error}", file=sys.stderr)
            return 2
    if args.json:
        print(json.dumps(_report(args, requests, steps, outcomes, devices)))
    else:
        _print(args, requests, steps, outcomes, devices)
    return 0


def _devices(names: Sequence[str] | None) -> dict[str, Tuning]:
    from portable_indexer.device import detect, device_of

    if names is None:
        here = detect()
        if here.is_gpu:
            return {here.product or here.arch: tuning_for(here)}
        names = ["mi325x", "h200"]
    return {name: tuning_for(device_of(name)) for name in names}


def _policy(tuning: Tuning, args: argparse.Namespace) -> ShardPolicy:
    for name in ("tp", "layers", "compress_ratio"):
        values = getattr(args, name)
        if any(value < 1 for value in (values if isinstance(values, list) else [values])):
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {values}")
    return ShardPolicy(
        costs=tuning.costs,
        num_heads=args.heads,
        head_dim=args.head_dim,
        topk=args.topk,
        compress_ratio=args.compress_ratio,
    )


def steps_of(args: argparse.Namespace) -> tuple[list[Work], int]:
    """The steps with prefill rows that score something, and the number of requests."""
    from portable_indexer import traces
    from portable_indexer.steps import schedule

    requests = traces.read(args.trace, args.limit)
    found: list[Work] = []
    total = sum(request.input_tokens for request in requests)
    with Bar(total, "scheduling", quiet=args.quiet or args.json) as bar:
        for step in schedule(
            requests, args.max_batched_tokens, max_running=args.max_running, prefix_cache=args.prefix_cache
        ):
            rows, pairs = step.num_prefill_rows, step.prefill_pairs(args.compress_ratio)
            if rows and pairs:
                found.append(Work(rows, pairs))
                bar.advance(f"step {step.index:,}", rows)
    return found, len(requests)


def _errors(tuning: Tuning) -> list[str]:
    """How far this device's model was from measurements, one line for each run that says."""
    lines = []
    for run in tuning.runs.values():
        error = run.get("error")
        if error:
            seen = "the fit's own" if error["seen_by_the_fit"] else "shapes that the fit did not see"
            lines.append(
                f"replicated step times on {run['date']}: off by {error['median']:.1%} in the median and "
                f"{error['worst']:.1%} at worst over {error['shapes']} shapes ({seen})"
            )
    return lines or ["never compared with a measurement"]


def _report(
    args: argparse.Namespace, requests: int, steps: list[Work], outcomes: list[Outcome], devices: dict[str, Tuning]
) -> dict[str, Any]:
    def times(o: Outcome) -> dict[str, Any]:
        kinds = ("policy_s", "vllm_step_rows_s", "vllm_rank_rows_s")
        return {
            "device": o.device,
            "tp_size": o.tp_size,
            "steps": o.steps,
            "sharded_steps": o.sharded_steps,
            "replicated_s": o.replicated_s * args.layers,
            **{kind: getattr(o, kind) * args.layers for kind in kinds},
            **{f"{kind[:-2]}_saved": o.saved(getattr(o, kind)) for kind in kinds},
            "by_context": [
                {"up_to_keys": bound, "steps": n, "replicated_s": a * args.layers, "policy_s": b * args.layers}
                for bound, (n, a, b) in sorted(o.by_context.items())
            ],
        }

    return {
        "note": MODEL_NOTE,
        "trace": str(args.trace),
        "requests": requests,
        "steps": len(steps),
        "rows": sum(step.rows for step in steps),
        "pairs": sum(step.pairs for step in steps),
        "max_batched_tokens": args.max_batched_tokens,
        "layers": args.layers,
        "outcomes": [times(o) for o in outcomes],
        "models": {name: {"origin": t.origin, "errors": _errors(t)} for name, t in devices.items()},
    }


def _print(
    args: argparse.Namespace, requests: int, steps: list[Work], outcomes: list[Outcome], devices: dict[str, Tuning]
) -> None:
    rows = sum(step.rows for step in steps)
    layers = "one layer's indexer" if args.layers == 1 else f"the indexers of {args.layers} layers"
    print(f"{args.trace.name}: {requests:,} requests, {len(steps):,} steps with {rows:,} prefill rows, at most")
    print(f"{args.max_batched_tokens:,} a step; {layers}, H {args.heads}, k {args.topk}")
    print(MODEL_NOTE)
    print()
    print("                  steps that    indexer time             saved by      vLLM 0.33:      vLLM's first:")
    print("device     tp     are sharded   replicated   policy      the policy    65,536 rows     16,384 rows a rank")
    for o in outcomes:
        share = f"{o.sharded_steps:,} of {o.steps:,}"
        spent = f"{o.replicated_s * args.layers:9.2f} s  {o.policy_s * args.layers:9.2f} s"
        saved = [f"{o.saved(s):8.1%}" for s in (o.policy_s, o.vllm_step_rows_s, o.vllm_rank_rows_s)]
        print(f"{o.device:9} {o.tp_size:3}  {share:>16}  {spent}   {saved[0]}      {saved[1]}        {saved[2]}")
    print()
    print("time saved by the policy, by keys that a row of the step sees in the mean")
    bounds = sorted({bound for o in outcomes for bound in o.by_context})
    print("up to keys     " + "".join(f"{bound:>10,}" for bound in bounds))
    for o in outcomes:
        cells = [o.by_context.get(bound) for bound in bounds]
        text = "".join(f"{1 - c[2] / c[1]:>10.1%}" if c else f"{'-':>10}" for c in cells)
        print(f"{o.device:9} {o.tp_size:3}  {text}")
    print()
    for name, tuning in devices.items():
        unknown = [tp for tp in args.tp if tp > 1 and tp not in {entry.ranks for entry in tuning.costs.exchange}]
        print(f"{name}: {tuning.origin}; {', '.join(sorted(set(tuning.sources.values())))} numbers")
        if unknown:
            ranks = ", ".join(map(str, unknown))
            print(f"  no numbers for an exchange among {ranks} ranks: every step counts as replicated there")
        for line in _errors(tuning):
            print(f"  {line}")


def _plotting() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'portable-indexer[plot]'") from error
    matplotlib.use("Agg")
    return matplotlib


def _plot(path: Path, outcomes: list[Outcome], args: argparse.Namespace) -> None:
    _plotting()
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for o in outcomes:
        bounds = sorted(o.by_context)
        saved = [100 * (1 - o.by_context[b][2] / o.by_context[b][1]) for b in bounds]
        axes.plot(bounds, saved, marker="o", label=f"{o.device}, TP {o.tp_size}")
    axes.set_xscale("log", base=2)
    bounds = sorted({bound for o in outcomes for bound in o.by_context})
    axes.set_xticks(bounds, [f"{bound:,}" for bound in bounds])
    axes.set_xlabel("keys that a row sees in the mean of its step, up to")
    axes.set_ylabel("indexer time saved, % (model)")
    axes.set_title(f"{args.trace.name}, at most {args.max_batched_tokens:,} rows a step")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
