"""What stands in for a vLLM indexer op: the prefill rows sharded and exchanged, all else the original's work."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portable_indexer.vllm_plugin import step
from portable_indexer.vllm_plugin.hooks import capturing, mark
from portable_indexer.vllm_plugin.scratch import exchange_bytes, scratch

if TYPE_CHECKING:
    from portable_indexer.sharding import PrefillRowShard
    from portable_indexer.vllm_plugin.own_kernels import OwnKernels

Call = dict[str, Any]


@dataclass(frozen=True)
class Form:
    """How an op's arguments are read.

    Attributes:
        rows: arguments with one entry for each row of the step.
        width: columns of the id buffer that prefill writes.
        whole: ``whole(call, metadata, context)``: whether a step is the original's alone although it has
            prefill rows.
        shards: whether the original shards by itself, so that only this package's kernels are worth a split.
    """

    rows: tuple[str, ...]
    width: Callable[[Call], int]
    whole: Callable[[Call, Any, Any], bool]
    shards: bool = False


class IndexerOp:
    """An op's replacement; ``function`` is what vLLM gets to call."""

    def __init__(
        self, original: Callable[..., Any], signature: inspect.Signature, form: Form, own: OwnKernels | None
    ) -> None:
        self._original, self._signature, self._form, self._own = original, signature, form, own

    def function(self, decorate: Callable[[Any], Any] | None) -> Callable[..., Any]:
        """A plain function with the original's name and signature, decorated as the original is."""

        @functools.wraps(self._original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        function: Callable[..., Any] = replacement if decorate is None else decorate(replacement)
        mark(function, self._original)
        return function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from vllm.forward_context import get_forward_context

        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        call: Call = dict(bound.arguments)
        context = get_forward_context()
        if not isinstance(context.attn_metadata, dict):
            if not capturing():
                self._reserve(call)
            return self._original(**call)
        prefix = _layer_name(call["k_cache_prefix"])
        metadata = step.step_metadata(context, prefix, call.get("candidate_blocks"))
        if metadata is None or self._form.whole(call, metadata, context):
            return self._original(**call)
        own = self._own if self._own is not None and self._own.take(call) else None
        if own is None and self._form.shards:
            return self._original(**call)
        tp = _tp_group() if metadata.prefill.row_shard_sizes is not None else None
        buffer = call["topk_indices_buffer"]
        shard = None if tp is None else step.shard_of(metadata, tp, buffer.shape[0])
        if own is None and (shard is None or tp is None):
            return self._original(**call)

        # Decode first: the original writes the ids of padded decode rows over the prefill rows behind them.
        def compute() -> None:
            if own is not None:
                self._run(call, context, prefix, step.without_prefill(metadata))
                own.prefill(call, metadata.prefill.chunks, shard)
            elif shard is not None:
                self._narrowed(call, context, prefix, metadata, shard)

        if shard is None or tp is None:
            compute()
        else:
            from portable_indexer.exchange import failure_reported

            width = self._form.width(call)
            with failure_reported(tp.device_group):  # the others are on their way to the exchange
                staging = scratch(buffer.device, self._bytes(call, tp.world_size))
            shard.run(compute, buffer, width, group=tp.device_group, staging=staging)
        return buffer

    def _narrowed(self, call: Call, context: Any, prefix: str, metadata: Any, shard: PrefillRowShard) -> None:
        """The original's own kernels on this rank's rows."""
        if metadata.num_decodes == 0:
            self._run(call, context, prefix, step.only_shard(metadata, shard))
            return
        self._run(call, context, prefix, step.without_prefill(metadata))
        # The original clears the rows that it is given, so the second call must not be given the decode rows.
        rest = step.without_rows(call, self._form.rows, metadata.num_decode_tokens)
        rest |= {"k": None, "skip_k_cache_insert": True}
        self._run(rest, context, prefix, step.only_shard_behind_decode(metadata, shard))

    def _run(self, call: Call, context: Any, prefix: str, metadata: Any) -> None:
        from vllm.forward_context import override_forward_context

        with override_forward_context(step.with_metadata(context, prefix, metadata)):
            self._original(**call)

    def _reserve(self, call: Call) -> None:
        """vLLM's profiling run: make the scratch now, and keep it. Every rank comes here."""
        from vllm.config import get_current_vllm_config_or_none
        from vllm.v1.attention.backends.mla import indexer

        if call["topk_indices_buffer"] is None:
            return
        ranks, config = _tp_group().world_size, get_current_vllm_config_or_none()
        if config is not None and ranks > 1:
            parallel = config.parallel_config
            if not indexer.tp_prefill_row_sharding_supported(
                config,
                parallel.decode_context_parallel_size,
                getattr(parallel, "prefill_context_parallel_size", 1) > 1,
                ranks,
            ):
                ranks = 1
        scratch(call["topk_indices_buffer"].device, self._bytes(call, ranks))
        if self._own is not None and self._own.take(call):
            self._own.warm_up(call)

    def _bytes(self, call: Call, ranks: int) -> int:
        """Bytes of scratch for any step that comes with these arguments."""
        width = self._form.width(call)
        need = exchange_bytes(call["topk_indices_buffer"], width, ranks)
        if self._own is not None and self._own.take(call):
            need = max(need, self._own.workspace_bytes(call, ranks))
        return need


def _tp_group() -> Any:
    """The engine's tensor-parallel group, never the world: that may span data and pipeline parallel replicas."""
    from vllm.distributed import get_tp_group

    return get_tp_group()


def _layer_name(name: Any) -> str:
    """vLLM passes a layer's name as text or, for torch.compile, wrapped."""
    return name if isinstance(name, str) else name.value
