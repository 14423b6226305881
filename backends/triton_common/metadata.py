"""Kernels for the token-to-request map and for a step's whole metadata, one launch each.

A program takes one request, or every n-th tile of a long one, and writes what lies within the request's own
boundaries: a request is found by its number, never searched for. Some further programs fill the padding.
No argument is specialised, so each kernel has one variant.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from portable_indexer.backends.triton_common.kept import KeptKernel
from portable_indexer.step_metadata import INLINE_GROUPS, NO_GROUPS, MetadataBuffers, StepLayout

MAP_TILE = 1024
MAP_WARPS = 4
STEP_TILE = 256
STEP_WARPS = 1
LANES = 128  # lengths summed at once
MAX_PROGRAMS = 2048
MAX_TAILS = 64


@triton.jit(do_not_specialize=["query_start_loc", "out", "num_reqs", "capacity", "pad_value"])
def _map_kernel(
    query_start_loc,  # int32 [num_reqs + 1]
    out,  # int32 [capacity]
    num_reqs: tl.int32,
    capacity: tl.int32,
    pad_value: tl.int32,
    TILE: tl.constexpr,
):
    # Programs [num_reqs + 1, parts of each span]; the last span is the padding.
    request = tl.program_id(0)
    start = tl.load(query_start_loc + request)
    end = tl.load(query_start_loc + tl.minimum(request + 1, num_reqs))
    padding = request == num_reqs
    end = tl.where(padding, capacity, tl.minimum(end, capacity))
    value = tl.where(padding, pad_value, request)
    lane = tl.arange(0, TILE)
    for tile in range(start + tl.program_id(1) * TILE, end, tl.num_programs(1) * TILE):
        token = tile + lane
        tl.store(out + token, tl.zeros_like(token) + value, token < end)


@triton.jit
def _group_of(request, num_reqs, total_keys, table, num_words, words, TABLE: tl.constexpr):
    """Number, first and one past the last request, first and one past the last key of a request's group."""
    # Every word that begins at or before the request is a group up to its own.
    number = -1
    first = 0
    base = 0
    last = num_reqs
    limit = total_keys
    if num_words <= len(words):
        for i in tl.static_range(len(words)):
            begin = words[i].to(tl.int32)
            key = (words[i] >> 32).to(tl.int32)
            before = begin <= request
            number += before.to(tl.int32)
            first = tl.where(before, begin, first)
            base = tl.where(before, key, base)
            last = tl.where(before, last, tl.minimum(last, begin))
            limit = tl.where(before, limit, tl.minimum(limit, key))
    else:
        for i in range(0, num_words, TABLE):
            place = i + tl.arange(0, TABLE)
            word = tl.load(table + place, place < num_words, other=0x7FFFFFFF7FFFFFFF)
            begin = word.to(tl.int32)
            key = (word >> 32).to(tl.int32)
            before = begin <= request
            number += tl.sum(before.to(tl.int32), 0)
            first = tl.maximum(first, tl.max(tl.where(before, begin, 0), 0))
            base = tl.maximum(base, tl.max(tl.where(before, key, 0), 0))
            last = tl.minimum(last, tl.min(tl.where(before, num_reqs, begin), 0))
            limit = tl.minimum(limit, tl.min(tl.where(before, total_keys, key), 0))
    return number, first, last, base, limit


