"""Make the tables of ci/measurements/{policy,sharding}.md from JSON results and the packaged tuning data.

    python ci/tables.py [--into FILE] KIND[:LABEL]=SOURCE ...

    sharding=FILE       JSON of `portable-indexer bench sharding`
    exchange=FILE       JSON of ci/nccl_two_ranks.py
    tune=FILE           JSON of `portable-indexer tune --json`: its check of the model, and the numbers
    break-even=NAMES    h200,mi325x: rows from which the packaged numbers shard
    replay=TRACE        the trace through the policy with the packaged numbers, at 8,192 and 65,536 rows a step

Prints them, or puts each between the lines `<!-- KIND:LABEL -->` and `<!-- end -->` of FILE.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from portable_indexer.cli import _sharding_table, replay
from portable_indexer.cli._sharding_ranks import Shape
from portable_indexer.cli.bench_sharding import predictions
from portable_indexer.policy import ShardPolicy
from portable_indexer.tuning import Tuning, packaged

CONTEXTS = (0, 8_192, 16_384, 32_768, 65_536, 131_072, 1_048_576)
MODELS = ((64, 2048), (32, 2048), (64, 512))
RANKS = (2, 4, 8)
REPLAYED = ("h200", "mi325x")


def grid(titles: Iterable[object], rows: Iterable[Iterable[object]], first: str = "---:") -> str:
    """A Markdown table, numbers to the right."""
    names = [str(title) for title in titles]
    lines = ["| " + " | ".join(names) + " |", f"| {first} |" + " ---: |" * (len(names) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def tuned(name: str) -> Tuning:
    """The packaged numbers of a product."""
    found = packaged(name)
    if found is None:
        raise ValueError(f"no packaged tuning data for {name}")
    return found


def break_even(names: str) -> str:
    """Rows of a step from which sharding is chosen, by context and ranks."""
    tables = []
    for name in names.split(","):
        for heads, topk in MODELS:
            policy = ShardPolicy(costs=tuned(name).costs, num_heads=heads, topk=topk, environment=False)
            titles = ["a new prompt" if context == 0 else f"{context:,} keys" for context in CONTEXTS]
            rows = []
            for ranks in RANKS:
                found = [policy.break_even_rows(ranks, context) for context in CONTEXTS]
                rows.append([f"TP {ranks}", *(f"{n:,}" if n is not None else "never" for n in found)])
            tables.append(grid([f"{name}, H {heads}, k {topk}", *titles], rows, "---"))
    return "\n\n".join(tables)


def sharding(path: str) -> str:
    """Replicated against sharded; what the model predicts is what it predicts now, with the packaged numbers."""
    report = json.loads(Path(path).read_text())
    product = report.get("product") or report["versions"]["device"].split()[-1].lower()
    policy = ShardPolicy(costs=tuned(product).costs, environment=False)
    rows = []
    for row in report["rows"]:
        shape = Shape(**{name: row[name] for name in ("rows", "context", "heads", "pool", "topk")})
        rows.append({**row, **predictions(policy, shape, row["tp"])})
    return _sharding_table.table(rows)


def exchange(path: str) -> str:
    """Microseconds by rows, size list and layout, grouped / padded; bytes and host time of the grouped one."""
    results = json.loads(Path(path).read_text())["results"]
    found = {(r["rows"], r["plan"], r["pitched"], r["algorithm"]): r for r in results}
    plans = list(dict.fromkeys(r["plan"] for r in results))
    rows_of = sorted({r["rows"] for r in results})
    tables = []
    for pitched in (False, True):
        titles = ["rows", *plans, "causal: GB/s", "causal: host us"]
        lines = []
        for rows in rows_of:
            cells = [
                " / ".join(f"{found[rows, plan, pitched, way]['us']:,.0f}" for way in ("grouped", "padded"))
                for plan in plans
            ]
            causal = found[rows, "causal", pitched, "grouped"]
            lines.append([f"{rows:,}", *cells, f"{causal['received_gb_s']:.0f}", f"{causal['host_us']:.0f}"])
        kind = "with a pitch of 2,176 ids, through staging" if pitched else "contiguous, in place"
        tables.append(f"Rows {kind}:\n\n" + grid(titles, lines))
    return "\n\n".join([*tables, _exchange_summary(results)])


def _exchange_summary(results: list[dict[str, Any]]) -> str:
    from portable_indexer.tuning.fit import fit_exchange

    uneven = {(r["rows"], r["plan"], r["pitched"], r["algorithm"]): r for r in results if r["plan"] != "even"}
    wins = {}
    for way, other in (("grouped", "padded"), ("padded", "grouped")):
        cases = {k[:3] for k in uneven}
        won = [(n, p, t) for n, p, t in cases if uneven[n, p, t, way]["us"] < 0.95 * uneven[n, p, t, other]["us"]]
        pitched = sorted({rows for rows, _, with_pitch in won if with_pitch})
        wins[way] = f"{len(won)} (with a pitch: at {', '.join(f'{n:,}' for n in pitched) or 'no number of'} rows)"
    causal = [r for r in results if r["plan"] == "causal" and not r["pitched"] and r["algorithm"] == "grouped"]
    bound = [r["rows"] for r in causal if r["host_us"] > 0.9 * r["us"]]
    received = [(r["received_gb_s"] * 1e3 * r["us"], r["us"] / 1e6) for r in causal]
    latency, bandwidth = fit_exchange(received)
    least, most = min(r["us"] for r in causal), max(r["received_gb_s"] for r in causal)
    reach = f"up to {max(bound):,} rows" if bound else "nowhere"
    sentences = (
        f"Of {len(uneven) // 2} pairs with uneven sizes, grouped is faster by more than 5% in {wins['grouped']},",
        f"padded in {wins['padded']}. Grouped, causal and contiguous takes {least:.0f} us at the least and receives",
        f"{most:.0f} GB/s at the most; all sizes together fit {latency * 1e6:.0f} us + bytes at",
        f"{bandwidth / 1e9:.0f} GB/s. To launch it takes the host more than nine tenths of the device's time {reach}.",
    )
    return textwrap.fill(" ".join(sentences), 118)


def tune(path: str) -> str:
    """The model against shapes that its fit did not see, and its numbers."""
    report = json.loads(Path(path).read_text())
    rows, shares = [], []
    for line in report["unseen"]:
        r = dict(zip(report["columns"], line, strict=True))
        share = r["predicted_s"] / r["measured_s"] - 1
        shares.append(abs(share))
        requests = f" in {r['requests']} requests" if r.get("requests", 1) > 1 else ""
        times = [f"{r[name] * 1e3:.3f} ms" for name in ("measured_s", "predicted_s")]
        keys = f"{r['pairs'] / r['rows']:,.0f}{requests}"
        rows.append(
            [
                f"{r['rows']:,}",
                keys,
                r["heads"],
                f"{r.get('k', 2048):,}",
                f"{r['host_s'] * 1e3:.2f} ms",
                *times,
                f"{share:+.1%}",
            ]
        )
    titles = ("rows", "keys a row in the mean", "H", "k", "host launches in", "measured", "predicted", "error")
    off = sorted(shares)
    middle = (off[(len(off) - 1) // 2] + off[len(off) // 2]) / 2
    numbers = [
        [f"`{name}`", f"{entry['value']:.4g}", entry["source"]] for name, entry in report["content"]["numbers"].items()
    ]
    return "\n\n".join(
        [
            grid(titles, rows),
            f"Median error {middle:.1%}, worst {off[-1]:.1%}.",
            grid(("number", "value", "source"), numbers, "---"),
        ]
    )


def replayed(trace: str) -> str:
    """The trace at two sizes of steps, and time saved by context."""
    return "\n\n".join(_replayed(trace, budget) for budget in (8_192, 65_536))


def _replayed(trace: str, budget: int) -> str:
    parser = argparse.ArgumentParser()
    replay.add_arguments(parser)
    args = parser.parse_args([trace, "--max-batched-tokens", str(budget), "--quiet"])
    steps, requests = replay.steps_of(args)
    outcomes = []
    for name in REPLAYED:
        policy = ShardPolicy(costs=tuned(name).costs, environment=False)
        outcomes += [replay.simulate(steps, name, policy, ranks, "") for ranks in RANKS]
    lines = []
    for o in outcomes:
        saved = [f"{o.saved(s):.1%}" for s in (o.policy_s, o.vllm_step_rows_s, o.vllm_rank_rows_s)]
        share = f"{o.sharded_steps:,} of {o.steps:,}"
        lines.append([o.device, o.tp_size, share, f"{o.replicated_s:.2f} s", f"{o.policy_s:.2f} s", *saved])
    titles = (
        "device", "TP", "steps sharded", "replicated", "by the policy", "saved", "saved at 65,536 rows",
        "saved at 16,384 rows a rank",
    )  # fmt: skip
    bounds = sorted({bound for o in outcomes for bound in o.by_context})
    contexts = []
    for o in outcomes:
        cells = [o.by_context.get(bound) for bound in bounds]
        contexts.append([o.device, o.tp_size, *(f"{1 - c[2] / c[1]:.1%}" if c else "-" for c in cells)])
    rows = sum(step.rows for step in steps)
    return "\n\n".join(
        [
            f"At most {budget:,} rows a step: {requests:,} requests, {len(steps):,} steps with {rows:,} prefill rows.",
            grid(titles, lines, "---"),
            "Time saved by the policy, by the mean number of keys that a row of the step sees:",
            grid(("device", "TP", *(f"up to {bound:,}" for bound in bounds)), contexts, "---"),
        ]
    )


KINDS: dict[str, Callable[[str], str]] = {
    "sharding": sharding,
    "exchange": exchange,
    "tune": tune,
    "break-even": break_even,
    "replay": replayed,
}


def put(text: str, name: str, made: str) -> str:
    """`text` with `made` between the lines that name it. Raises ValueError where they are not there."""
    begin, end = f"<!-- {name} -->", "<!-- end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"lacks the lines {begin} and {end}")
    return f"{before}{begin}\n\n{made}\n\n{end}{after}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, help="file whose tables are replaced")
    parser.add_argument("tables", nargs="+", metavar="KIND[:LABEL]=SOURCE")
    args = parser.parse_args(arguments)
    text = args.into.read_text() if args.into else ""
    for item in args.tables:
        name, _, source = item.partition("=")
        kind = name.partition(":")[0]
        if kind not in KINDS or not source:
            parser.error(f"{item!r}: expected one of {', '.join(KINDS)}, then = and a source")
        try:
            made = KINDS[kind](source)
            text = put(text, name, made) if args.into else f"{text}{made}\n\n"
        except (OSError, ValueError, KeyError) as error:
            print(f"{item}: {args.into or ''} {error}", file=sys.stderr)
            return 1
    if args.into:
        args.into.write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
