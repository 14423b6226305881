"""A step's metadata in plain PyTorch, one line for each rule: the oracle of the kernels."""

from __future__ import annotations

import torch

from portable_indexer.step_metadata import NO_REQUEST, MetadataBuffers, StepLayout


def token_to_req_indices(query_start_loc: torch.Tensor, out: torch.Tensor, pad_value: int) -> None:
    """Write the request of each token into out [T] int32, and pad_value behind the last request's end.

    A token's request is the first whose end lies beyond it, so requests without tokens are passed over.
    Reads only the device's boundaries, and never back to the host.
    """
    tokens = torch.arange(out.shape[0], dtype=torch.int32, device=out.device)
    request = torch.searchsorted(query_start_loc[1:], tokens, right=True, out_int32=True)
    out.copy_(torch.where(tokens < query_start_loc[-1], request, pad_value))


def build_metadata(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    layout: StepLayout,
    buffers: MetadataBuffers,
    group_table: torch.Tensor | None = None,
) -> None:
    """Fill every buffer of a step. Lengths and boundaries are the device's; only the grouping is the host's.

    ``group_table`` is the grouping as the kernels read it on the device; not needed here.
    """
    ratio = layout.compress_ratio
    token_to_req_indices(query_start_loc, buffers.token_to_req, 0)
    for rows in (buffers.row_keys, buffers.cu_seqlen_ks, buffers.cu_seqlen_ke):
        rows.zero_()
    if layout.num_reqs == 0:
        return

    tokens = buffers.arange[:-1]
    request = buffers.token_to_req.long()
    real = tokens < query_start_loc[-1]
    starts, ends = query_start_loc[:-1][request], query_start_loc[1:][request]
    lens = seq_lens.clamp(min=0)
    # In tokens: the row's own position and all before it.
    visible = lens[request] - (ends - starts) + 1 + (tokens - starts)
    row_keys = torch.where(real, visible.clamp(min=0) // ratio, 0)
    keys = lens // ratio

    for number, group in enumerate(layout.groups):
        own = slice(group.request_start, group.request_end)
        ends_of_keys = keys[own].cumsum(0).clamp(max=group.total_keys).to(torch.int32)
        key_starts = torch.cat([torch.zeros_like(ends_of_keys[:1]), ends_of_keys])
        buffers.key_starts[group.request_start + number : group.request_end + number + 1] = key_starts

        packed = torch.arange(group.total_keys, dtype=torch.int32, device=keys.device)
        key_req = torch.searchsorted(ends_of_keys, packed, right=True, out_int32=True) + group.request_start
        part = buffers.key_to_req[group.key_base : group.key_base + group.total_keys]
        part.copy_(torch.where(packed < ends_of_keys[-1], key_req, NO_REQUEST))

        inside = real & (request >= group.request_start) & (request < group.request_end)
        local = (request - group.request_start).clamp(0, ends_of_keys.shape[0] - 1)
        first = key_starts[local]
        row_keys = torch.where(inside, torch.minimum(row_keys, key_starts[local + 1] - first), row_keys)
        buffers.cu_seqlen_ks.copy_(torch.where(inside, first, buffers.cu_seqlen_ks))
        buffers.cu_seqlen_ke.copy_(torch.where(inside, first + row_keys, buffers.cu_seqlen_ke))
    buffers.row_keys.copy_(row_keys)
