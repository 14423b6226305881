"""Steps of an indexer layer: requests, caches as vLLM lays them out, metadata by vLLM's builder, and the op's call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import world

DIM = 128
PREFIX = "model.layers.0.indexer.k_cache"


@dataclass(frozen=True)
class Scenario:
    """One step. Requests are (tokens after the step, rows in the step), decode requests first.

    block: stored entries of a cache block; ratio: tokens of an entry; shuffled: the cache's layout, None as the
    ROCm op has it for the block and ratio; padded: rows behind the real ones;
    counted: whether the metadata counts those rows as tokens; exact: products exact in bfloat16 and scores
    apart; columns: width of the id buffer; rows_a_chunk: splits requests into sub-chunks.
    """

    requests: tuple[tuple[int, int], ...]
    block: int = 16
    ratio: int = 1
    heads: int = 4
    topk: int = 32
    drafts: int = 0
    padded: int = 0
    counted: bool = False
    exact: bool = False
    columns: int | None = None
    rows_a_chunk: int | None = None
    layers: int = 1
    shuffled: bool | None = None
    needle: int | None = None
    max_model_len: int = 1024
    seed: int = 0

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.requests)


@dataclass
class Step:
    """The tensors of one step, and the keys of each request as the oracle knows them."""

    scenario: Scenario
    call: dict[str, Any]
    metadata: Any
    common: Any
    keys: list[torch.Tensor] = field(default_factory=list)  # fp8 [entries, DIM] of each request
    scales: list[torch.Tensor] = field(default_factory=list)  # float32 [entries]


def _entries(scenario: Scenario, generator: torch.Generator) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys that the writer's quantisation represents exactly, as (bfloat16 values, float32 scales) per request."""
    values, scales = [], []
    for request, (tokens, _) in enumerate(scenario.requests):
        count = tokens // scenario.ratio
        if scenario.exact:
            # Distinct codes in eight binary digits; a query's powers of two make a score of at most 255.
            codes = torch.randperm(256, generator=generator)[:count]
            k = torch.zeros(count, DIM)
            k[:, :8] = ((codes[:, None] >> torch.arange(8)) & 1).float()
            k[:, 8] = 1.0  # no row is all zeros, so that all have one scale
        else:
            # The last value has the largest magnitude of its row, so the row's scale is known.
            k = torch.randint(8, 16, (count, DIM), generator=generator).float()
            k *= torch.exp2(torch.randint(0, 3, (count, DIM), generator=generator).float())
            k *= torch.randint(0, 2, (count, DIM), generator=generator) * 2.0 - 1.0
            k[:, -1] = 60.0
            k *= torch.exp2(torch.randint(-3, 4, (count, 1), generator=generator).float())
        if scenario.needle is not None and request == len(scenario.requests) - 1:
            k[scenario.needle] = 448.0
        values.append(k.bfloat16())
        largest = k.abs().amax(1).clamp_min(1e-4)
        scales.append(torch.exp2(torch.ceil(torch.log2(largest / 448.0))))
    return values, scales


