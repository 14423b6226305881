"""Real vLLM on a CPU, as far as its ROCm indexer op needs it. Imported by workers only, never by pytest itself.

What is not vLLM's own here: the registration of the op (vLLM registers it on ROCm builds only; same call), the
three operators of its compiled library that the op calls (``top_k_per_row_prefill`` and ``_decode``, in
PyTorch), and a repaired Triton interpreter.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

OP = "rocm_aiter_sparse_attn_indexer"
_libraries: list[torch.library.Library] = []


def repair() -> None:
    """The interpreter of Triton 3.9 refuses a scalar mask on a store; torch has no accelerator to empty."""
    from triton.runtime.interpreter import InterpreterBuilder, _interpreter

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return _interpreter.store(ptrs.data, value.data, mask.data.astype(bool))

    InterpreterBuilder.create_masked_store = create_masked_store
    torch.accelerator.empty_cache = lambda: None


def register_stock_op() -> None:
    """As ``vllm._aiter_ops`` does on ROCm."""
    import vllm._aiter_ops as registrar
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import direct_register_custom_op

    direct_register_custom_op(
        op_name=OP,
        op_func=registrar.rocm_aiter_sparse_attn_indexer,
        mutates_args=["topk_indices_buffer", "candidate_blocks"],
        fake_impl=registrar.rocm_aiter_sparse_attn_indexer_fake,
        dispatch_key=current_platform.dispatch_key,
    )


def define_selection() -> None:
    """The row selections of vLLM's compiled library: scores descending, ties to the smaller index, then -1."""
    library = torch.library.Library("_C", "FRAGMENT")
    library.define(
        "top_k_per_row_prefill(Tensor logits, Tensor starts, Tensor ends, Tensor(a!) ids, int rows, int stride0, "
        "int stride1, int k) -> ()"
    )
    library.define(
        "top_k_per_row_decode(Tensor logits, int next_n, Tensor lens, Tensor(a!) ids, int rows, int stride0, "
        "int stride1, int k) -> ()"
    )

    def select(row: torch.Tensor, k: int) -> torch.Tensor:
        # A stable sort of NaN as -inf: the order has one answer whatever the number of threads.
        order = torch.argsort(torch.nan_to_num(row, nan=-torch.inf), descending=True, stable=True)[:k]
        ids = torch.full((k,), -1, dtype=torch.int32)
        ids[: len(order)] = order.int()
        return ids

    def prefill(logits: Any, starts: Any, ends: Any, ids: Any, rows: int, s0: int, s1: int, k: int) -> None:
        for row in range(rows):
            ids[row, :k] = select(logits[row, int(starts[row]) : int(ends[row])], k)

    def decode(logits: Any, next_n: int, lens: Any, ids: Any, rows: int, s0: int, s1: int, k: int) -> None:
        flat = lens.reshape(-1)
        for row in range(rows):
            whole = flat.numel() == rows
            visible = int(flat[row]) if whole else int(flat[row // next_n]) - next_n + row % next_n + 1
            ids[row, :k] = select(logits[row, : max(visible, 0)], k)

    library.impl("top_k_per_row_prefill", prefill, "CPU")
    library.impl("top_k_per_row_decode", decode, "CPU")
    _libraries.append(library)


def join(rank: int, ranks: int, port: int, tp: int) -> None:
    """vLLM's own process groups, over gloo."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo")
        initialize_model_parallel(tp)


def start(rank: int, ranks: int, port: int, tp: int) -> None:
    """All of the above, then vLLM's plugin loader, which finds this package through its entry point."""
    repair()
    import vllm.model_executor.layers.sparse_attn_indexer
    import vllm.v1.attention.ops.rocm_aiter_mla_sparse  # noqa: F401
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    from vllm.v1.worker.workspace import init_workspace_manager

    type(current_platform).num_compute_units = classmethod(lambda cls, device_id=0: 4)
    define_selection()
    register_stock_op()
    join(rank, ranks, port, tp)
    init_workspace_manager(torch.device("cpu"))
    load_general_plugins()


def import_kpool_op() -> Any:
    """GLM's pooled op without the rest of its model package, which needs packages that a CPU test does not."""
    import importlib
    import sys
    from pathlib import Path
    from types import ModuleType

    import vllm.models

    folder = Path(next(iter(vllm.models.__path__))) / "glm5next"
    for name, path in (("", folder), (".amd", folder / "amd"), (".common", folder / "common")):
        package = ModuleType(f"vllm.models.glm5next{name}")
        package.__path__ = [str(path)]
        sys.modules[package.__name__] = package
    return importlib.import_module("vllm.models.glm5next.amd.sparse_indexer")


def config(tp: int, *, heads: int, topk: int, max_model_len: int, drafts: int = 0, **attention: Any) -> Any:
    """What the metadata builder reads of a VllmConfig, made of vLLM's own parts where they stand alone."""
    from vllm.config import CUDAGraphMode
    from vllm.config.attention import AttentionConfig

    model = SimpleNamespace(index_n_heads=heads, index_head_dim=128, index_topk=topk, model_type="deepseek_v32")
    speculation = SimpleNamespace(num_speculative_tokens=drafts, enable_adaptive_verification=False)
    attention_config = AttentionConfig(**attention)
    attention_config.sparse_mla_prefill_workspace_factor = 1
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=512, max_num_seqs=16),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
        ),
        model_config=SimpleNamespace(
            max_model_len=max_model_len, architectures=["DeepseekV32ForCausalLM"], hf_text_config=model, hf_config=model
        ),
        attention_config=attention_config,
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE),
        speculative_config=speculation if drafts else None,
        num_speculative_tokens=drafts,
    )
