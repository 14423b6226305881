"""Whether the ranks of a tensor-parallel group were hooked alike, before any of them relies on another.

A rank whose op was not hooked would not come to an exchange, and one with other kernels would come to another.
"""

from __future__ import annotations

from typing import Any

from portable_indexer.vllm_plugin.hooks import states

# Hooks that no other rank depends on.
_LOCAL = ("request map",)


def unlike_ranks(tp: Any) -> str | None:
    """What differs, with the ranks named, the same text on every rank; None where nothing does.

    Every rank of the group comes here once, at the same point.
    """
    import torch.distributed as dist

    from portable_indexer.exchange.records import name_ranks

    mine = {name: text for name, text in states.items() if name not in _LOCAL}
    answers: list[Any] = [None] * tp.world_size
    dist.all_gather_object(answers, mine, group=tp.cpu_group)
    differences = []
    for name in dict.fromkeys(name for answer in answers for name in answer):
        for text in dict.fromkeys(answer.get(name, "missing") for answer in answers):
            ranks = [rank for rank, answer in enumerate(answers) if answer.get(name, "missing") == text]
            if ranks[0] > 0:
                first = answers[0].get(name, "missing")
                differences.append(f"{name} is {text!r} on {name_ranks(ranks)}, {first!r} on rank 0")
    return "; ".join(differences) or None
