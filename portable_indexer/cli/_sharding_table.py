"""The table of `bench sharding` in Markdown, from the rows of its JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

_TITLES = (
    "TP", "rows", "context", "H", "pool", "replicated", "model", "slowest shard", "balance", "exchange", "of sharded",
    "sharded", "model", "speed-up",
)  # fmt: skip
LEGEND = (
    "Milliseconds of the device, medians; the host is ahead. *model*: what the policy predicts for the column before",
    "it, and its error. *balance*: mean over the shards of their compute, as a share of the slowest one's. *est.*: not",
    "measured for want of GPUs; the slowest shard's measured compute plus the exchange as the tuning file has it.",
)


def derived(row: Mapping[str, Any]) -> dict[str, Any]:
    """What follows from one row: balance, exchange and sharded time (estimated where not measured), speed-up."""
    computes = row.get("computes")
    measured = row["sharded"] is not None
    exchange = row["exchange"] if measured else row.get("predicted_exchange")
    sharded = row["sharded"]
    if not measured and exchange is not None:
        sharded = row["compute"] + exchange
    return {
        "measured": measured,
        "balance": sum(computes) / len(computes) / max(computes) if computes else None,
        "exchange": exchange,
        "exchange_share": None if sharded is None else exchange / sharded,
        "sharded": sharded,
        "speed_up": None if sharded is None else row["replicated"] / sharded,
        "replicated_error": row["predicted_replicated"] / row["replicated"] - 1,
        "sharded_error": row["predicted_sharded"] / sharded - 1
        if sharded is not None and row["predicted_sharded"] is not None
        else None,
    }


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """All rows as a Markdown table with its legend."""
    lines = ["| " + " | ".join(_TITLES) + " |", "|" + " ---: |" * len(_TITLES)]
    marked = pools = False
    for row in rows:
        found = derived(row)
        estimated = "" if found["measured"] or found["sharded"] is None else " est."
        marked |= bool(estimated)
        pools |= row["pool"] > 1
        cells = [
            str(row["tp"]),
            f"{row['rows']:,}",
            f"{row['context']:,}",
            str(row["heads"]),
            str(row["pool"]),
            _time(row["replicated"]),
            _guess(row["predicted_replicated"], found["replicated_error"]),
            _time(row["compute"]),
            _share(found["balance"]),
            _time(found["exchange"]) + estimated,
            _share(found["exchange_share"]) + estimated,
            _time(found["sharded"]) + estimated,
            # The model's sharded time holds the same exchange as the estimate: comparing them says little.
            _guess(row["predicted_sharded"], found["sharded_error"] if found["measured"] else None),
            "unknown" if found["speed_up"] is None else f"{found['speed_up']:.2f}x{estimated}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    notes = " ".join(LEGEND).split(" *est.*")
    text = notes[0] + (" *est.*" + notes[1] if marked else "")
    text += " Of *pool* tokens one key is made, and a row's k is smaller by as much." if pools else ""
    return "\n".join(lines) + "\n\n" + textwrap.fill(text, 118)


def _time(milliseconds: float | None) -> str:
    if milliseconds is None:
        return "unknown"
    return f"{milliseconds:.3f}" if milliseconds < 10 else f"{milliseconds:.1f}"


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"


def _guess(milliseconds: float | None, error: float | None) -> str:
    return _time(milliseconds) + ("" if error is None else f" ({error:+.0%})")