def _write(cache: torch.Tensor, slot: int, value: torch.Tensor, scale: torch.Tensor, shuffled: bool) -> None:
    """One entry by the layout's definition: a block holds all values, then all scales; a shuffled block orders its
    values by groups of 16 entries, then by 16 bytes of the head dimension, then by entry."""
    block, offset = divmod(slot, cache.shape[1])
    flat = cache[block].reshape(-1)
    payload = value.view(torch.uint8)
    if shuffled:
        for part in range(DIM // 16):
            first = (offset // 16) * 16 * DIM + part * 256 + (offset % 16) * 16
            flat[first : first + 16] = payload[part * 16 : (part + 1) * 16]
    else:
        flat[offset * DIM : (offset + 1) * DIM] = payload
    first = cache.shape[1] * DIM + offset * 4
    flat[first : first + 4] = scale.view(1).view(torch.uint8)
    cache[block] = flat.view(cache[block].shape)


def build(scenario: Scenario, tp: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Step:
    """The step, the same on every rank."""
    generator = torch.Generator().manual_seed(scenario.seed)
    values, scales = _entries(scenario, generator)
    keys = [(v.float() / s[:, None]).to(dtype) for v, s in zip(values, scales, strict=True)]
    rows, total = scenario.rows, scenario.rows + scenario.padded
    blocks_each = max(-(-len(k) // scenario.block) for k in keys) + 1
    blocks = blocks_each * len(keys) + 1
    table = torch.randperm(blocks - 1, generator=generator)[: blocks_each * len(keys)].int() + 1
    table = table.view(len(keys), blocks_each)
    # One allocation for all layers, as vLLM packs them: this layer's view has an offset and a large block stride.
    packed = torch.randint(
        0, 256, (blocks, scenario.layers, scenario.block, DIM + 4), dtype=torch.uint8, generator=generator
    )
    cache = packed[:, scenario.layers - 1]
    shuffled = scenario.shuffled
    if shuffled is None:
        shuffled = scenario.block > 1 and scenario.ratio != 4
    inserts = scenario.ratio == 1
    slots = torch.full((total,), -1, dtype=torch.int64)
    k_step = torch.zeros(total, DIM, dtype=torch.bfloat16)
    row = 0
    for request, (tokens, new) in enumerate(scenario.requests):
        for entry in range(len(keys[request])):
            slot = int(table[request, entry // scenario.block]) * scenario.block + entry % scenario.block
            if inserts and entry >= tokens - new:
                slots[row + entry - (tokens - new)] = slot
                k_step[row + entry - (tokens - new)] = values[request][entry]
            else:
                _write(cache, slot, keys[request][entry], scales[request][entry], shuffled)
        row += new
    q, weights = _queries(scenario, total, generator, dtype)
    common = _common(scenario, table, slots if scenario.counted else slots[:rows])
    metadata = _metadata(scenario, tp, common)
    columns = scenario.columns or scenario.topk
    call = {
        "hidden_states": torch.zeros(total, 8, dtype=torch.bfloat16),
        "k_cache_prefix": layer_name(PREFIX),
        "kv_cache": cache,
        "q_fp8": q,
        "k": k_step if inserts else None,
        "weights": weights,
        "quant_block_size": DIM,
        "scale_fmt": "ue8m0",
        "topk_tokens": scenario.topk,
        "head_dim": DIM,
        "max_model_len": scenario.max_model_len,
        "total_seq_lens": max(1, sum(len(k) for k in keys)),
        "topk_indices_buffer": torch.full((512, columns), 12345, dtype=torch.int32),
        "skip_k_cache_insert": not inserts,
        "compress_ratio": scenario.ratio,
    }
    return Step(scenario, call, metadata, common, keys, scales)


def _queries(
    scenario: Scenario, total: int, generator: torch.Generator, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    if scenario.exact:
        q = torch.zeros(total, scenario.heads, DIM)
        for row in range(total):
            q[row, 0, :8] = torch.exp2(torch.randperm(8, generator=generator).float())
        weights = torch.zeros(total, scenario.heads)
        weights[:, 0] = 1.0
        return q.to(dtype), weights
    q = torch.randn(total, scenario.heads, DIM, generator=generator)
    weights = torch.randn(total, scenario.heads, generator=generator)
    if scenario.needle is not None:
        q, weights = q.abs(), weights.abs()
    return q.to(dtype), weights


def _common(scenario: Scenario, table: torch.Tensor, slots: torch.Tensor) -> Any:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    lens = [0]
    for _, new in scenario.requests:
        lens.append(lens[-1] + new)
    starts = torch.tensor(lens, dtype=torch.int32)
    seq_lens = torch.tensor([tokens for tokens, _ in scenario.requests], dtype=torch.int32)
    tokens = scenario.rows + (scenario.padded if scenario.counted else 0)
    token_slots = slots
    if scenario.ratio > 1:
        token_slots = torch.full_like(slots, -1)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=seq_lens,
        num_reqs=len(scenario.requests),
        num_actual_tokens=tokens,
        max_query_len=max(new for _, new in scenario.requests),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=table,
        slot_mapping=token_slots,
        seq_lens_cpu_upper_bound=seq_lens.clone(),
    )


def common_metadata(scenario: Scenario) -> Any:
    """The step's common metadata without a cache behind it."""
    table = torch.zeros((len(scenario.requests), 64), dtype=torch.int32)
    return _common(scenario, table, torch.zeros(scenario.rows, dtype=torch.int64))


def builder(scenario: Scenario, tp: int, **attention: Any) -> Any:
    """vLLM's metadata builder."""
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    spec = MLAAttentionSpec(
        block_size=scenario.block * scenario.ratio,
        num_kv_heads=1,
        head_size=DIM + 4,
        dtype=torch.uint8,
        tokens_per_state=scenario.ratio,
    )
    settings = world.config(
        tp,
        heads=scenario.heads,
        topk=scenario.topk,
        max_model_len=scenario.max_model_len,
        drafts=scenario.drafts,
        **attention,
    )
    return DeepseekV32IndexerMetadataBuilder(
        spec, [PREFIX], settings, torch.device("cpu"), block_table_width=scenario.max_model_len
    )


def _metadata(scenario: Scenario, tp: int, common: Any) -> Any:
    maker = builder(scenario, tp)
    if scenario.rows_a_chunk is not None:
        split = type(maker)._split_indexer_prefill_chunks

        def small(lens: torch.Tensor, query_lens: torch.Tensor, workspace: int, budget: int, **more: int) -> Any:
            return split(lens, query_lens, workspace, 4 * int(lens.max()) * scenario.rows_a_chunk, **more)

        maker._split_indexer_prefill_chunks = small
    return maker.build(0, common)


def layer_name(name: str) -> Any:
    from vllm.utils.torch_utils import _encode_layer_name

    return _encode_layer_name(name)


@contextlib.contextmanager
def forward(metadata: Any, mode: str = "NONE") -> Iterator[Any]:
    """A forward context with this layer's metadata (None: a profiling run), shared by two layers."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import ForwardContext, override_forward_context

    layers = None if metadata is None else {PREFIX: metadata, "another layer": metadata}
    context = ForwardContext(
        no_compile_layers={}, attn_metadata=layers, slot_mapping={}, cudagraph_runtime_mode=CUDAGraphMode[mode]
    )
    with override_forward_context(context):
        yield context


def run(step: Step, mode: str = "NONE", metadata: Any = ...) -> torch.Tensor:
    """The op through the dispatcher; returns a copy of the whole id buffer."""
    with forward(step.metadata if metadata is ... else metadata, mode):
        getattr(torch.ops.vllm, world.OP)(**step.call)
    return step.call["topk_indices_buffer"].clone()


def oracle(step: Step, pooled: bool = False) -> torch.Tensor:
    """Ids of the prefill rows, [rows, topk], from the keys that were meant to be in the cache; -1 elsewhere.

    Pooled: ids are of tokens, those of the chosen pools and of the tail, [rows, topk + pool - 1].
    """
    from portable_indexer import index_topk, pool_topk

    scenario, meta = step.scenario, step.metadata
    width = scenario.topk + (scenario.ratio - 1 if pooled else 0)
    ids = torch.full((scenario.rows, width), -1, dtype=torch.int32)
    row = 0
    for request, (tokens, new) in enumerate(scenario.requests):
        if request >= meta.num_decodes and new and len(step.keys[request]):
            ends = torch.arange(tokens - new + 1, tokens + 1, dtype=torch.int32)
            ke = ends // scenario.ratio
            own = slice(row, row + new)
            kv = (step.keys[request], step.scales[request])
            asked = (step.call["q_fp8"][own], kv, step.call["weights"][own], torch.zeros_like(ke), ke, scenario.topk)
            if pooled:
                ids[own] = pool_topk(*asked, pool=scenario.ratio, positions=ends - 1, backend="reference")
            else:
                ids[own] = index_topk(*asked, backend="reference")
        row += new
    return ids


SCENARIOS = {
    "one long prompt": Scenario(((200, 120),), seed=1),
    "several prompts": Scenario(((60, 60), (130, 40), (33, 33)), seed=2),
    "mixed": Scenario(((50, 1), (70, 1), (90, 90), (40, 17)), seed=3),
    "padded rows": Scenario(((60, 1), (80, 50)), padded=9, seed=4),
    "padded rows that are counted": Scenario(((60, 1), (80, 50)), padded=9, counted=True, seed=5),  # P01
    "sub-chunks": Scenario(((150, 100), (40, 40)), rows_a_chunk=16, seed=6),  # P03
    "verify rows": Scenario(((40, 2), (60, 2), (80, 50)), drafts=1, seed=7),  # P14
    "zero-length requests": Scenario(((40, 2), (60, 0), (70, 2), (50, 30), (44, 44)), drafts=1, seed=8),
    "a prompt without rows": Scenario(((50, 30), (64, 0), (44, 44)), seed=9),
    "fewer rows than ranks": Scenario(((90, 2), (5, 1))[:1], topk=8, seed=10),
    "decode only": Scenario(((50, 1), (70, 1)), seed=11),
    "block size 1": Scenario(((70, 40), (30, 30)), block=1, seed=12),
    "blocks of 64, second layer": Scenario(((100, 1), (150, 60)), block=64, layers=2, seed=13),  # S13
    "ratio 4, block-flat": Scenario(((400, 4), (800, 60), (130, 70)), ratio=4, block=64, seed=14, drafts=0),
    "ratio 4, second layer": Scenario(((600, 90),), ratio=4, block=16, layers=2, seed=15),
    "a wider buffer": Scenario(((60, 1), (100, 70)), columns=48, seed=16),
    "zero-length requests, exact": Scenario(
        ((40, 2), (60, 0), (70, 2), (50, 30), (44, 44)), drafts=1, exact=True, seed=19
    ),
    "exact": Scenario(((40, 1), (200, 90), (60, 60)), exact=True, seed=17),
    "exact, ratio 4": Scenario(((900, 90), (200, 70)), exact=True, ratio=4, block=64, seed=18),
}
# S10: the context is longer than the top-k, and the needle stands at its start.
NEEDLES = {
    f"needle, {layout}, blocks of {block}": Scenario(
        ((4608 * ratio, 6),), ratio=ratio, block=block, topk=512, heads=2, needle=3, max_model_len=20480, seed=20
    )
    for layout, ratio in (("shuffled", 1), ("block-flat", 4))
    for block in (64, 256)
}
# Pools of four tokens in a shuffled cache; the ids are tokens, and up to three more than the top-k.
POOLED = {
    "prompts": Scenario(((300, 200), (90, 90)), ratio=4, shuffled=True, columns=40, seed=30),
    "mixed": Scenario(((120, 1), (61, 1), (300, 90), (77, 50)), ratio=4, shuffled=True, columns=35, seed=31),
    "short prompts": Scenario(((30, 20), (32, 32)), ratio=4, shuffled=True, columns=35, seed=32),
    "one short among long ones": Scenario(((20, 20), (200, 60)), ratio=4, shuffled=True, columns=35, padded=5, seed=33),
    "sub-chunks": Scenario(((400, 120), (64, 64)), ratio=4, shuffled=True, columns=36, rows_a_chunk=16, seed=34),
    "exact": Scenario(((130, 1), (900, 90), (200, 70)), ratio=4, shuffled=True, columns=35, exact=True, seed=35),
}
