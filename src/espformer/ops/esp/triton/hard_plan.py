"""Hard plans: tokens of equal rank are matched, so a plan is one gather.

The torch twin is :class:`espformer.ops.esp.linear.HardMixing`.

- ``espformer::match_points``: the key that each query is matched with, from their tokens;
- ``espformer::compose_with_inverse``: the same, from two rankings;
- ``espformer::apply_matching``: ``Σ_l weight_l V[match_l]``;
- ``espformer::cross_matching``: ``Σ_i q_i · k[match_l(i)]`` for every slice;
- ``espformer::matching_costs``: ``Σ_i ‖q_i - k[match_l(i)]‖²`` for every slice.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.common.operators import operator, refuse_double_backward
from espformer.ops.common.triton import Launch, Shape, ceil_div, once, power_of_2, width_arguments
from espformer.ops.esp.problem import Problem
from espformer.ops.esp.triton.primitives import program_rows
from espformer.ops.esp.triton.sort import (
    TokenSort,
    any_infinite,
    make_words,
    masked_lengths,
    merge_config,
    merged,
    pack_tokens,
    rank_points,
    sort_config,
    sort_rows,
    sort_words,
    word_index,
)

# Every row is read once per slice. If the rows of a head fit in the L1 cache of a multiprocessor,
# which is several times faster than L2, a program takes so many tokens that it has a multiprocessor
# to itself. Otherwise many small programs are better.
CACHE_BYTES = 160 << 10
MOST_ROWS = 512
MOST_BYTES = 64 << 10
FEW_ROWS = 32
# With fewer programs than about a GPU's multiprocessors, smaller ones are better.
FEWEST_PROGRAMS = 128


@triton.jit(do_not_specialize=("PAIRS",))
def match_kernel(
    bits_ptr,  # (2, B, L, BLOCK), halves of words: queries, then keys
    out_ptr,  # (B, L, N) int32
    weight_ptr,  # (B, L) float32
    N, PAIRS, weight, BITS: tl.constexpr, INFINITY: tl.constexpr, BLOCK: tl.constexpr,
    VECTOR: tl.constexpr, VECTORS: tl.constexpr, DIMS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Sorts a row of queries and one of keys: ``out[token of a query] = key of the same rank``."""
    pair = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    bad = False
    keys = make_words(tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32), BITS)
    queries = make_words(
        tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32), BITS
    )  # not `keys`: the compiler would not see it change below
    for side in range(2):  # a loop, so that the code of the sort is compiled once
        word = make_words(tl.load(bits_ptr + (side * PAIRS + pair) * BLOCK + n), n, BITS)
        bad |= any_infinite(word, BITS, INFINITY)
        queries = keys
        keys = sort_words(word, BLOCK, VECTOR, VECTORS, DIMS, HELD)
    query = word_index(queries, BITS)
    tl.store(out_ptr + pair * N + query, word_index(keys, BITS), mask=query < N)
    tl.store(weight_ptr + pair, tl.where(bad, float("nan"), weight))


