"""Row-sharded sparse-attention indexer: FP8 multi-query logits, top-k, and one exchange of ids.

Importing this package touches no GPU and loads neither torch nor a vendor library; the public
names below load what they need on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from portable_indexer._version import __version__

if TYPE_CHECKING:
    from portable_indexer.api import fp8_mqa_logits, index_topk, top_k_per_row
    from portable_indexer.device import Device, detect
    from portable_indexer.exchange import agree, all_gatherv
    from portable_indexer.metadata import IndexerMetadata, IndexerMetadataBuilder, token_to_req_indices
    from portable_indexer.policy import ShardPolicy
    from portable_indexer.pools import pool_topk
    from portable_indexer.registry import get_backend, list_backends, resolve
    from portable_indexer.sharding import PrefillRowShard, balanced_prefill_row_shard
    from portable_indexer.tuning import Tuning, tuning_for
    from portable_indexer.warmup import warmup
    from portable_indexer.workspace import Workspace, workspace_bytes

_HOME = {
    "fp8_mqa_logits": "api",
    "index_topk": "api",
    "top_k_per_row": "api",
    "Device": "device",
    "detect": "device",
    "agree": "exchange",
    "all_gatherv": "exchange",
    "IndexerMetadata": "metadata",
    "IndexerMetadataBuilder": "metadata",
    "token_to_req_indices": "metadata",
    "ShardPolicy": "policy",
    "pool_topk": "pools",
    "get_backend": "registry",
    "list_backends": "registry",
    "resolve": "registry",
    "PrefillRowShard": "sharding",
    "balanced_prefill_row_shard": "sharding",
    "Tuning": "tuning",
    "tuning_for": "tuning",
    "warmup": "warmup",
    "Workspace": "workspace",
    "workspace_bytes": "workspace",
}

__all__ = [
    "Device",
    "IndexerMetadata",
    "IndexerMetadataBuilder",
    "PrefillRowShard",
    "ShardPolicy",
    "Tuning",
    "Workspace",
    "__version__",
    "agree",
    "all_gatherv",
    "balanced_prefill_row_shard",
    "detect",
    "fp8_mqa_logits",
    "get_backend",
    "index_topk",
    "list_backends",
    "pool_topk",
    "resolve",
    "token_to_req_indices",
    "top_k_per_row",
    "tuning_for",
    "warmup",
    "workspace_bytes",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
