"""The hook into vLLM's indexer metadata builder: which steps are sharded, and how.

The builder asks a gate (may this configuration shard at all?) and a planner (these rows for each rank, or
none). Both are globals of its module. On ROCm the gate says no by itself and is replaced; on CUDA it is only
listened to. The planner is replaced on both, so that the policy decides by rows and context.
"""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

from portable_indexer.vllm_plugin.hooks import (
    Hook,
    Inactive,
    attribute,
    log,
    mark,
    names_in,
    parameters_of,
    refuse_second,
    require_fields,
    vendor,
)
from portable_indexer.vllm_plugin.settings import Settings

if TYPE_CHECKING:
    import torch

    from portable_indexer.policy import ShardPolicy

_GATE = "tp_prefill_row_sharding_supported"
_PLAN = "balanced_prefill_row_shard"
_GATE_PARAMETERS = {"vllm_config", "dcp_world_size", "use_pcp", "tp_size"}
_PLAN_PARAMETERS = {"seq_lens_cpu", "query_lens_cpu", "compress_ratio", "tp_size"}


class Planner:
    """Gate and planner of one process. Everything it decides on is the same on all ranks of a TP group."""

    def __init__(self, gate: Any, plan: Any, platform: str, kernels: str = "vllm") -> None:
        self._gate, self._plan, self._platform = gate, plan, platform
        # vLLM's plan can do without an agreement only where its own exchange carries it out.
        self._vllm_exchanges = platform == "cuda" and kernels == "vllm"
        self._asked = False
        self._alike = False
        self._policy: ShardPolicy | None = None
        self._least: int | None = None

    def supported(self, vllm_config: Any, dcp_world_size: int, use_pcp: bool, tp_size: int) -> bool:
        """vLLM's ``tp_prefill_row_sharding_supported``."""
        if self._platform == "cuda":
            allowed = bool(self._gate(vllm_config, dcp_world_size, use_pcp, tp_size))
        else:
            allowed = _rocm_gate(vllm_config, dcp_world_size, use_pcp, tp_size)
        if not allowed:
            return False
        if not self._asked:
            self._asked = True
            self._alike = _alike()
            if self._alike:
                self._policy = _agreed_policy(vllm_config)
                self._least = _chosen_min_rows(vllm_config)
        return self._policy is not None or (self._alike and self._vllm_exchanges)

    def shard(
        self,
        seq_lens_cpu: torch.Tensor,
        query_lens_cpu: torch.Tensor,
        compress_ratio: int,
        tp_size: int,
        *min_rows: int,
        **more: int,
    ) -> list[int] | None:
        """vLLM's ``balanced_prefill_row_shard``; its ``min_rows`` counts only where the user has set it."""
        from portable_indexer.sharding import balanced_prefill_row_shard

        if self._policy is None:
            return self._plan(  # type: ignore[no-any-return]
                seq_lens_cpu, query_lens_cpu, compress_ratio, tp_size, *min_rows, **more
            )
        policy = self._policy
        changes: dict[str, Any] = {} if self._least is None else {"min_rows": self._least}
        if compress_ratio != policy.compress_ratio:
            changes["compress_ratio"] = compress_ratio
        try:
            if changes:
                policy = dataclasses.replace(policy, **changes, environment=False)
            sizes = balanced_prefill_row_shard(seq_lens_cpu, query_lens_cpu, compress_ratio, tp_size, policy=policy)
        except (TypeError, ValueError) as error:  # The same lengths on all ranks, so they all come here.
            _refuse(f"{type(error).__name__}: {error}")
            return None
        # vLLM's own exchange, which serves CUDA, was written for shards that are never empty.
        return sizes if sizes is None or self._platform != "cuda" else _none_empty(sizes)


def _rocm_gate(vllm_config: Any, dcp_world_size: int, use_pcp: bool, tp_size: int) -> bool:
    """vLLM's conditions without the platform and without pynccl: the exchange here needs neither."""
    import vllm.envs as envs
    from vllm.config import CUDAGraphMode

    mode = vllm_config.compilation_config.cudagraph_mode or CUDAGraphMode.NONE
    return bool(
        tp_size > 1
        and dcp_world_size == 1
        and not use_pcp
        and not envs.VLLM_BATCH_INVARIANT
        and mode.mixed_mode() != CUDAGraphMode.FULL
    )


def _alike() -> bool:
    """Whether all ranks of the TP group were hooked alike; the same answer on each."""
    from vllm.distributed import get_tp_group

    from portable_indexer.vllm_plugin.alike import unlike_ranks

    differences = unlike_ranks(get_tp_group())
    if differences is not None:
        log.warning("portable_indexer, sharding: off: the ranks must be set up alike: %s", differences)
    return differences is None


