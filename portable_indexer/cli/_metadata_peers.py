"""What the metadata bench compares with: ways that others build the same tensors, and the bare fill."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VLLM_FILE = Path("vllm/v1/attention/ops/metadata.py")


def host_map(query_start_loc_cpu: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The map made by numpy on the host and sent from pinned memory; what lies behind it is cleared.

    Pinned anew each time, out of torch's cache of pinned memory: a kept buffer would have to be waited for.
    """
    import numpy as np

    lens = np.diff(query_start_loc_cpu.numpy())
    mapped = np.repeat(np.arange(len(lens), dtype=np.int32), lens)
    out.zero_()
    out[: len(mapped)].copy_(torch.from_numpy(mapped).pin_memory(), non_blocking=True)
    return out


def repeat_map(query_start_loc: torch.Tensor, tokens: int) -> torch.Tensor:
    """The map by ``torch.repeat_interleave``, told its size so that it need not synchronise."""
    reqs = torch.arange(query_start_loc.shape[0] - 1, dtype=torch.int32, device=query_start_loc.device)
    return torch.repeat_interleave(reqs, query_start_loc.diff(), output_size=tokens)


def torch_step(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_decodes: int,
    tokens: int,
    groups: list[Any],
) -> list[torch.Tensor]:
    """A step's metadata by a chain of PyTorch operations, none of which synchronises; compress ratio 1."""
    request = repeat_map(query_start_loc, tokens)
    lens = query_start_loc.diff()
    position = torch.arange(tokens, dtype=torch.int32, device=request.device) - query_start_loc[request]
    row_keys = (seq_lens[request] - lens[request] + 1 + position).clamp_(min=0)
    made = [request, row_keys, torch.arange(tokens + 1, dtype=torch.int32, device=request.device)]
    for group in groups:
        own = slice(group.request_start, group.request_end)
        rows = slice(group.token_start, group.token_end)
        keys = seq_lens[own]
        starts = torch.zeros(keys.shape[0] + 1, dtype=torch.int32, device=request.device)
        torch.cumsum(keys, 0, out=starts[1:])
        reqs = torch.arange(group.request_start, group.request_end, dtype=torch.int32, device=request.device)
        key_to_req = torch.repeat_interleave(reqs, keys, output_size=group.total_keys)
        ks = starts[request[rows] - group.request_start]
        made += [starts, key_to_req, ks, ks + row_keys[rows]]
    return made


def vllm_map(folder: str | None) -> Callable[..., Any] | str:
    """vLLM's launcher of the map, from an installed vLLM or the folder named; the reason where there is none."""
    name = "vllm.v1.attention.ops.metadata"
    try:
        found = importlib.util.find_spec("vllm")
        if found is not None and found.origin is not None:
            installed: Callable[..., Any] = importlib.import_module(name).compute_token_to_req_indices
            return installed
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"vllm is installed but not importable: {error}"
    folder = folder or os.environ.get("PORTABLE_INDEXER_PEERS")
    path = None if folder is None else Path(folder) / VLLM_FILE
    if path is None or not path.is_file():
        return f"vllm is not installed, and PORTABLE_INDEXER_PEERS names no folder with {VLLM_FILE}"
    import triton
    import triton.language as tl

    # The file takes Triton from vLLM; for its import alone, this stands in.
    stand_in = types.ModuleType("vllm.triton_utils")
    stand_in.triton, stand_in.tl = triton, tl  # type: ignore[attr-defined]
    spec = importlib.util.spec_from_file_location("portable_indexer_peer_vllm_metadata", path)
    if spec is None or spec.loader is None:
        return f"{path} cannot be imported"
    module = importlib.util.module_from_spec(spec)
    sys.modules["vllm.triton_utils"] = stand_in
    try:
        spec.loader.exec_module(module)
        loaded: Callable[..., Any] = module.compute_token_to_req_indices
        return loaded
    except (ImportError, AttributeError) as error:
        return f"{path} cannot be imported: {error}"
    finally:
        del sys.modules["vllm.triton_utils"]
