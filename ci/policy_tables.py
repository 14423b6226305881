"""Print the break-even tables of ci/measurements/policy.md from the packaged tuning data, in Markdown.

python ci/policy_tables.py h200 mi325x
"""

from __future__ import annotations

import sys

from portable_indexer.policy import ShardPolicy
from portable_indexer.tuning import packaged

CONTEXTS = (0, 8_192, 16_384, 32_768, 65_536, 131_072, 1_048_576)
MODELS = ((64, 2048), (32, 2048), (64, 512))


def table(name: str, num_heads: int, topk: int) -> str:
    """Rows of a step from which sharding is chosen, by context and ranks, in Markdown."""
    tuning = packaged(name)
    if tuning is None:
        raise SystemExit(f"no packaged tuning data for {name}")
    policy = ShardPolicy(costs=tuning.costs, num_heads=num_heads, topk=topk, environment=False)
    titles = ["a new prompt" if context == 0 else f"{context:,} keys" for context in CONTEXTS]
    lines = [f"| {name}, H {num_heads}, k {topk} | " + " | ".join(titles) + " |"]
    lines.append("| --- |" + " ---: |" * len(CONTEXTS))
    for ranks in (2, 4, 8):
        found = [policy.break_even_rows(ranks, context) for context in CONTEXTS]
        cells = [f"{rows:,}" if rows is not None else "never" for rows in found]
        lines.append(f"| TP {ranks} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    for name in sys.argv[1:] or ("h200", "mi325x"):
        for num_heads, topk in MODELS:
            print(table(name, num_heads, topk), end="\n\n")


if __name__ == "__main__":
    main()
