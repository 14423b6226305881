"""What a rank does in the jobs other than "scenarios"; each returns what the tests look at."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import steps
import torch
import world


def needles(tp: int) -> dict[str, Any]:
    """Long contexts with the one key that every row must keep at their start."""
    found = {}
    for name, scenario in steps.NEEDLES.items():
        step = steps.build(scenario, tp)
        ids = steps.run(step)[: scenario.rows]
        found[name] = {
            "ids": ids,
            "oracle": steps.oracle(step),
            "needle": scenario.needle,
            "sizes": step.metadata.prefill.row_shard_sizes,
        }
    return found


def extras(tp: int) -> dict[str, Any]:
    """One after the other in one process, since starting it is what takes time."""
    return {
        "empty shards": _empty_shards(tp),
        "full graph": _full_graph(tp),
        "two forwards": _two_forwards(tp),
        "compiled": _compiled(tp),
        "profiling run": _profiling_run(tp),
        "request map": _request_map(),
        "plans": _plans(tp),
        "candidates": _candidates(tp),
        "a caller of the function": _caller(),
        "twice": _register_twice(),
    }


def _empty_shards(tp: int) -> dict[str, Any]:
    """A plan in which one rank owns nothing: it still gathers and exchanges."""
    results = {}
    for empty in range(tp):
        step = steps.build(steps.SCENARIOS["sub-chunks"], tp)
        sizes = [0] * tp
        sizes[1 - empty] = step.scenario.rows
        prefill = dataclasses.replace(step.metadata.prefill, row_shard_sizes=sizes)
        ids = steps.run(step, metadata=dataclasses.replace(step.metadata, prefill=prefill))
        results[f"rank {empty} is empty"] = (ids[: step.scenario.rows], steps.oracle(step))
    return results


def _full_graph(tp: int) -> torch.Tensor:
    """A full graph is being recorded or replayed: the original alone, and no collective."""
    import portable_indexer.sharding as sharding

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective in a full graph")

    kept, sharding.all_gatherv = sharding.all_gatherv, refuse
    try:
        return steps.run(steps.build(steps.SCENARIOS["exact"], tp), mode="FULL")
    finally:
        sharding.all_gatherv = kept


def _two_forwards(tp: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Different batches through one id buffer: nothing of the first is left in the second."""
    answers, buffer = [], None
    for name in ("one long prompt", "several prompts", "mixed"):
        step = steps.build(steps.SCENARIOS[name], tp)
        buffer = step.call["topk_indices_buffer"] if buffer is None else buffer
        step.call["topk_indices_buffer"] = buffer
        first = step.metadata.num_decode_tokens
        answers.append((steps.run(step)[first : step.scenario.rows], steps.oracle(step)[first:]))
    return answers


