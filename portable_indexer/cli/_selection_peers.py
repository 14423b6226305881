"""vLLM's CUDA top-k, where vLLM is installed or its library lies in PORTABLE_INDEXER_PEERS."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import torch

LIBRARY = "_C_stable_libtorch.abi3.so"
# (logits, ks, ke, k, ids): writes k ids of each row, in any order
TopK = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor], None]


def _library() -> Path:
    spec = importlib.util.find_spec("vllm")
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    peers = os.environ.get("PORTABLE_INDEXER_PEERS", "").strip()
    if peers:
        folders += [Path(peers), Path(peers) / "vllm"]
    for folder in folders:
        if (folder / LIBRARY).exists():
            return folder / LIBRARY
    raise ImportError(f"{LIBRARY} is neither in an installed vllm nor in PORTABLE_INDEXER_PEERS")


def vllm_topk() -> TopK:
    """``top_k_per_row_prefill`` of vLLM 0.33; ImportError or OSError where it cannot be loaded."""
    if torch.version.cuda is None:
        raise ImportError("vLLM's top-k is a CUDA kernel")
    torch.ops.load_library(str(_library()))
    operation = torch.ops._C.top_k_per_row_prefill

    def call(logits: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor, topk: int, ids: torch.Tensor) -> None:
        operation(logits, ks, ke, ids, logits.shape[0], logits.stride(0), logits.stride(1), topk)

    return call
