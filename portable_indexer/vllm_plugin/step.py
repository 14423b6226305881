"""One call of a vLLM indexer op: what of it is split off, and the calls that the original then gets.

The original op clears its rows of the id buffer, inserts keys, scores and selects prefill rows, then decode
rows. It is called again with other metadata, never changed: without prefill it does all but the prefill rows;
with chunks narrowed to this rank's rows it does this rank's part of them. Metadata objects are shared by layers,
so every call gets copies.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from portable_indexer.sharding import PrefillRowShard
from portable_indexer.vllm_plugin.hooks import capturing

METADATA_FIELDS = (
    "slot_mapping",
    "num_decodes",
    "num_decode_tokens",
    "num_prefills",
    "num_prefill_tokens",
    "decode",
    "prefill",
)
CHUNK_FIELDS = (
    "token_start",
    "token_end",
    "cu_seqlen_ks",
    "cu_seqlen_ke",
    "total_seq_lens",
    "skip_kv_gather",
    "local_total_seq_lens",
    "pcp_deinterleave_idx",
)
PREFILL_FIELDS = ("chunks", "row_shard_sizes")


def step_metadata(context: Any, prefix: str, candidates: Any) -> Any | None:
    """The layer's metadata if its prefill rows may be split off, else None.

    Everything looked at is host data that all ranks of a TP group share.
    """
    if candidates is not None or capturing():
        return None
    # A full graph replays this very launch sequence for other steps, and no collective belongs in one.
    if getattr(getattr(context, "cudagraph_runtime_mode", None), "name", "FULL") == "FULL":
        return None
    metadata = context.attn_metadata.get(prefix)
    if not all(hasattr(metadata, name) for name in METADATA_FIELDS):
        return None
    if metadata.num_prefills <= 0 or metadata.prefill is None:
        return None
    for chunk in metadata.prefill.chunks:
        # Context parallelism: this rank's keys are not all keys.
        if chunk.pcp_deinterleave_idx is not None or chunk.local_total_seq_lens != chunk.total_seq_lens:
            return None
    return metadata


def shard_of(metadata: Any, tp: Any, rows: int) -> PrefillRowShard | None:
    """This rank's rows as the builder planned them, or None for a replicated step."""
    sizes = metadata.prefill.row_shard_sizes
    if sizes is None or len(sizes) < 2 or len(sizes) != tp.world_size:
        return None
    if metadata.num_decode_tokens + sum(sizes) > rows or sum(sizes) > metadata.num_prefill_tokens:
        return None
    return PrefillRowShard(metadata.num_decode_tokens, tuple(sizes), tp.rank_in_group)


def narrowed_chunks(chunks: list[Any], shard: PrefillRowShard, offset: int) -> list[Any]:
    """Copies of the chunks that hold rows of this shard, cut to them; rows are counted from ``offset``.

    A chunk that reuses gathered keys follows the one that gathers them. Where that one is left out here, the
    first that stays gathers in its place.
    """
    kept, gathered = [], False
    for chunk in chunks:
        gathered = gathered and chunk.skip_kv_gather
        part = shard.narrow(chunk)
        if part is None:
            continue
        start, end, ks, ke = part
        kept.append(
            dataclasses.replace(
                chunk,
                token_start=start - offset,
                token_end=end - offset,
                cu_seqlen_ks=ks,
                cu_seqlen_ke=ke,
                skip_kv_gather=gathered,
            )
        )
        gathered = True
    return kept


def without_prefill(metadata: Any) -> Any:
    """The metadata of the same step without its prefill rows; slots stay, so that all keys are inserted."""
    return dataclasses.replace(metadata, num_prefills=0, num_prefill_tokens=0, prefill=None)


def only_shard(metadata: Any, shard: PrefillRowShard) -> Any:
    """The metadata of the same step with only this shard's rows of its prefill rows; for steps without decode."""
    return dataclasses.replace(metadata, prefill=_narrowed(metadata.prefill, shard, 0))


def only_shard_behind_decode(metadata: Any, shard: PrefillRowShard) -> Any:
    """The metadata of a step that begins behind the decode rows and has only this shard's prefill rows."""
    offset = metadata.num_decode_tokens
    return dataclasses.replace(
        metadata,
        num_decodes=0,
        num_decode_tokens=0,
        decode=None,
        prefill=_narrowed(metadata.prefill, shard, offset),
        slot_mapping=metadata.slot_mapping[offset:],
    )


def _narrowed(prefill: Any, shard: PrefillRowShard, offset: int) -> Any:
    return dataclasses.replace(prefill, chunks=narrowed_chunks(prefill.chunks, shard, offset), row_shard_sizes=None)


def with_metadata(context: Any, prefix: str, metadata: Any) -> Any:
    """A copy of a forward context in which one layer has other metadata."""
    changed = copy.copy(context)
    changed.attn_metadata = {**context.attn_metadata, prefix: metadata}
    return changed


def without_rows(call: Mapping[str, Any], row_arguments: tuple[str, ...], count: int) -> dict[str, Any]:
    """The call's arguments with the first ``count`` rows of each row argument left out, as views."""
    rest = dict(call)
    for name in row_arguments:
        if rest.get(name) is not None:
            rest[name] = rest[name][count:]
    return rest
