"""Kernels of the forward: one update of a potential, and the output. Potentials are in base 2.

A token that takes no part has the potential `ABSENT`, on whichever side it is, and so has one
without partners. That is all the masking there is: its exponentials are zero. Columns beyond the
last are loaded as absent.
"""

import triton
import triton.language as tl

ABSENT: tl.constexpr = tl.constexpr(-1e30)


@triton.jit
def load_rows(X, head, rows, N, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of (heads, N, D) as a tile with BLOCK_D columns; what is not there is zero."""
    columns = tl.arange(0, BLOCK_D)
    pointers = X + head * N * D + (rows[:, None] * D + columns[None, :])
    if D == BLOCK_D:
        return tl.load(pointers, mask=(rows < N)[:, None], other=0.0)
    return tl.load(pointers, mask=(rows < N)[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def where_am_i(N, BLOCK: tl.constexpr):
    """The head of this program, in 64 bits because its offset outgrows 32, and its rows."""
    blocks = tl.cdiv(N, BLOCK)
    program = tl.program_id(0)
    head = (program // blocks).to(tl.int64)
    return head, (program % blocks) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def settled(largest, total, MASK, head, rows, N, MASKED: tl.constexpr):
    """The potential ``-log2(total · 2^largest)``; absent for masked rows and without partners."""
    potential = -(largest + tl.log2(total))
    potential = tl.where((largest <= ABSENT / 2) & (total == total), ABSENT, potential)
    if MASKED:
        present = tl.load(MASK + head * N + rows, mask=rows < N, other=0)
        potential = tl.where(present != 0, potential, ABSENT)
    return potential


@triton.jit
def potential_kernel(
    X, Y, OTHER, MASK, OUT, N, M, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``out_i = -log2 Σ_j 2^(scale x_i·y_j + other_j)`` with a running maximum."""
    head, rows = where_am_i(N, ROWS)
    x = load_rows(X, head, rows, N, D, BLOCK_D)
    largest = tl.full([ROWS], 2 * ABSENT, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, M, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        y = load_rows(Y, head, columns, M, D, BLOCK_D)
        other = tl.load(OTHER + head * M + columns, mask=columns < M, other=ABSENT)
        scores = tl.dot(x, tl.trans(y), input_precision=PRECISION) * scale + other[None, :]
        larger = tl.maximum(largest, tl.max(scores, 1))
        total = total * tl.exp2(largest - larger) + tl.sum(tl.exp2(scores - larger[:, None]), 1)
        largest = larger
    potential = settled(largest, total, MASK, head, rows, N, MASKED)
    tl.store(OUT + head * N + rows, potential, mask=rows < N)


@triton.jit
def output_kernel(
    Q, K, V, G, F, LOG_RATIO, MASK, OUT, N, M, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LAST_IS_ROWS: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``out_i = ratio · Σ_j 2^(scale q_i·k_j + f_i + g_j) v_j``.

    Where the rows come last, f is what normalises them: it is found on the way and stored.
    """
    head, rows = where_am_i(N, ROWS)
    q = load_rows(Q, head, rows, N, D, BLOCK_D)
    largest = tl.full([ROWS], 2 * ABSENT, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, BLOCK_W], tl.float32)
    for start in range(0, M, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        k = load_rows(K, head, columns, M, D, BLOCK_D)
        v = load_rows(V, head, columns, M, WIDTH, BLOCK_W)
        g = tl.load(G + head * M + columns, mask=columns < M, other=ABSENT)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + g[None, :]
        larger = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp2(largest - larger)
        weights = tl.exp2(scores - larger[:, None])
        total = total * shrink + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision=PRECISION)
        largest = larger
    if LAST_IS_ROWS:
        f = settled(largest, total, MASK, head, rows, N, MASKED)
        tl.store(F + head * N + rows, f, mask=rows < N)
        factor = 1 / total
    else:
        f = tl.load(F + head * N + rows, mask=rows < N, other=ABSENT)
        factor = tl.exp2(largest + f + tl.load(LOG_RATIO + head))
    out = tl.where((f <= ABSENT / 2)[:, None], 0.0, sums * factor[:, None])
    columns = tl.arange(0, BLOCK_W)
    pointers = OUT + head * N * WIDTH + (rows[:, None] * WIDTH + columns[None, :])
    inside = (rows < N)[:, None] & (columns < WIDTH)[None, :]
    tl.store(pointers, out.to(OUT.dtype.element_ty), mask=inside)
