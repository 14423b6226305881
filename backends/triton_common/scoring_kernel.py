"""The multi-query logits kernel that both vendors share; ``scoring`` launches it.

A program owns ROWS query rows and a range of keys. For each tile of KEYS keys it multiplies keys by row-heads
(keys first), applies relu and the head weights in float32 and sums over heads. Two things make the sum cheap and
its rounding the kernel's own:

- The columns of the product are ordered so that the heads of one row fall to one thread, as far as the matrix
  unit's register layout allows: of each run of LANES * PAIR columns, LANES rows own PAIR heads each.
- A thread's heads are added one after the other by explicit multiply-adds, so neither the compiler's choice of
  what to fuse nor its order of a reduction can change a bit; only PAIR partial sums are left to a reduction.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Keeps the tile's first key, hence vector loads of scales and vector stores of logits, aligned.
KEY_ALIGN = tl.constexpr(16)
EMPTY = tl.constexpr(2147483647)
TOP_BITS = tl.constexpr(-2139062144)  # 0x80808080


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
def _halves(x):
    """Both halves of the third of five dimensions; it lies in registers, so nothing moves."""
    x = tl.reshape(x, (x.shape[0], x.shape[1], 2, x.shape[2] // 2, x.shape[3], x.shape[4]))
    return tl.split(tl.permute(x, (0, 1, 3, 4, 5, 2)))


@triton.jit
def _chain(x, w, total, FIRST: tl.constexpr):
    """total + sum of x * w over the third dimension, in its order, one multiply-add after the other."""
    if x.shape[2] == 1:
        total = x * w if FIRST else tl.fma(x, tl.broadcast_to(w, x.shape), total)
    else:
        x0, x1 = _halves(x)
        w0, w1 = _halves(w)
        total = _chain(x1, w1, _chain(x0, w0, total, FIRST), False)
    return total


@triton.jit
def _weighted(k, q, w, total, RELU: tl.constexpr, FIRST: tl.constexpr):
    """Add one block of heads to the running total [KEYS, ROWS / LANES, 1, LANES, PAIR]."""
    x = tl.dot(k, q)
    x = tl.reshape(x, (k.shape[0], w.shape[1], w.shape[2], w.shape[3], w.shape[4]))
    return _chain(_relu(x, RELU), w, total, FIRST)


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
def _fnuz_words(word):
    """``_native``'s "fn_as_fnuz" on four bytes at a time: int32 [KEYS, D / 4] to fnuz [KEYS, D]."""
    size = word & 0x7F7F7F7F
    sign = (size + 0x7F7F7F7F) & word & TOP_BITS
    nan = (size + 0x01010101) & TOP_BITS
    nan_size = nan - ((nan >> 7) & 0x01010101)
    word = ((size | sign) & ~(nan_size | nan)) | nan
    even = tl.join(word & 0xFF, (word >> 16) & 0xFF)
    odd = tl.join((word >> 8) & 0xFF, (word >> 24) & 0xFF)
    x = tl.reshape(tl.join(even, odd), (word.shape[0], word.shape[1] * 4))
    return x.to(tl.uint8).to(tl.float8e4b8, bitcast=True)


@triton.jit
def _queries(base, row, head, d, stride_m, stride_h, rows, H: tl.constexpr, DECODE: tl.constexpr):
    """One block of heads of every row of the tile: [D, ROWS * HEADS], zero where there is no row or head."""
    keep = (row < rows) & (head < H)
    at = row * stride_m + head * stride_h
    return _native(tl.load(base + (at[None, :] + d[:, None]), mask=keep[None, :], other=0.0), DECODE)


@triton.jit
def _weights(base, row, head, stride_m, rows, H: tl.constexpr, RELU: tl.constexpr, SHAPE: tl.constexpr):
    """The weights of the same columns, in SHAPE [1, ROWS / LANES, HEADS / PAIR, LANES, PAIR]."""
    keep = (row < rows) & (head < H)
    w = tl.load(base + (row * stride_m + head), mask=keep, other=0.0)
    if RELU != "max":
        w = w * 0.5
    return tl.reshape(w, SHAPE)