def _agreed_policy(vllm_config: Any) -> ShardPolicy | None:
    """One policy for the TP group and a tested exchange, or None on every rank alike."""
    from vllm.distributed import get_tp_group

    from portable_indexer.exchange import ExchangeError, agree, self_test
    from portable_indexer.policy import ShardPolicy

    try:
        policy = ShardPolicy(**_indexer_shape(vllm_config))
    except Exception as error:  # The others wait in `agree`: come along, with a policy that shards nothing.
        log.warning("portable_indexer, sharding: no policy on this rank: %s", error)
        policy = ShardPolicy(mode="off", environment=False)
    tp = get_tp_group()
    try:
        policy = agree(policy, tp.cpu_group)
        self_test(tp.device, tp.device_group)
    except ExchangeError as error:
        log.warning("portable_indexer, sharding: off: %s", error)
        return None
    log.info("portable_indexer, sharding: mode %s among %d ranks", policy.mode, tp.world_size)
    return policy


def _indexer_shape(vllm_config: Any) -> dict[str, Any]:
    """Heads, head dimension and top-k from the model's config, as far as it tells."""
    model = vllm_config.model_config
    config = getattr(model, "hf_text_config", None) or getattr(model, "hf_config", None)
    names = {"num_heads": "index_n_heads", "head_dim": "index_head_dim", "topk": "index_topk"}
    shape = {ours: getattr(config, theirs, None) for ours, theirs in names.items()}
    return {name: value for name, value in shape.items() if isinstance(value, int) and value > 0}


def _chosen_min_rows(vllm_config: Any) -> int | None:
    """``indexer_tp_shard_min_rows`` where the user has changed it, else None."""
    config = vllm_config.attention_config
    value = getattr(config, "indexer_tp_shard_min_rows", None)
    if value is None or not dataclasses.is_dataclass(config):
        return None
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    if "indexer_tp_shard_min_rows" not in defaults:
        return None
    default = defaults["indexer_tp_shard_min_rows"]
    return None if value == getattr(default, "default", default) else int(value)


@functools.lru_cache(maxsize=8)
def _refuse(reason: str) -> None:
    log.warning("portable_indexer, sharding: a step is not sharded: %s", reason)


def _none_empty(sizes: list[int]) -> list[int] | None:
    """At least one row for each rank, taken from a neighbour; None where there are fewer rows than ranks."""
    ranks, rows = len(sizes), sum(sizes)
    if rows < ranks:
        return None
    cuts = [sum(sizes[: rank + 1]) for rank in range(ranks)]
    for rank in range(ranks - 1):
        cuts[rank] = max(cuts[rank], (cuts[rank - 1] if rank else 0) + 1)
    for rank in range(ranks - 2, -1, -1):
        cuts[rank] = min(cuts[rank], cuts[rank + 1] - 1)
    return [cut - (cuts[rank - 1] if rank else 0) for rank, cut in enumerate(cuts)]


def _apply(module: ModuleType, settings: Settings) -> str:
    gate, plan = attribute(module, _GATE), attribute(module, _PLAN)
    refuse_second(gate)
    parameters_of(gate, _GATE_PARAMETERS, _GATE_PARAMETERS)
    parameters_of(plan, _PLAN_PARAMETERS, _PLAN_PARAMETERS | {"min_rows"})
    require_fields(attribute(module, "DeepseekV32IndexerPrefillMetadata"), "chunks", "row_shard_sizes")
    if not {_GATE, _PLAN} <= names_in(attribute(module, "DeepseekV32IndexerMetadataBuilder").build):
        raise Inactive("this vLLM's metadata builder does not plan row shards")
    platform = vendor(settings)
    if platform == "rocm" and "is_cuda" not in names_in(gate):
        raise Inactive("this vLLM's gate is not limited to CUDA: it shards by itself, and is left to it")
    planner = Planner(gate, plan, platform, settings.kernels)

    @functools.wraps(gate)
    def supported(*args: Any, **kwargs: Any) -> bool:
        return planner.supported(*args, **kwargs)

    @functools.wraps(plan)
    def shard(*args: Any, **kwargs: Any) -> list[int] | None:
        return planner.shard(*args, **kwargs)

    mark(supported, gate)
    mark(shard, plan)
    # Only the builder's own names: vLLM's CUDA op keeps its gate.
    setattr(module, _GATE, supported)
    setattr(module, _PLAN, shard)
    return f"the policy decides by rows and context which steps are sharded ({platform})"


HOOK = Hook("row plan", "vllm.v1.attention.backends.mla.indexer", _apply)