@triton.jit(
    do_not_specialize=[
        *("query_start_loc", "seq_lens", "token_to_req", "cu_seqlen_ks", "cu_seqlen_ke", "row_keys"),
        *("key_to_req", "key_starts", "table", "num_reqs", "num_decodes", "ratio", "capacity", "total_keys"),
        *("num_words", *(f"w{i}" for i in range(INLINE_GROUPS))),
    ]
)
def _step_kernel(
    query_start_loc,  # int32 [num_reqs + 1]
    seq_lens,  # int32 [num_reqs], tokens
    token_to_req,  # int32 [capacity], as are the next three
    cu_seqlen_ks,
    cu_seqlen_ke,
    row_keys,
    key_to_req,  # int32 [at least total_keys]
    key_starts,  # int32 [2 * most requests]
    table,  # int64 [num_words], read where the words do not fit below
    num_reqs: tl.int32,
    num_decodes: tl.int32,
    ratio: tl.int32,  # tokens of a key
    capacity: tl.int32,
    total_keys: tl.int32,
    num_words: tl.int32,
    w0: tl.int64,
    w1: tl.int64,
    w2: tl.int64,
    w3: tl.int64,
    w4: tl.int64,
    w5: tl.int64,
    w6: tl.int64,
    w7: tl.int64,
    w8: tl.int64,
    w9: tl.int64,
    w10: tl.int64,
    w11: tl.int64,
    w12: tl.int64,
    w13: tl.int64,
    w14: tl.int64,
    w15: tl.int64,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
):
    # Programs [num_reqs + some for the padding, parts of each request].
    request = tl.program_id(0)
    part = tl.program_id(1)
    lane = tl.arange(0, TILE)
    if request < num_reqs:
        step = tl.num_programs(1) * TILE
        start = tl.load(query_start_loc + request)
        end = tl.load(query_start_loc + request + 1)
        seq_len = tl.maximum(tl.load(seq_lens + request), 0)
        first_key = 0
        my_keys = 0x7FFFFFFF
        prefill = request >= num_decodes
        if prefill:
            words = (w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15)
            number, first, last, base, limit = _group_of(request, num_reqs, total_keys, table, num_words, words, LANES)
            # Exact device lengths before this one's; what the host promised bounds them.
            sums = tl.zeros((LANES,), tl.int32)
            for i in range(first, request, LANES):
                place = i + tl.arange(0, LANES)
                sums += tl.maximum(tl.load(seq_lens + place, place < request, other=0), 0) // ratio
            room = limit - base
            first_key = tl.minimum(tl.sum(sums, 0), room)
            my_keys = tl.minimum(seq_len // ratio, room - first_key)
            end_key = first_key + my_keys
            keys = key_to_req + base
            for tile in range(first_key + part * TILE, end_key, step):
                key = tile + lane
                tl.store(keys + key, tl.zeros_like(key) + request, key < end_key)
            if request + 1 == last:
                for tile in range(end_key + part * TILE, room, step):
                    key = tile + lane
                    tl.store(keys + key, tl.full(key.shape, -1, tl.int32), key < room)
                if part == 0:
                    tl.store(key_starts + last + number, end_key)
            if part == 0:
                tl.store(key_starts + request + number, first_key)
        # Row j sees its own position and all before it: the length without the rows behind it.
        before = seq_len - (end - start) + 1 - start
        stop = tl.minimum(end, capacity)
        for tile in range(start + part * TILE, stop, step):
            token = tile + lane
            inside = token < stop
            visible = tl.minimum(tl.maximum(before + token, 0) // ratio, my_keys)
            ks = tl.zeros_like(token) + first_key
            tl.store(token_to_req + token, tl.zeros_like(token) + request, inside)
            tl.store(row_keys + token, visible, inside)
            tl.store(cu_seqlen_ks + token, ks, inside)
            tl.store(cu_seqlen_ke + token, tl.where(prefill, ks + visible, 0), inside)
    else:
        start = tl.load(query_start_loc + num_reqs)
        parts = tl.num_programs(1)
        part += (request - num_reqs) * parts
        step = (tl.num_programs(0) - num_reqs) * parts * TILE
        for tile in range(start + part * TILE, capacity, step):
            token = tile + lane
            inside = token < capacity
            nothing = tl.zeros_like(token)
            tl.store(token_to_req + token, nothing, inside)
            tl.store(row_keys + token, nothing, inside)
            tl.store(cu_seqlen_ks + token, nothing, inside)
            tl.store(cu_seqlen_ke + token, nothing, inside)


_MAP = KeptKernel(_map_kernel, {"TILE": MAP_TILE}, MAP_WARPS)
_STEP = KeptKernel(_step_kernel, {"TILE": STEP_TILE, "LANES": LANES}, STEP_WARPS)


@lru_cache(maxsize=4096)
def map_grid(num_reqs: int, capacity: int) -> tuple[int, int]:
    """Programs of the map: spans, and parts of each.

    The host knows no boundary: a request of four times the mean length still has a program for each tile.
    Any boundaries come out right, only the spread over the device suffers.
    """
    spans = num_reqs + 1
    longest = min(capacity, 4 * capacity // spans + 1)
    return spans, max(1, min(-(-longest // MAP_TILE), MAX_PROGRAMS // spans))


def step_grid(num_reqs: int, longest: int, padding: int) -> tuple[int, int]:
    """Programs of a step's metadata: requests and some for the padding, and parts of each.

    ``longest`` (most rows or keys of a request) and ``padding`` (rows to the end of the buffers) are what the
    host expects; anything comes out right.
    """
    # Every step pays for this: comparisons cost less than calls of min and max.
    parts, most = -(-longest // STEP_TILE), MAX_PROGRAMS // (num_reqs or 1)
    parts = (parts if parts < most else most) or 1
    tails = -(-padding // (STEP_TILE * parts)) or 1
    return num_reqs + (tails if tails < MAX_TAILS else MAX_TAILS), parts


def token_to_req_indices(query_start_loc: torch.Tensor, out: torch.Tensor, pad_value: int) -> None:
    """Write the request of each token into out [T] int32, and pad_value behind the last request's end."""
    num_reqs, capacity = query_start_loc.numel() - 1, out.numel()
    if capacity == 0:
        return
    device = out.device
    grid, kernel = map_grid(num_reqs, capacity), _MAP.loaded(device)
    if kernel is not None:
        kernel.start(grid, (query_start_loc.data_ptr(), out.data_ptr(), num_reqs, capacity, pad_value))
    else:
        _MAP.launch_tensors(grid, device, query_start_loc, out, num_reqs, capacity, pad_value)


def step_values(layout: StepLayout, capacity: int) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Programs of a step, and what its kernel takes by value."""
    num_reqs, num_decodes, ratio, starts, words, longest, total_keys = layout
    grid, count = step_grid(num_reqs, longest, capacity - starts[-1]), len(words)
    # Tuples are added, not unpacked into a new one: half the time.
    values = (num_reqs, num_decodes, ratio, capacity, total_keys, count)
    return grid, values + (words + NO_GROUPS[count:] if count < INLINE_GROUPS else words[:INLINE_GROUPS])


# A builder comes with the same layout again while as many requests decode.
_decode_values = lru_cache(maxsize=1024)(step_values)


def build_metadata(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    layout: StepLayout,
    buffers: MetadataBuffers,
    group_table: torch.Tensor | None = None,
) -> None:
    """Fill every buffer of a step by one launch.

    ``group_table`` holds ``layout.words`` on the device, int64; it is read where there are more groups
    than a launch takes by value, and may be None otherwise.
    """
    grid, values = (step_values if layout.words else _decode_values)(layout, buffers.max_tokens)
    kernel = _STEP.loaded(buffers.device)
    if kernel is not None:
        table = (0 if group_table is None else group_table.data_ptr(),)
        inputs = (query_start_loc.data_ptr(), seq_lens.data_ptr())
        kernel.start(grid, inputs + buffers.addresses + table + values)
    else:
        device = buffers.device
        held = torch.empty(1, dtype=torch.int64, device=device) if group_table is None else group_table
        _STEP.launch_tensors(grid, device, query_start_loc, seq_lens, *buffers.written, held, *values)


def warmup_metadata(device: torch.device) -> int:
    """Compile both kernels, and load them on a GPU, so that a first call may be captured; returns their number."""
    ints = torch.zeros(2, dtype=torch.int32, device=device)
    words = torch.zeros(1, dtype=torch.int64, device=device)
    _MAP.prepare(device, ints, ints, 1, 1, 0)
    _STEP.prepare(device, *(ints,) * 8, words, *(1,) * (6 + INLINE_GROUPS))
    return 2