def _compiled(tp: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The op inside torch.compile, which sees its schema, its fake implementation and what it mutates."""
    step = steps.build(steps.SCENARIOS["several prompts"], tp)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, backend=backend)
    def layer(call: dict[str, Any]) -> torch.Tensor:
        ids = getattr(torch.ops.vllm, world.OP)(**call)
        return ids[:, :4] + 1

    with steps.forward(step.metadata):
        shifted = layer(step.call)
    rows = slice(step.metadata.num_decode_tokens, step.scenario.rows)
    buffer = step.call["topk_indices_buffer"]
    assert torch.equal(shifted, buffer[:, :4] + 1)
    return buffer[rows].clone(), steps.oracle(step)[rows], len(graphs)


def _profiling_run(tp: int) -> dict[str, Any]:
    """vLLM's profiling run reserves; the first real step then allocates no scratch."""
    import vllm.config

    from portable_indexer.vllm_plugin import scratch

    scratch._held.clear()
    step = steps.build(steps.SCENARIOS["a wider buffer"], tp)
    settings = world.config(tp, heads=4, topk=32, max_model_len=1024)
    kept = vllm.config.get_current_vllm_config_or_none
    vllm.config.get_current_vllm_config_or_none = lambda: settings
    try:
        with steps.forward(None):
            getattr(torch.ops.vllm, world.OP)(**step.call)
    finally:
        vllm.config.get_current_vllm_config_or_none = kept
    untouched = bool((step.call["topk_indices_buffer"] == 12345).all())
    reserved = {key: held.workspace for key, held in scratch._held.items()}
    ids = steps.run(step)
    rows = slice(step.metadata.num_decode_tokens, step.scenario.rows)
    same = reserved.keys() == scratch._held.keys() and all(
        scratch._held[key].workspace is held for key, held in reserved.items()
    )
    return {
        "bytes": [held.nbytes for held in reserved.values()],
        "kept": same,
        "untouched": untouched,
        "ids": ids[rows, :32],
        "behind": ids[rows, 32:],
        "oracle": steps.oracle(step)[rows],
    }


def _request_map() -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """The map as vLLM's metadata asks for it, against vLLM's kernel, over padded batches."""
    from vllm.v1.attention.ops import metadata

    replacement = metadata.compute_token_to_req_indices
    original = replacement.__portable_indexer_original__
    cases = {
        "plain": ([0, 3, 4, 9], 9, 9),
        "requests without rows": ([0, 0, 5, 5, 6, 6], 6, 6),
        "padded tokens, unmapped": ([0, 3, 4, 9], 9, 16),
        "padded tokens, mapped": ([0, 3, 4, 9], 16, 16),
        "padded requests": ([0, 2, 7, 7, 7, 7], 7, 12),
        "one request": ([0, 300], 300, 512),
        "nothing mapped": ([0, 0, 0], 0, 8),
    }
    answers = []
    for name, (starts, mapped, tokens) in cases.items():
        query_start_loc = torch.tensor(starts, dtype=torch.int32)
        found, wanted = (torch.full((tokens + 5,), -77, dtype=torch.int32) for _ in range(2))
        answer = replacement(query_start_loc, found, mapped, tokens)
        assert answer.data_ptr() == found.data_ptr() and answer.shape == (tokens,)
        original(query_start_loc, wanted, mapped, tokens)
        answers.append((name, found, wanted))
    step = steps.build(steps.SCENARIOS["mixed"], 1)
    through_metadata = step.common.token_to_req_indices(torch.full((512,), -77, dtype=torch.int32))
    lengths = torch.tensor([new for _, new in step.scenario.requests])
    answers.append(("CommonAttentionMetadata", through_metadata, torch.arange(4).repeat_interleave(lengths).int()))
    return answers


def _plans(tp: int) -> dict[str, Any]:
    """vLLM's builder with other settings: who shards, and who does not."""
    from vllm.config import CUDAGraphMode

    scenario = steps.SCENARIOS["several prompts"]
    common = steps.common_metadata(scenario)

    def sizes(change: Any = lambda settings: None, **attention: Any) -> list[int] | None:
        maker = steps.builder(scenario, tp, **attention)
        change(maker.vllm_config)
        common._token_to_req_indices_cache = None
        return maker.build(0, common).prefill.row_shard_sizes

    def full_graphs(settings: Any) -> None:
        settings.compilation_config.cudagraph_mode = CUDAGraphMode.FULL

    from vllm.v1.attention.backends.mla import indexer

    gate = indexer.tp_prefill_row_sharding_supported
    settings = world.config(tp, heads=4, topk=32, max_model_len=1024)
    return {
        "default": sizes(),
        "full graphs": sizes(full_graphs),
        "dcp": gate(settings, 2, False, tp),
        "pcp": gate(settings, 1, True, tp),
        "one rank": gate(settings, 1, False, 1),
    }


def _candidates(tp: int) -> bool:
    """Candidate blocks: the original gets the call as it came."""
    from portable_indexer.vllm_plugin.step import step_metadata

    step = steps.build(steps.SCENARIOS["mixed"], tp)
    with steps.forward(step.metadata) as context:
        with_candidates = step_metadata(context, steps.PREFIX, torch.zeros(107, 2))
        without = step_metadata(context, steps.PREFIX, None)
    return with_candidates is None and without is step.metadata


def _caller() -> bool | None:
    """DeepSeek-V4.1's layer on AMD imports the Python function; None where this vLLM has no such layer."""
    try:
        from vllm.models.deepseek_v41.amd.ops import sparse_indexer
    except ModuleNotFoundError:
        return None
    return hasattr(getattr(sparse_indexer, world.OP), "__portable_indexer_original__")


def _register_twice() -> dict[str, Any]:
    """A second call changes nothing, and neither does a process that forgot the first."""
    import vllm._aiter_ops as registrar

    import portable_indexer.vllm_plugin.registration as registration
    from portable_indexer.vllm_plugin import register, state

    before, function = state(), registrar.rocm_aiter_sparse_attn_indexer
    register()
    after = state()
    registration._registered = False
    register()
    forgotten = state()
    return {
        "before": before,
        "after": after,
        "forgotten": forgotten,
        "same": registrar.rocm_aiter_sparse_attn_indexer is function,
    }


def cuda_op(tp: int) -> dict[str, Any]:
    """The CUDA op with this package's kernels, its two cache operators in PyTorch (block-flat, as they are)."""
    if os.environ.get("PORTABLE_INDEXER_VLLM_KERNELS") != "ours":
        return {}
    library = torch.library.Library("_C_cache_ops", "FRAGMENT")
    library.define("cp_gather_indexer_k_quant_cache(Tensor c, Tensor(a!) k, Tensor(b!) s, Tensor t, Tensor l) -> ()")

    def gather(cache: Any, k: Any, scales: Any, table: Any, starts: Any) -> None:
        block = cache.shape[1]
        for request in range(len(starts) - 1):
            for entry in range(int(starts[request + 1] - starts[request])):
                page = cache[int(table[request, entry // block])].reshape(-1)
                at, to = entry % block, int(starts[request]) + entry
                k.view(torch.uint8)[to] = page[at * steps.DIM : (at + 1) * steps.DIM]
                scales[to] = page[block * steps.DIM + at * 4 :][:4]

    library.impl("cp_gather_indexer_k_quant_cache", gather, "CPU")
    results = {}
    for name in ("ratio 4, second layer", "exact, ratio 4", "ratio 4, block-flat"):
        step = steps.build(steps.SCENARIOS[name], tp)
        renamed = {"q_fp8": "q_quant"}
        call = {renamed.get(key, key): value for key, value in step.call.items() if key != "compress_ratio"}
        call |= {
            "q_scale": None,
            "use_pcp": False,
            "pcp_shard_decode_requests": False,
            "dense_mha_metadata_layer_name": steps.layer_name(""),
        }
        with steps.forward(step.metadata):
            torch.ops.vllm.sparse_attn_indexer(**call)
        results[name] = {
            "ids": call["topk_indices_buffer"][: step.scenario.rows].clone(),
            "oracle": steps.oracle(step),
            "sizes": step.metadata.prefill.row_shard_sizes,
        }
    return results


def groups(tp: int) -> dict[str, Any]:
    """Two replicas of two ranks, each with batches of its own: the exchange stays inside a replica."""
    replica = torch.distributed.get_rank() // tp
    names = [("one long prompt", "mixed"), ("several prompts", "sub-chunks")][replica]
    results = {}
    for name in names:
        step = steps.build(steps.SCENARIOS[name], tp)
        rows = slice(step.metadata.num_decode_tokens, step.scenario.rows)
        results[name] = (steps.run(step)[rows], steps.oracle(step)[rows])
    return results


def failing_rank(tp: int) -> dict[str, Any]:
    """Rank 1's scores fail, or its scratch: every rank learns of it, instead of waiting in the exchange."""
    import portable_indexer.api as api
    from portable_indexer.vllm_plugin import indexer_op

    def failing(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("this rank fails")

    errors = {}
    for module, name in ((api, "index_topk"), (indexer_op, "scratch")):
        step = steps.build(steps.SCENARIOS["one long prompt"], tp)
        kept = getattr(module, name)
        if torch.distributed.get_rank() == 1:
            setattr(module, name, failing)
        try:
            steps.run(step)
        except RuntimeError as error:
            errors[name] = f"{type(error).__name__}: {error}"
        setattr(module, name, kept)
    step = steps.build(steps.SCENARIOS["one long prompt"], tp)
    return {"errors": errors, "afterwards": (steps.run(step)[: step.scenario.rows], steps.oracle(step))}


def unlike(tp: int) -> dict[str, Any]:
    """Rank 1 has other kernels than rank 0: no plan, no exchange, and right answers all the same."""
    step = steps.build(steps.SCENARIOS["exact"], tp)
    rows = slice(step.metadata.num_decode_tokens, step.scenario.rows)
    ids = steps.run(step)[rows]
    return {"sizes": step.metadata.prefill.row_shard_sizes, "ids": ids, "oracle": steps.oracle(step)[rows]}


def user_rows(tp: int) -> dict[str, Any]:
    """``indexer_tp_shard_min_rows`` as the user set it, where this vLLM has it; environment: mode auto."""
    from vllm.config.attention import AttentionConfig

    if not hasattr(AttentionConfig(), "indexer_tp_shard_min_rows"):
        return {"skipped": "this vLLM has no indexer_tp_shard_min_rows"}
    least = int(os.environ["PORTABLE_INDEXER_TEST_MIN_ROWS"])
    scenario = steps.SCENARIOS["several prompts"]
    maker = steps.builder(scenario, tp, indexer_tp_shard_min_rows=least)
    return {"rows": scenario.rows, "sizes": maker.build(0, steps.common_metadata(scenario)).prefill.row_shard_sizes}


def kpool(tp: int) -> dict[str, Any]:
    """GLM's pooled op on AMD: sharded, against vLLM's own function on the same step, and against the oracle."""
    module = world.import_kpool_op()

    def select(backend: str) -> Any:
        def top_k(logits: Any, lens: Any, next_n: int, ids: Any, k: int, longest: int) -> None:
            torch.ops._C.top_k_per_row_decode(logits, next_n, lens, ids, len(logits), *logits.stride(), k)

        return top_k

    module.get_indexer_topk = select
    results = {}
    for name, scenario in steps.POOLED.items():
        answers = []
        replacement = module.sparse_attn_indexer_kpool
        for function in (getattr(replacement, "__portable_indexer_original__", replacement), replacement):
            step = steps.build(scenario, tp)
            call = _kpool_call(step)
            with steps.forward(step.metadata):
                function(**call)
            answers.append(call["topk_indices_buffer"])
        results[name] = {
            "stock": answers[0],
            "found": answers[1],
            "oracle": steps.oracle(step, pooled=True),
            "sizes": step.metadata.prefill.row_shard_sizes,
            "decode": step.metadata.num_decode_tokens,
            "rows": scenario.rows,
            "short": step.metadata.prefill.max_prefill_seq_len <= scenario.topk,
            "exact": scenario.exact,
        }
    return results


def _kpool_call(step: steps.Step) -> dict[str, Any]:
    scenario, given = step.scenario, step.call
    rows = scenario.rows + scenario.padded
    positions = torch.zeros(rows, dtype=torch.int64)
    row = 0
    for tokens, new in scenario.requests:
        positions[row : row + new] = torch.arange(tokens - new, tokens)
        row += new
    kept = (
        "hidden_states k_cache_prefix kv_cache weights quant_block_size scale_fmt topk_tokens head_dim total_seq_lens"
    )
    return {name: given[name] for name in kept.split()} | {
        "q_quant": given["q_fp8"],
        "q_scale": None,
        "k": torch.zeros(rows, steps.DIM),
        "max_pool_len": scenario.max_model_len // scenario.ratio,
        "topk_indices_buffer": torch.full((512, scenario.columns or 0), 12345, dtype=torch.int32),
        "skip_k_cache_insert": True,
        "gate_score": torch.zeros(rows, steps.DIM),
        "index_kpool": scenario.ratio,
        "positions": positions,
    }
