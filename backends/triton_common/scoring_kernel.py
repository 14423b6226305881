"""The multi-query logits kernel that both vendors share; ``scoring`` launches it.

A program owns ROWS query rows and a range of keys. For each tile of KEYS keys it multiplies keys by heads
(keys first, so that the heads of one key lie in one thread's registers), applies relu and the head weights in
float32 and sums over heads. Heads are taken in BLOCKS blocks of HEADS: blocks are accumulated element by
element with an explicit multiply-add, so with more than one block no rounding is left to the compiler's choice.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Keeps the tile's first key, hence vector loads of scales and vector stores of logits, aligned.
KEY_ALIGN = tl.constexpr(16)
EMPTY = tl.constexpr(2147483647)


@triton.jit
def _relu(x, RELU: tl.constexpr):
    """relu that keeps NaN; the two "sum" forms return twice its value, exactly, and owe a halved weight."""
    if RELU == "max":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        x = x + tl.abs(x)
        if RELU == "sum_scalar":
            # An empty instruction that LLVM cannot see through: otherwise it pairs the additions, and a packed
            # addition has no absolute-value modifier, so each element pays for an extra mask.
            x = tl.inline_asm_elementwise("", "=v,0", [x], dtype=tl.float32, is_pure=True, pack=1)
    return x


@triton.jit
def _weighted(k, q, w, total, ROWS: tl.constexpr, RELU: tl.constexpr, FIRST: tl.constexpr):
    """Add relu(k . q) * w of one block of heads to the running total [KEYS, ROWS, HEADS]."""
    x = _relu(tl.reshape(tl.dot(k, q), (k.shape[0], ROWS, w.shape[2])), RELU)
    return x * w if FIRST else tl.fma(x, tl.broadcast_to(w, x.shape), total)


@triton.jit
def _native(x, DECODE: tl.constexpr):
    """Bytes as the matrix unit takes them.

    "fp8": already so. "fn_as_fnuz": OCP bytes reread by a unit that knows fnuz only; they are worth half, -0.0
    becomes 0 and the NaN bytes become fnuz's NaN. "fn_as_half", "fnuz_as_half": as float16, short by 2**8 and 2**7.
    """
    if DECODE == "fn_as_fnuz":
        size = x & 0x7F
        x = tl.where(size == 0x7F, 0x80, tl.where(size == 0, 0, x))
        x = x.to(tl.uint8).to(tl.float8e4b8, bitcast=True)
    elif DECODE != "fp8":
        wide = x.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        if DECODE == "fnuz_as_half":
            bits = tl.where(wide == 0x80, 0x7E00, bits)
        else:
            bits = tl.where((wide & 0x7F) == 0x7F, 0x7E00, bits)
        x = bits.to(tl.uint16).to(tl.float16, bitcast=True)
    return x


@triton.jit
def _queries(base, row, head, d, stride_m, stride_h, rows, H: tl.constexpr, DECODE: tl.constexpr):
    """One block of heads of every row of the tile: [D, ROWS * HEADS], zero where there is no row or head."""
    keep = (row < rows) & (head < H)
    at = row * stride_m + head * stride_h
    return _native(tl.load(base + at[None, :] + d[:, None], mask=keep[None, :], other=0.0), DECODE)


@triton.jit
def _weights(base, row, head, stride_m, rows, H: tl.constexpr, RELU: tl.constexpr):
    """The weights of the same block: [1, ROWS, HEADS], zero where there is no row or head."""
    keep = (row < rows)[:, None] & (head < H)[None, :]
    w = tl.load(base + row[:, None] * stride_m + head[None, :], mask=keep, other=0.0)
    if RELU != "max":
        w = w * 0.5
    return w[None, :, :]


_RUNTIME = (
    "q_ptr k_ptr scale_ptr w_ptr ks_ptr ke_ptr out_ptr M N splits"
    " stride_qm stride_qh stride_kn stride_scale stride_wm stride_om factor"
).split()


@triton.jit(do_not_specialize=_RUNTIME)
def mqa_logits_kernel(
    q_ptr,  # [M, H, D] fp8, or its bytes where DECODE asks for them
    k_ptr,  # [N, D], likewise; a tensor descriptor of [KEYS, D] blocks if DESCRIPTOR
    scale_ptr,  # [N] float32
    w_ptr,  # [M, H] float32
    ks_ptr,  # [M] int32
    ke_ptr,  # [M] int32
    out_ptr,  # [M, >= N] float32
    M: tl.int64,
    N: tl.int64,
    splits: tl.int64,
    stride_qm: tl.int64,
    stride_qh: tl.int64,
    stride_kn: tl.int64,
    stride_scale: tl.int64,
    stride_wm: tl.int64,
    stride_om: tl.int64,
    factor: tl.float32,  # what decoding owes
    H: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    RELU: tl.constexpr,
    Q_DECODE: tl.constexpr,
    K_DECODE: tl.constexpr,
    ALIGNED: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    tiles = (M + ROWS - 1) // ROWS
    split = (program // tiles).to(tl.int32)
    # The last rows of a causal step see the most keys: they start first.
    first_row = (tiles - 1 - program % tiles) * ROWS
    rows = (M - first_row).to(tl.int32)
    row = tl.arange(0, ROWS)

    keys = N.to(tl.int32)
    ks = tl.maximum(tl.load(ks_ptr + first_row + row, mask=row < rows, other=0), 0)
    ke = tl.minimum(tl.load(ke_ptr + first_row + row, mask=row < rows, other=0), keys)
    ke = tl.maximum(ks, ke)
    low = tl.min(tl.where(ks < ke, ks, EMPTY), 0) // KEY_ALIGN * KEY_ALIGN
    high = tl.max(tl.where(ks < ke, ke, 0), 0)
    parts = splits.to(tl.int32)
    share = (tl.cdiv(tl.maximum(high - low, 0), KEYS) + parts - 1) // parts * KEYS
    begin = low + split * share
    end = tl.minimum(begin + share, high)
    if begin >= end:
        return

    # Already so when compiled; the interpreter gives small integers fewer bits.
    stride_kn = stride_kn.to(tl.int64)
    stride_om = stride_om.to(tl.int64)
    stride_scale = stride_scale.to(tl.int64)
    q_base = q_ptr + first_row * stride_qm
    w_base = w_ptr + first_row * stride_wm
    out_base = out_ptr + first_row * stride_om
    if ALIGNED:
        # The launcher has checked this; the bounds let AMD's buffer instructions take 32-bit offsets.
        step_k = stride_kn.to(tl.int32) // 16 * 16
        step_out = stride_om.to(tl.int32) // 4 * 4
        tl.assume(step_k >= 0)
        tl.assume(step_k <= 65536)
        tl.assume(step_out >= 0)
        tl.assume(step_out <= 16777216)
        stride_qm = stride_qm // 16 * 16
        stride_qh = stride_qh // 16 * 16
        stride_wm = stride_wm // 4 * 4
        q_base = tl.multiple_of(q_base, 16)
        w_base = tl.multiple_of(w_base, 16)
    else:
        step_k = stride_kn
        step_out = stride_om

    column = tl.arange(0, ROWS * HEADS)
    q_row = column // HEADS
    q_head = column % HEADS
    head = tl.arange(0, HEADS)
    d = tl.arange(0, D)
    q0 = _queries(q_base, q_row, q_head, d, stride_qm, stride_qh, rows, H, Q_DECODE)
    w0 = _weights(w_base, row, head, stride_wm, rows, H, RELU)
    if BLOCKS >= 2:
        q1 = _queries(q_base, q_row, q_head + HEADS, d, stride_qm, stride_qh, rows, H, Q_DECODE)
        w1 = _weights(w_base, row, head + HEADS, stride_wm, rows, H, RELU)
    if BLOCKS == 4:
        q2 = _queries(q_base, q_row, q_head + 2 * HEADS, d, stride_qm, stride_qh, rows, H, Q_DECODE)
        w2 = _weights(w_base, row, head + 2 * HEADS, stride_wm, rows, H, RELU)
        q3 = _queries(q_base, q_row, q_head + 3 * HEADS, d, stride_qm, stride_qh, rows, H, Q_DECODE)
        w3 = _weights(w_base, row, head + 3 * HEADS, stride_wm, rows, H, RELU)

    key = tl.arange(0, KEYS)
    width = (ke - ks).to(tl.uint32, bitcast=True)
    for n in tl.range(begin, end, KEYS, num_stages=STAGES):
        inside = key < keys - n
        if DESCRIPTOR:
            k = k_ptr.load([n, 0])
        else:
            k_base = k_ptr + n * stride_kn
            if ALIGNED:
                k_base = tl.multiple_of(k_base, 16)
            k_at = k_base + key[:, None] * step_k + d[None, :]
            k = _native(tl.load(k_at, mask=inside[:, None], other=0.0), K_DECODE)
        if ALIGNED:
            scale = tl.load(scale_ptr + n + key, mask=inside, other=0.0)
        else:
            scale = tl.load(scale_ptr + n * stride_scale + key * stride_scale, mask=inside, other=0.0)

        total = _weighted(k, q0, w0, 0.0, ROWS, RELU, True)
        if BLOCKS >= 2:
            total = _weighted(k, q1, w1, total, ROWS, RELU, False)
        if BLOCKS == 4:
            total = _weighted(k, q2, w2, total, ROWS, RELU, False)
            total = _weighted(k, q3, w3, total, ROWS, RELU, False)
        logits = tl.sum(total, 2) * (scale * factor)[:, None]

        since = (n - ks)[None, :] + key[:, None]
        keep = since.to(tl.uint32, bitcast=True) < width[None, :]
        out_at = out_base + n + row[None, :] * step_out + key[:, None]
        tl.store(out_at, logits, mask=keep)


@triton.jit(do_not_specialize=["ks_ptr", "ke_ptr", "out_ptr", "N", "parts", "stride_om"])
def fill_outside_kernel(
    ks_ptr,  # [M] int32
    ke_ptr,  # [M] int32
    out_ptr,  # [M, >= N] float32
    N: tl.int64,
    parts: tl.int64,
    stride_om: tl.int64,
    WIDTH: tl.constexpr,
):
    """Write -inf to the columns of a row, in [0, N), that lie outside [ks, ke)."""
    program = tl.program_id(0).to(tl.int64)
    row = program // parts
    keys = N.to(tl.int32)
    ks = tl.maximum(tl.load(ks_ptr + row), 0)
    ke = tl.minimum(tl.load(ke_ptr + row), keys)
    share = tl.cdiv(tl.cdiv(keys, WIDTH), parts.to(tl.int32)) * WIDTH
    begin = (program % parts).to(tl.int32) * share
    at = tl.arange(0, WIDTH)
    for n in range(begin, tl.minimum(begin + share, keys), WIDTH):
        column = n + at
        outside = (column < keys) & ((column < ks) | (column >= ke))
        tl.store(out_ptr + row * stride_om + column, float("-inf"), mask=outside)
