"""Other kernels that score the same problem, where they are installed or lie in PORTABLE_INDEXER_PEERS."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Operands = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]
Peer = Callable[[Operands, torch.Tensor], torch.Tensor]
AITER_MODULE = "aiter.ops.triton._triton_kernels.attention.fp8_mqa_logits"


def _from_folder(name: str, path: Path) -> Any:
    """Import a module or package from a path, under its own name."""
    inner = path / "__init__.py" if path.is_dir() else path
    spec = importlib.util.spec_from_file_location(
        name, inner, submodule_search_locations=[str(path)] if path.is_dir() else None
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _find(name: str, file: str) -> Any:
    """A module that can be imported, or else the file or folder of this name among the peers."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        folder = os.environ.get("PORTABLE_INDEXER_PEERS", "").strip()
        if not folder:
            raise ImportError(f"{name} is not installed and PORTABLE_INDEXER_PEERS is not set") from error
        for path in (Path(folder) / file, Path(folder) / "vllm" / "third_party" / file):
            if path.exists():
                return _from_folder(name.rpartition(".")[2], path)
        raise ImportError(f"{name} is not installed and {folder} has no {file}") from error


def deep_gemm() -> Peer:
    """DeepGEMM as vLLM vendors it: its logits are compressed, row m starting at ks[m]."""
    module = _find("deep_gemm", "deep_gemm")

    def call(operands: Operands, out: torch.Tensor) -> torch.Tensor:
        q, (k, k_scale), weights, ks, ke = operands
        logits: torch.Tensor = module.fp8_fp4_mqa_logits((q, None), (k, k_scale), weights, ks, ke, k.shape[0])
        return logits

    return call


def aiter() -> Peer:
    """aiter's Triton kernel, one program a row, logits in absolute columns."""
    kernel = _find(AITER_MODULE, "fp8_mqa_logits.py")._fp8_mqa_logits_kernel
    amd = {"waves_per_eu": 2, "matrix_instr_nonkdim": 16} if torch.version.hip else {}

    def call(operands: Operands, out: torch.Tensor) -> torch.Tensor:
        q, (k, k_scale), weights, ks, ke = operands
        rows, heads, dim = q.shape
        kernel[(rows,)](
            q,
            k,
            k_scale,
            weights,
            ks,
            ke,
            out,
            rows,
            k.shape[0],
            NUM_HEADS=heads,
            HEAD_SIZE=dim,
            stride_q_s=q.stride(0),
            stride_q_h=q.stride(1),
            stride_q_d=1,
            stride_kv_s=k.stride(0),
            stride_kv_d=1,
            stride_w_s=weights.stride(0),
            stride_w_h=1,
            stride_logits_s=out.stride(0),
            stride_logits_k=1,
            BLOCK_KV=128,
            num_warps=4,
            num_stages=2,
            **amd,
        )
        return out

    return call


PEERS: dict[str, Callable[[], Peer]] = {"deep_gemm": deep_gemm, "aiter": aiter}


def found() -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers that can be called here, and why the others cannot."""
    calls: dict[str, Peer] = {}
    missing: dict[str, str] = {}
    for name, load in PEERS.items():
        try:
            calls[name] = load()
        except Exception as error:  # a peer that fails to load is reported, whatever it raises
            missing[name] = f"{type(error).__name__}: {error}"
    return calls, missing