@triton.jit(do_not_specialize=("PAIRS", "BLOCKS"))
def match_runs_kernel(
    words_ptr,  # (2, B, L, N) words, in sorted runs of LENGTH
    out_ptr,  # (B, L, N) int32
    weight_ptr,  # (B, L) float32
    N, LENGTH, PAIRS, BLOCKS, BITS: tl.constexpr, INFINITY: tl.constexpr, BLOCK: tl.constexpr,
    DIMS: tl.constexpr,
):  # fmt: skip
    """`match_kernel` for rows of one or two sorted runs: those of all queries, then of all keys.

    The weight becomes NaN if the row contains NaN. The order of programs is that of
    `compose_kernel`.
    """
    pair = (tl.program_id(0) // BLOCKS).to(tl.int64)
    start = tl.program_id(0) % BLOCKS * BLOCK
    n = start + tl.arange(0, BLOCK)
    queries = merged(words_ptr + pair * N, start, N, LENGTH, BLOCK, DIMS)
    keys = merged(words_ptr + (PAIRS + pair) * N, start, N, LENGTH, BLOCK, DIMS)
    query = word_index(queries, BITS)
    tl.store(out_ptr + pair * N + query, word_index(keys, BITS), mask=n < N)
    if any_infinite(queries, BITS, INFINITY) | any_infinite(keys, BITS, INFINITY):
        tl.store(weight_ptr + pair, float("nan"))


@once
def _match_launch(token_sort: TokenSort) -> Launch:
    """Sorts both sides and matches them; rows are as long as one program sorts."""
    words, pairs, tokens = token_sort.words, token_sort.pairs, token_sort.shape[1]
    return Launch(
        match_kernel, (pairs,), N=tokens, PAIRS=pairs, weight=1 / token_sort.count,
        **words.arguments, **sort_config(tokens),
    )  # fmt: skip


@once
def _match_runs_launch(token_sort: TokenSort, length: int) -> Launch:
    """Matches both sides, whose rows are sorted in runs of `length`."""
    words, pairs, tokens = token_sort.words, token_sort.pairs, token_sort.shape[1]
    config = merge_config()
    blocks = ceil_div(tokens, config["BLOCK"])
    return Launch(
        match_runs_kernel, (pairs * blocks,), N=tokens, LENGTH=length, PAIRS=pairs, BLOCKS=blocks,
        **words.arguments, **config,
    )  # fmt: skip


@operator("match_points")
def match_points(
    query: Tensor, key: Tensor, slices: Tensor | None, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The key of the same rank for every query and slice of (batch, N, m) tokens of one dtype.

    Returns the matches, (batch, L, N) in int32, and the weights of a plain mean, (batch, L): one
    over the number of slices, but NaN where the slice of the queries or the keys holds NaN or an
    infinity. Padded tokens are the same on both sides and are matched with each other.
    """
    token_sort, packed = pack_tokens(query, key, slices, mask, scale)
    shape = query.shape[0], token_sort.count, query.shape[1]
    matches = torch.empty(shape, device=query.device, dtype=torch.int32)
    weights = torch.empty(shape[:2], device=query.device, dtype=torch.float32)
    if token_sort.at_once:
        _match_launch(token_sort)(packed, matches, weights)
    else:
        weights.fill_(1 / token_sort.count)
        packed, length = sort_rows(packed, runs=2)
        _match_runs_launch(token_sort, length)(packed, matches, weights)
    return matches, weights


@match_points.register_fake
def _(
    query: Tensor, key: Tensor, slices: Tensor | None, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    batch, tokens, width = query.shape
    count = width if slices is None else slices.shape[-2]
    matches = query.new_empty((batch, count, tokens), dtype=torch.int32)
    return matches, query.new_empty((batch, count), dtype=torch.float32)


@triton.jit(do_not_specialize=("BLOCKS",))
def compose_kernel(
    from_ptr,  # (rows, N) int32
    to_ptr,  # (rows, N) int32, or None: the identity
    out_ptr,  # (rows, N) int32
    N, BLOCKS, BLOCK: tl.constexpr,
):  # fmt: skip
    """``out[from_n] = to_n``.

    Neighbouring programs write to the same row, so that the L2 cache combines their scattered
    writes.
    """
    row = (tl.program_id(0) // BLOCKS).to(tl.int64) * N
    n = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    to = n if to_ptr is None else tl.load(to_ptr + row + n, mask=n < N, other=0)
    tl.store(out_ptr + row + tl.load(from_ptr + row + n, mask=n < N, other=0), to, mask=n < N)


@once
def _compose_launch(rows: int, tokens: int) -> Launch:
    block = min(1024, power_of_2(tokens))
    blocks = ceil_div(tokens, block)
    return Launch(compose_kernel, (rows * blocks,), N=tokens, BLOCKS=blocks, BLOCK=block)


@operator("compose_with_inverse")
def compose_with_inverse(order: Tensor, to: Tensor | None) -> Tensor:
    """The permutations ``to ∘ order⁻¹`` along the last dimension, in int32; None: the identity.

    For two rankings this is the key that each query is matched with, for one the rank of each
    token.
    """
    out = torch.empty_like(order)
    tokens = order.shape[-1]
    _compose_launch(order.numel() // tokens, tokens)(order, to, out)
    return out


@compose_with_inverse.register_fake
def _(order: Tensor, to: Tensor | None) -> Tensor:
    return order.new_empty(order.shape)


@triton.jit
def matched_rows(x_ptr, j, d, WIDTH, mask):
    """Rows of the tokens j, (tokens, columns), in float32."""
    return tl.load(x_ptr + (j[:, None] * WIDTH + d[None, :]), mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=("L", "BLOCKS", "D8"))
def gather_kernel(
    x_ptr,  # (B, N, WIDTH)
    index_ptr,  # (B, L, N) int32
    weight_ptr,  # (B, L) float32
    out_ptr,  # (B, N, WIDTH)
    N, L, BLOCKS, D8, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``out_i = Σ_l weight_l x[index[l, i]]``."""
    WIDTH = D if D > 0 else D8 * 8
    head, i, d, columns = program_rows(N, BLOCKS, WIDTH, BLOCK_N, BLOCK_D)
    total = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    index_ptr += head * L * N
    x_ptr += head * N * WIDTH
    j = tl.load(index_ptr + i, mask=i < N, other=0)
    for l in range(L):
        x = matched_rows(x_ptr, j, d, WIDTH, columns)
        index_ptr += N
        # Load the index one slice ahead: the address of a row depends on it.
        j = tl.load(index_ptr + i, mask=(i < N) & (l + 1 < L), other=0)
        total += x * tl.load(weight_ptr + head * L + l)
    rows_ptr = out_ptr + (head * N + i) * WIDTH
    tl.store(
        rows_ptr[:, None] + d[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=(i[:, None] < N) & columns,
    )


@triton.jit(do_not_specialize=("L", "BLOCKS", "D8"))
def pair_kernel(
    x_ptr,  # (B, N, WIDTH)
    y_ptr,  # (B, N, WIDTH)
    index_ptr,  # (B, L, N) int32
    out_ptr,  # (B, L, BLOCKS) float32
    N, L, BLOCKS, D8, D: tl.constexpr, DISTANCE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``out_l = Σ_i x_i · y[index[l, i]]`` or ``Σ_i ‖x_i - y[index[l, i]]‖²``, in parts.

    One partial sum per block of tokens.
    """
    WIDTH = D if D > 0 else D8 * 8
    head, i, d, columns = program_rows(N, BLOCKS, WIDTH, BLOCK_N, BLOCK_D)
    inside = (i[:, None] < N) & columns
    rows_ptr = x_ptr + (head * N + i) * WIDTH
    x = tl.load(rows_ptr[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    out_ptr += head * L * BLOCKS + tl.program_id(0) % BLOCKS
    index_ptr += head * L * N
    y_ptr += head * N * WIDTH
    j = tl.load(index_ptr + i, mask=i < N, other=0)
    for l in range(L):
        y = matched_rows(y_ptr, j, d, WIDTH, inside)
        index_ptr += N
        j = tl.load(index_ptr + i, mask=(i < N) & (l + 1 < L), other=0)
        if DISTANCE:
            product = (x - y) * (x - y)
        else:
            product = x * y
        tl.store(out_ptr + l * BLOCKS, tl.sum(tl.sum(product, 1), 0))


def _tiles(batch: int, tokens: int, width: int, bytes_each: int) -> tuple[int, dict[str, Any]]:
    """The number of programs per head, and their launch configuration."""
    block_d = power_of_2(width)
    row = block_d * bytes_each
    most = min(MOST_ROWS, MOST_BYTES // row) if tokens * row <= CACHE_BYTES else FEW_ROWS
    block_n = max(1, min(most, power_of_2(tokens)))
    while block_n > FEW_ROWS and batch * ceil_div(tokens, block_n) < FEWEST_PROGRAMS:
        block_n //= 2
    warps = min(32, max(4, block_n * row // 2048))
    config = {**width_arguments(width), "BLOCK_N": block_n, "BLOCK_D": block_d, "num_warps": warps}
    return ceil_div(tokens, block_n), config


@once
def _gather_launch(shape: Shape, width: int, bytes_each: int) -> Launch:
    batch, slices, tokens = shape
    blocks, config = _tiles(batch, tokens, width, bytes_each)
    return Launch(gather_kernel, (batch * blocks,), N=tokens, L=slices, BLOCKS=blocks, **config)


@once
def _pair_launch(shape: Shape, width: int, bytes_each: int, distance: bool) -> tuple[int, Launch]:
    """How many partial sums there are of every slice, and what makes them."""
    batch, slices, tokens = shape
    blocks, config = _tiles(batch, tokens, width, bytes_each)
    return blocks, Launch(
        pair_kernel, (batch * blocks,), N=tokens, L=slices, BLOCKS=blocks, DISTANCE=distance,
        **config,
    )  # fmt: skip


def gather_sum(x: Tensor, index: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``Σ_l weight_l x[index[l, i]]``: x (batch, N, d), index (batch, L, N), weight (batch, L)."""
    out = torch.empty_like(x, dtype=dtype)
    _gather_launch(index.shape, x.shape[-1], x.element_size())(x, index, weight, out)
    return out


def _gather_pairs(x: Tensor, y: Tensor, index: Tensor, distance: bool) -> Tensor:
    blocks, launch = _pair_launch(index.shape, x.shape[-1], x.element_size(), distance)
    partial = torch.empty(*index.shape[:2], blocks, device=x.device, dtype=torch.float32)
    launch(x, y, index, partial)
    return partial.sum(-1)


def gather_dot(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    """``Σ_i x_i · y[index[l, i]]`` for every slice: (batch, L)."""
    return _gather_pairs(x, y, index, False)


def gather_distance(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    """``Σ_i ‖x_i - y[index[l, i]]‖²`` for every slice: (batch, L)."""
    return _gather_pairs(x, y, index, True)


@operator("apply_matching")
def apply_matching(value: Tensor, weight: Tensor, matches: Tensor) -> Tensor:
    """``Σ_l weight_l V[matches[l, i]]``."""
    return gather_sum(value, matches, weight, value.dtype)


@apply_matching.register_fake
def _(value: Tensor, weight: Tensor, matches: Tensor) -> Tensor:
    return value.new_empty(value.shape)


@operator("cross_matching")
def cross_matching(query: Tensor, key: Tensor, matches: Tensor) -> Tensor:
    """``Σ_i q_i · k[matches[l, i]]``: (batch, L)."""
    return gather_dot(query, key, matches)


@cross_matching.register_fake
def _(query: Tensor, key: Tensor, matches: Tensor) -> Tensor:
    return query.new_empty(matches.shape[:2], dtype=torch.float32)


def _matching_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


@refuse_double_backward("espformer::apply_matching")
def _matching_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    value, weight, matches = ctx.saved_tensors
    needs_value, needs_weight, _ = ctx.needs_input_grad
    upstream = grads[0].to(value.dtype)
    d_value = None
    if needs_value:
        d_value = apply_matching(upstream, weight, compose_with_inverse(matches, None))
    d_weight = cross_matching(upstream, value, matches) if needs_weight else None
    return d_value, d_weight, None


apply_matching.register_autograd(_matching_backward, setup_context=_matching_setup)


@operator("matching_costs")
def matching_costs(query: Tensor, key: Tensor, matches: Tensor) -> Tensor:
    """``Σ_i ‖q_i - k[matches[l, i]]‖²``: (batch, L)."""
    return gather_distance(query, key, matches)


@matching_costs.register_fake
def _(query: Tensor, key: Tensor, matches: Tensor) -> Tensor:
    return query.new_empty(matches.shape[:2], dtype=torch.float32)


@operator("matching_costs_backward")
def matching_costs_backward(
    upstream: Tensor, mine: Tensor, theirs: Tensor, matches: Tensor
) -> Tensor:
    """``2 Σ_l upstream_l (mine_i - theirs[matches[l, i]])`` in the dtype of `mine`."""
    matched = gather_sum(theirs, matches, upstream, torch.float32)
    return (upstream.sum(-1).view(-1, 1, 1) * mine - matched).mul_(2).to(mine.dtype)


@matching_costs_backward.register_fake
def _(upstream: Tensor, mine: Tensor, theirs: Tensor, matches: Tensor) -> Tensor:
    return mine.new_empty(mine.shape)


@refuse_double_backward("espformer::matching_costs")
def _matching_costs_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    query, key, matches = ctx.saved_tensors
    needs_query, needs_key, _ = ctx.needs_input_grad
    d_query = matching_costs_backward(grads[0], query, key, matches) if needs_query else None
    d_key = None
    if needs_key:
        d_key = matching_costs_backward(grads[0], key, query, compose_with_inverse(matches, None))
    return d_query, d_key, None


matching_costs.register_autograd(_matching_costs_backward, setup_context=_matching_setup)


def attend(problem: Problem, value: Tensor) -> Tensor:
    """``N · G V`` for stable ties and as many queries as keys; all NaN in a head that holds one."""
    query, key, mask = problem.query, problem.key, problem.query_mask
    matches, mean_weights = _matches(problem)
    costs = None
    if problem.options.inverse_temperature:
        lengths = query.shape[-2] if mask is None else mask.sum(-1, keepdim=True).clamp(min=1)
        costs = matching_costs(query, key, matches) * (problem.scale**2 / lengths)
        if problem.slices is not None:
            costs = costs + mean_weights * 0  # NaN in the slices does not show in distances
    weights = problem.slice_weights(costs)
    if weights is None:
        weights = mean_weights
    elif costs is None:  # NaN shows in distances, and in the plain mean
        weights = weights + mean_weights * 0
    return apply_matching(value, weights, matches)


def _matches(problem: Problem) -> tuple[Tensor, Tensor]:
    """The key that each query is matched with, (batch, L, N) in int32, and the weights of a plain
    mean.
    """
    with torch.no_grad():  # a permutation has no gradient
        query, key, slices, scale = problem.query, problem.key, problem.slices, problem.scale
        masks = problem.query_mask, problem.key_mask
        if query.dtype == key.dtype and masks[0] is masks[1]:
            found: tuple[Tensor, Tensor] = match_points(query, key, slices, masks[0], scale)
            return found
        sides = zip((query, key), masks, strict=True)
        ranked = [rank_points(x, slices, mask, masked_lengths(mask), scale) for x, mask in sides]
        (q_points, q_order), (k_points, k_order) = ranked
        # NaN if one side holds it.
        weights = (q_points[..., 0] + k_points[..., 0]) * 0 + 1 / q_order.shape[1]
        return compose_with_inverse(q_order, k_order), weights
