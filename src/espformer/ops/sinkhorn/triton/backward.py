"""Kernels of the backward: gradients of the potentials one by one, then those of the tokens.

Every kernel takes its rows and its columns from either side, queries or keys; README.md derives
what is computed.
"""

import triton
import triton.language as tl

from espformer.ops.sinkhorn.triton.forward import ABSENT, load_rows, where_am_i

# Largest change of a potential since an earlier update, in base 2, that its exponential may carry.
MOST_CHANGE: tl.constexpr = tl.constexpr(24.0)


@triton.jit
def delta_kernel(
    UP, OUT, DELTA, rows, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, ROWS: tl.constexpr
):
    """``delta_i = up_i · out_i``: the row sums of the gradient of the exponent."""
    head, here = where_am_i(rows, ROWS)
    up = load_rows(UP, head, here, rows, WIDTH, BLOCK_W).to(tl.float32)
    out = load_rows(OUT, head, here, rows, WIDTH, BLOCK_W).to(tl.float32)
    tl.store(DELTA + head * rows + here, tl.sum(up * out, 1), mask=here < rows)


@triton.jit
def pull_kernel(
    X, Y, MINE, THEIRS, GRAD, DIRECT, OUT, N, M, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    HAS_DIRECT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``out_i = direct_i - Σ_j grad_j 2^(scale x_i·y_j + mine_i + theirs_j)``."""
    head, rows = where_am_i(N, ROWS)
    x = load_rows(X, head, rows, N, D, BLOCK_D)
    mine = tl.load(MINE + head * N + rows, mask=rows < N, other=ABSENT)
    sums = tl.zeros([ROWS], tl.float32)
    for start in range(0, M, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        y = load_rows(Y, head, columns, M, D, BLOCK_D)
        theirs = tl.load(THEIRS + head * M + columns, mask=columns < M, other=ABSENT)
        grad = tl.load(GRAD + head * M + columns, mask=columns < M, other=0.0)
        scores = tl.dot(x, tl.trans(y), input_precision=PRECISION) * scale
        weights = tl.exp2(scores + (mine[:, None] + theirs[None, :]))
        sums += tl.sum(weights * grad[None, :], 1)
    out = -sums
    if HAS_DIRECT:
        out += tl.load(DIRECT + head * N + rows, mask=rows < N, other=0.0)
    tl.store(OUT + head * N + rows, out, mask=rows < N)


@triton.jit
def value_grad_kernel(
    Q, K, V, UP, F, G, LOG_RATIO, DELTA, DV, GRAD, N, M, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PULL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``dV = Aᵀ up`` and the gradient of g, ``v_j·dV_j``; with PULL less what the rows pull back.

    Rows of the tiles are keys here, and there are N of them; columns are the M queries.
    """
    head, rows = where_am_i(N, ROWS)
    k = load_rows(K, head, rows, N, D, BLOCK_D)
    g = tl.load(G + head * N + rows, mask=rows < N, other=ABSENT) + tl.load(LOG_RATIO + head)
    sums = tl.zeros([ROWS, BLOCK_W], tl.float32)
    pulled = tl.zeros([ROWS], tl.float32)
    for start in range(0, M, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        q = load_rows(Q, head, columns, M, D, BLOCK_D)
        up = load_rows(UP, head, columns, M, WIDTH, BLOCK_W)
        f = tl.load(F + head * M + columns, mask=columns < M, other=ABSENT)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
        weights = tl.exp2(scores + (g[:, None] + f[None, :]))
        sums = tl.dot(weights.to(up.dtype), up, sums, input_precision=PRECISION)
        if PULL:
            delta = tl.load(DELTA + head * M + columns, mask=columns < M, other=0.0)
            pulled += tl.sum(weights * delta[None, :], 1)
    columns = tl.arange(0, BLOCK_W)
    offset, pointers = head * N * WIDTH, rows[:, None] * WIDTH + columns[None, :]
    inside = (rows < N)[:, None] & (columns < WIDTH)[None, :]
    v = tl.load(V + offset + pointers, mask=inside, other=0.0)
    tl.store(DV + offset + pointers, sums.to(DV.dtype.element_ty), mask=inside)
    tl.store(GRAD + head * N + rows, tl.sum(sums * v, 1) - pulled, mask=rows < N)


@triton.jit(do_not_specialize=["heads", "last", "updates"])
def factors_kernel(
    POTENTIALS, GRADS, LOG_RATIO, FACTORS, CHANGE, heads, N, last, updates,
    OF_QUERIES: tl.constexpr, SPLIT: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One side's factor of every update, relative to its last potential; and the largest change.

    Update u has the potentials ``(u - 1) // 2`` of the queries and ``u // 2`` of the keys, and its
    gradient belongs to the queries when u is odd. With SPLIT a factor is the sum of two 16-bit
    numbers, and three columns of either side are its product: high·high + high·low + low·high.
    """
    head = tl.program_id(0).to(tl.int64)
    stride = tl.cast(heads, tl.int64) * N
    change = tl.zeros([BLOCK], tl.float32)
    sign = -tl.exp2(-tl.load(LOG_RATIO + head)) if OF_QUERIES else 1.0
    for start in range(0, N, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        inside = tokens < N
        here = head * N + tokens
        end = tl.load(POTENTIALS + last * stride + here, mask=inside, other=0.0)
        for update in range(1, updates + 1):
            index = (update - 1) // 2 if OF_QUERIES else update // 2
            place = index * stride + here
            moved = tl.load(POTENTIALS + place, mask=inside, other=0.0) - end
            change = tl.maximum(change, tl.abs(tl.where(inside, moved, 0.0)))
            factor = sign * tl.exp2(moved)
            if (update % 2 == 1) == OF_QUERIES:
                factor *= tl.load(GRADS + place, mask=inside, other=0.0)
            out = FACTORS + here * RANK + (update - 1)
            if SPLIT:
                high = factor.to(FACTORS.dtype.element_ty)
                low = (factor - high.to(tl.float32)).to(FACTORS.dtype.element_ty)
                tl.store(out, high, mask=inside)
                tl.store(out + updates, high if OF_QUERIES else low, mask=inside)
                tl.store(out + 2 * updates, low if OF_QUERIES else high, mask=inside)
            else:
                tl.store(out, factor, mask=inside)
        for column in range(3 * updates if SPLIT else updates, RANK):
            tl.store(FACTORS + here * RANK + column, 0.0, mask=inside)
    tl.store(CHANGE + head, tl.max(change, 0))


@triton.jit(do_not_specialize=["heads", "my_last", "their_last", "updates"])
def score_grad_kernel(
    X, Y, X2, Y2, MINE, THEIRS, MY_GRADS, THEIR_GRADS, MY_FACTORS, THEIR_FACTORS, LOG_RATIO,
    CHANGE, DX, heads, N, M, my_last, their_last, updates, scale, to_tokens,
    D: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr,
    RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OF_QUERIES: tl.constexpr,
    FACTORED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``dx_i = to_tokens · Σ_j dC_ij y_j``, from queries to keys or from keys to queries.

    ``dC = A ∘ (x2 y2ᵀ + factors)``, ``A = ratio · 2^(scale x·y + last potentials)``. Heads whose
    potentials changed too much for factors add the updates up exponential by exponential.
    """
    head, rows = where_am_i(N, ROWS)
    change = tl.maximum(tl.load(CHANGE + head), tl.load(CHANGE + heads + head))
    if FACTORED:
        skip = change > MOST_CHANGE
    else:
        skip = change <= MOST_CHANGE
    if skip:
        return
    my_stride, their_stride = tl.cast(heads, tl.int64) * N, tl.cast(heads, tl.int64) * M
    x = load_rows(X, head, rows, N, D, BLOCK_D)
    x2 = load_rows(X2, head, rows, N, WIDTH, BLOCK_W)
    mine = tl.load(MINE + my_last * my_stride + head * N + rows, mask=rows < N, other=ABSENT)
    mine += tl.load(LOG_RATIO + head)
    if FACTORED:
        factors = load_rows(MY_FACTORS, head, rows, N, RANK, RANK)
    sums = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(0, M, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < M
        y = load_rows(Y, head, columns, M, D, BLOCK_D)
        y2 = load_rows(Y2, head, columns, M, WIDTH, BLOCK_W)
        last = THEIRS + their_last * their_stride + head * M
        theirs = tl.load(last + columns, mask=inside, other=ABSENT)
        scores = tl.dot(x, tl.trans(y), input_precision=PRECISION) * scale
        grad = tl.dot(x2, tl.trans(y2), input_precision=PRECISION)
        if FACTORED:
            opposite = load_rows(THEIR_FACTORS, head, columns, M, RANK, RANK)
            grad = tl.dot(factors, tl.trans(opposite), grad, input_precision=PRECISION)
        grad *= tl.exp2(scores + (mine[:, None] + theirs[None, :]))
        if not FACTORED:
            for update in range(1, updates + 1):
                queries, keys = (update - 1) // 2, update // 2
                left = (queries if OF_QUERIES else keys) * my_stride + head * N
                right = (keys if OF_QUERIES else queries) * their_stride + head * M
                a = tl.load(MINE + left + rows, mask=rows < N, other=ABSENT)
                b = tl.load(THEIRS + right + columns, mask=inside, other=ABSENT)
                weights = tl.exp2(scores + (a[:, None] + b[None, :]))
                if (update % 2 == 1) == OF_QUERIES:
                    my_grad = tl.load(MY_GRADS + left + rows, mask=rows < N, other=0.0)
                    grad -= weights * my_grad[:, None]
                else:
                    their_grad = tl.load(THEIR_GRADS + right + columns, mask=inside, other=0.0)
                    grad -= weights * their_grad[None, :]
        sums = tl.dot(grad.to(y.dtype), y, sums, input_precision=PRECISION)
    columns = tl.arange(0, BLOCK_D)
    pointers = DX + head * N * D + (rows[:, None] * D + columns[None, :])
    inside_out = (rows < N)[:, None] & (columns < D)[None, :]
    tl.store(pointers, (sums * to_tokens).to(DX.dtype.element_ty), mask=inside_out)
