"""Small Triton kernels that cross-check the executor: each has an obvious NumPy or torch counterpart."""

import triton
import triton.language as tl


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n)
    y = tl.load(y_ptr + offs, mask=offs < n)
    tl.store(out_ptr + offs, x + y, mask=offs < n)


@triton.jit
def softmax(x_ptr, out_ptr, stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + offs, mask=offs < n, other=float("-inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row * stride + offs, e / tl.sum(e, 0), mask=offs < n)


@triton.jit
def cumsum(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.cumsum(tl.load(x_ptr + offs), 0))


@triton.jit
def histogram(x_ptr, out_ptr, BLOCK: tl.constexpr, BINS: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.atomic_add(out_ptr + tl.arange(0, BINS), tl.histogram(x, BINS))


@triton.jit
def sort(x_ptr, out_ptr, BLOCK: tl.constexpr, DESCENDING: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.sort(tl.load(x_ptr + offs), descending=DESCENDING))


@triton.jit
def quantise(x_ptr, out_ptr, scale_ptr, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = row * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    scale = tl.max(tl.abs(x), 0) / LIMIT
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + offs, (x / scale).to(out_ptr.dtype.element_ty))


@triton.jit
def widen(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs).to(tl.float32))


@triton.jit
def matmul(a_ptr, b_ptr, out_ptr, K, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, FLIP: tl.constexpr):
    """out[M, N] per program = a[M, K] @ b[K, N]; b is stored [N, K] where FLIP."""
    row = tl.program_id(0) * M + tl.arange(0, M)
    col, inner = tl.arange(0, N), tl.arange(0, BK)
    acc = tl.zeros([M, N], out_ptr.dtype.element_ty)
    for k in range(0, K, BK):
        a = tl.load(a_ptr + row[:, None] * K + k + inner[None, :])
        if FLIP:
            b = tl.load(b_ptr + col[None, :] * K + k + inner[:, None])
        else:
            b = tl.load(b_ptr + (k + inner[:, None]) * N + col[None, :])
        acc = tl.dot(a, b, acc, out_dtype=acc.dtype)
    tl.store(out_ptr + row[:, None] * N + col[None, :], acc)


@triton.jit
def divide(x_ptr, y_ptr, quotient_ptr, rest_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n)
    y = tl.load(y_ptr + offs, mask=offs < n, other=1)
    tl.store(quotient_ptr + offs, x // y, mask=offs < n)
    tl.store(rest_ptr + offs, x % y, mask=offs < n)


@triton.jit
def divide_rounded(x_ptr, y_ptr, out_ptr, root_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + offs), tl.load(y_ptr + offs)
    tl.store(out_ptr + offs, tl.div_rn(x, y))
    tl.store(root_ptr + offs, tl.sqrt_rn(tl.abs(x)))


@triton.jit
def gather(x_ptr, index_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(index_ptr + offs, mask=offs < n, other=0)
    tl.store(out_ptr + offs, tl.load(x_ptr + index, mask=offs < n), mask=offs < n)


@triton.jit
def shuffle(x_ptr, index_ptr, out_ptr, BLOCK: tl.constexpr):
    """A gather within the block: through LDS or lane permutations."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.gather(tl.load(x_ptr + offs), tl.load(index_ptr + offs), 0))


@triton.jit
def tickets(counter_ptr, amount_ptr, out_ptr, BLOCK: tl.constexpr):
    """Returning atomics: every lane draws from its counter."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    amount = tl.load(amount_ptr + offs)
    tl.store(out_ptr + offs, tl.atomic_add(counter_ptr + offs % 4, amount))


@triton.jit
def atomics(x_ptr, add_ptr, max_ptr, or_ptr, first_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.atomic_add(add_ptr + offs % 8, x.to(tl.float32))
    tl.atomic_max(max_ptr + offs % 8, x.to(tl.uint32))
    tl.atomic_or(or_ptr + offs % 8, x)
    tl.store(first_ptr + offs, tl.atomic_cas(first_ptr + offs, x * 0 - 1, x))


@triton.jit
def wide_offsets(x_ptr, row_ptr, out_ptr, stride, N: tl.constexpr, WIDE: tl.constexpr):
    """Copies row row_ptr[program] of a tall x; the row offset in 64 bits only where WIDE."""
    row = tl.load(row_ptr + tl.program_id(0))
    if WIDE:
        row = row.to(tl.int64)
    offs = tl.arange(0, N)
    tl.store(out_ptr + tl.program_id(0) * N + offs, tl.load(x_ptr + row * stride + offs))


@triton.jit
def reduce_2d(x_ptr, total_ptr, top_ptr, place_ptr, M: tl.constexpr, N: tl.constexpr):
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + tl.program_id(0) * M * N + rows[:, None] * N + cols[None, :])
    out = tl.program_id(0) * M + rows
    tl.store(total_ptr + out, tl.sum(x, 1))
    top, place = tl.max(x, 1, return_indices=True)
    tl.store(top_ptr + out, top)
    tl.store(place_ptr + out, place)


@triton.jit
def add_past_the_end(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Broken: its mask lets one element too many through."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs <= n
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=inside) + tl.load(y_ptr + offs, mask=inside), mask=inside)


@triton.jit
def large_tile(x_ptr, out_ptr, M: tl.constexpr, K: tl.constexpr):
    """Keeps two operands of M x K float16 in LDS."""
    rows, cols = tl.arange(0, M), tl.arange(0, K)
    x = tl.load(x_ptr + rows[:, None] * K + cols[None, :])
    y = tl.load(x_ptr + M * K + rows[None, :] * K + cols[:, None])
    tl.store(out_ptr + rows[:, None] * M + rows[None, :], tl.dot(x, y))


@triton.jit
def where_am_i(out_ptr):
    """Program ids and their numbers along three axes."""
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    nx, ny, nz = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
    at = out_ptr + ((z * ny + y) * nx + x) * 6
    tl.store(at, x)
    tl.store(at + 1, y)
    tl.store(at + 2, z)
    tl.store(at + 3, nx)
    tl.store(at + 4, ny)
    tl.store(at + 5, nz)
