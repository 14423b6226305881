"""One rank of test jobs: ``python worker.py JOB,JOB RANK RANKS TP PORT OUT``. Environment variables set the plugin."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import world


def scenarios(tp: int) -> dict[str, Any]:
    """Every scenario's id buffer, what the oracle says, and proof that shared metadata stayed as it was."""
    import steps

    results: dict[str, Any] = {}
    for name, scenario in steps.SCENARIOS.items():
        step = steps.build(scenario, tp)
        before = _snapshot(step.metadata)
        ids = steps.run(step)
        prefill = step.metadata.prefill
        results[name] = {
            "ids": ids,
            "oracle": steps.oracle(step),
            "decode": step.metadata.num_decode_tokens,
            "rows": scenario.rows,
            "sizes": None if prefill is None else prefill.row_shard_sizes,
            "skips": [] if prefill is None else [chunk.skip_kv_gather for chunk in prefill.chunks],
            "unchanged": _same(before, _snapshot(step.metadata)),
            "cache": step.call["kv_cache"].clone(),
        }
    return results


def _snapshot(value: Any) -> Any:
    import dataclasses

    if isinstance(value, torch.Tensor):
        return value.clone()
    if dataclasses.is_dataclass(value):
        return {field.name: _snapshot(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_snapshot(entry) for entry in value]
    return value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def main() -> None:
    names, rank, ranks, tp, port, out = sys.argv[1].split(","), *map(int, sys.argv[2:6]), sys.argv[6]
    own = os.environ.get("PORTABLE_INDEXER_TEST_RANK_1")
    if own is not None and rank == 1:
        os.environ["PORTABLE_INDEXER_VLLM_KERNELS"] = own
    world.start(rank, ranks, port, tp)
    import jobs

    from portable_indexer.vllm_plugin import state

    results = {}
    for name in names:
        began = time.monotonic()
        results[name] = (scenarios if name == "scenarios" else getattr(jobs, name))(tp)
        print(f"{name}: {time.monotonic() - began:.1f} s")
    torch.save({"results": results, "state": state()}, f"{out}.{rank}")


if __name__ == "__main__":
    main()