@triton.jit
def _load_direct(at, n, keys):
    """Scales of keys n < keys, in the caller's layout and outside the load pipeline."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.s32 p, $2, $3; mov.b32 $0, 0; @p ld.global.nc.f32 $0, [$1]; }",
        "=f,l,r,r",
        [at.to(tl.int64), n, keys],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _store_direct(at, value, since, width):
    """Store where 0 <= since < width, from the registers that hold the value: Triton's store would first
    regroup the tile through shared memory, with a barrier. The result only satisfies the signature."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.u32 p, $3, $4; @p st.global.f32 [$1], $2; mov.b32 $0, 0; }",
        "=r,l,f,r,r",
        [at.to(tl.int64), value, since, width],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


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
    LANES: tl.constexpr,
    PAIR: tl.constexpr,
    RELU: tl.constexpr,
    Q_DECODE: tl.constexpr,
    K_DECODE: tl.constexpr,
    ALIGNED: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    DIRECT: tl.constexpr,
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
    # Not below 0: the difference must not leave int32.
    ke = tl.maximum(tl.minimum(tl.load(ke_ptr + first_row + row, mask=row < rows, other=0), keys), 0)
    width = tl.maximum(ke - ks, 0)
    if ROWS <= 8:
        # The tile's range, by scalar loads: AMD's buffer instructions want their base in scalar registers.
        low = EMPTY
        high = 0
        for r in tl.static_range(ROWS):
            at_row = tl.minimum(first_row + r, M - 1)
            start = tl.maximum(tl.load(ks_ptr + at_row), 0)
            stop = tl.minimum(tl.load(ke_ptr + at_row), keys)
            low = tl.where(start < stop, tl.minimum(low, start), low)
            high = tl.where(start < stop, tl.maximum(high, stop), high)
    else:
        low = tl.min(tl.where(ks < ke, ks, EMPTY), 0)
        high = tl.max(tl.where(ks < ke, ke, 0), 0)
    low = low // KEY_ALIGN * KEY_ALIGN
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
    step_qm = stride_qm
    step_qh = stride_qh
    step_kn = stride_kn
    step_wm = stride_wm
    step_om = stride_om
    if ALIGNED:
        # `scoring.is_aligned` has checked this; the bounds let AMD's buffer instructions take 32-bit offsets.
        q_base = tl.multiple_of(q_base, 16)
        w_base = tl.multiple_of(w_base, 16)
        step_qm = stride_qm.to(tl.int32) // 16 * 16
        step_qh = stride_qh.to(tl.int32) // 16 * 16
        step_kn = stride_kn.to(tl.int32) // 16 * 16
        step_wm = stride_wm.to(tl.int32) // 4 * 4
        step_om = stride_om.to(tl.int32) // 4 * 4
        tl.assume(step_qm >= 0)
        tl.assume(step_qm <= 16777216)
        tl.assume(step_qh >= 0)
        tl.assume(step_qh <= 65536)
        tl.assume(step_kn >= 0)
        tl.assume(step_kn <= 65536)
        tl.assume(step_wm >= 0)
        tl.assume(step_wm <= 16777216)
        tl.assume(step_om >= 0)
        tl.assume(step_om <= 16777216)

    column = tl.arange(0, ROWS * HEADS)
    q_row = column // (HEADS * LANES) * LANES + column // PAIR % LANES
    q_head = column % (HEADS * LANES) // (PAIR * LANES) * PAIR + column % PAIR
    d = tl.arange(0, D)
    SHAPE: tl.constexpr = (1, ROWS // LANES, HEADS // PAIR, LANES, PAIR)
    q0 = _queries(q_base, q_row, q_head, d, step_qm, step_qh, rows, H, Q_DECODE)
    w0 = _weights(w_base, q_row, q_head, step_wm, rows, H, RELU, SHAPE)
    if BLOCKS == 4:
        q1 = _queries(q_base, q_row, q_head + HEADS, d, step_qm, step_qh, rows, H, Q_DECODE)
        w1 = _weights(w_base, q_row, q_head + HEADS, step_wm, rows, H, RELU, SHAPE)
        q2 = _queries(q_base, q_row, q_head + 2 * HEADS, d, step_qm, step_qh, rows, H, Q_DECODE)
        w2 = _weights(w_base, q_row, q_head + 2 * HEADS, step_wm, rows, H, RELU, SHAPE)
        q3 = _queries(q_base, q_row, q_head + 3 * HEADS, d, step_qm, step_qh, rows, H, Q_DECODE)
        w3 = _weights(w_base, q_row, q_head + 3 * HEADS, step_wm, rows, H, RELU, SHAPE)

    key = tl.arange(0, KEYS)
    for n in tl.range(begin, end, KEYS, num_stages=STAGES):
        inside = key < keys - n
        k_base = k_ptr
        if DESCRIPTOR:
            k = k_ptr.load([n, 0])
        else:
            k_base += n * stride_kn
            if ALIGNED:
                k_base = tl.multiple_of(k_base, 16)
            if ALIGNED and K_DECODE == "fn_as_fnuz":
                word = tl.arange(0, D // 4)
                words = k_base.to(tl.pointer_type(tl.int32))
                words += key[:, None] * (step_kn // 4) + word[None, :]
                k = _fnuz_words(tl.load(words, mask=inside[:, None], other=0))
            else:
                k_at = k_base + (key[:, None] * step_kn + d[None, :])
                k = _native(tl.load(k_at, mask=inside[:, None], other=0.0), K_DECODE)
        if DIRECT:
            scale = _load_direct(scale_ptr + n * stride_scale + key * stride_scale, n + key, keys)
        elif ALIGNED:
            scale = tl.load(scale_ptr + n + key, mask=inside, other=0.0)
        else:
            scale = tl.load(scale_ptr + n * stride_scale + key * stride_scale, mask=inside, other=0.0)

        total = _weighted(k, q0, w0, 0.0, RELU, True)
        if BLOCKS == 4:
            total = _weighted(k, q1, w1, total, RELU, False)
            total = _weighted(k, q2, w2, total, RELU, False)
            total = _weighted(k, q3, w3, total, RELU, False)
        logits = tl.reshape(tl.sum(tl.reshape(total, (KEYS, ROWS, PAIR)), 2), (KEYS, ROWS))
        logits = logits * (scale * factor)[:, None]

        since = (n - ks)[None, :] + key[:, None]
        out_at = out_base + n + (row[None, :] * step_om + key[:, None])
        if DIRECT:
            _store_direct(out_at, logits, since, tl.broadcast_to(width[None, :], since.shape))
        else:
            keep = since.to(tl.uint32, bitcast=True) < width.to(tl.uint32, bitcast=True)[None, :]
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
