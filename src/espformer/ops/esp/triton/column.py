"""Products of the sorted kernel with one column per slice: normalisers, and slopes.

A column is too thin for the tensor cores, so this file walks along the ranks: blocks of ranks are
scanned in parallel (``tl.associative_scan`` of (decay, sum) pairs), and a running state goes from
block to block. Per pole, with ``a_n = exp(-p (s_n - s_{n-1}))``,

    f_n = a_n (f_{n-1} + x_{n-1})  (rightwards),    b_n = a_{n+1} (b_{n+1} + x_{n+1})  (leftwards),
    (κx)_n = x_n + Re Σ_p w (f_n + b_n),             (κ'x)_n = Re Σ_p w p (b_n - f_n).

Sums leave the rank itself out: far from all others, what they are is far below the last digit of x.
The absolute metric leaves equal numbers out of κ' by scanning them apart, with decay one where the
number stays and zero where it changes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.common.autograd import refuse_double_backward
from espformer.ops.common.custom_op import Operator, operator
from espformer.ops.common.sizes import power_of_2
from espformer.ops.esp.triton.instructions import rotation
from espformer.ops.esp.triton.launch import exponentials

# Ranks that a walk takes at once: four warps' worth, or where there are so many walks that one warp
# each fills the GPU, one's, which needs no barriers.
BLOCK, CROWDED_BLOCK, LEAST_BLOCK = 1024, 256, 32
CROWD = 4096


@triton.jit
def real_step(a, u, b, v):
    return a * b, b * u + v


@triton.jit
def real_steps(a, u, x, b, v, y):
    return a * b, b * u + v, b * x + y


@triton.jit
def complex_step(a_re, a_im, u_re, u_im, b_re, b_im, v_re, v_im):
    return (
        a_re * b_re - a_im * b_im,
        a_re * b_im + a_im * b_re,
        b_re * u_re - b_im * u_im + v_re,
        b_re * u_im + b_im * u_re + v_im,
    )


@triton.jit
def complex_steps(
    a_re, a_im, u_re, u_im, x_re, x_im, b_re, b_im, v_re, v_im, y_re, y_im
):  # fmt: skip
    return (
        a_re * b_re - a_im * b_im,
        a_re * b_im + a_im * b_re,
        b_re * u_re - b_im * u_im + v_re,
        b_re * u_im + b_im * u_re + v_im,
        b_re * x_re - b_im * x_im + y_re,
        b_re * x_im + b_im * x_re + y_im,
    )


@triton.jit
def last_of(x, BACK: tl.constexpr, BLOCK: tl.constexpr):
    """The entry that the next block starts from."""
    last: tl.constexpr = 0 if BACK else BLOCK - 1
    return tl.sum(tl.where(tl.arange(0, BLOCK) == last, x, 0.0), 0, keep_dims=True)


@triton.jit
def before(n, N, BACK: tl.constexpr):
    """The ranks that a walk came from, and whether there are any."""
    if BACK:
        return n + 1, n < N - 1
    return n - 1, (n > 0) & (n < N)


@triton.jit
def real_run(u, x, a, left, states, BOTH: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of what came before, going on from states, and the states after; of x too if BOTH.

    u and x are those of the ranks before, `left` is what is left of the states at a rank.
    """
    if BOTH:
        _, f, g = tl.associative_scan((a, a * u, a * x), 0, real_steps, reverse=BACK)
        f += left * states[0]
        g += left * states[1]
        after = (last_of(f, BACK, BLOCK), last_of(g, BACK, BLOCK))
    else:
        _, f = tl.associative_scan((a, a * u), 0, real_step, reverse=BACK)
        f += left * states[0]
        g = f
        after = (last_of(f, BACK, BLOCK),)
    return f, g, after


@triton.jit
def turned(f_re, f_im, d_re, d_im, s_re, s_im):
    """f + d s, of complex numbers."""
    return f_re + d_re * s_re - d_im * s_im, f_im + d_re * s_im + d_im * s_re


@triton.jit
def complex_run(
    u, x, a_re, a_im, left_re, left_im, states,
    BOTH: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """:func:`real_run` for a complex pole."""
    if BOTH:
        _, _, f_re, f_im, g_re, g_im = tl.associative_scan(
            (a_re, a_im, a_re * u, a_im * u, a_re * x, a_im * x), 0, complex_steps, reverse=BACK
        )
        f_re, f_im = turned(f_re, f_im, left_re, left_im, states[0], states[1])
        g_re, g_im = turned(g_re, g_im, left_re, left_im, states[2], states[3])
        after = (last_of(f_re, BACK, BLOCK), last_of(f_im, BACK, BLOCK))
        after = after + (last_of(g_re, BACK, BLOCK), last_of(g_im, BACK, BLOCK))
    else:
        _, _, f_re, f_im = tl.associative_scan(
            (a_re, a_im, a_re * u, a_im * u), 0, complex_step, reverse=BACK
        )
        f_re, f_im = turned(f_re, f_im, left_re, left_im, states[0], states[1])
        g_re, g_im = f_re, f_im
        after = (last_of(f_re, BACK, BLOCK), last_of(f_im, BACK, BLOCK))
    return f_re, f_im, g_re, g_im, after


@triton.jit
def pole_entry(TABLE: tl.constexpr, WHICH: tl.constexpr, pole, POLES: tl.constexpr):
    """One of the four numbers that the table has for each pole: weight and pole, Re and Im."""
    found = TABLE[WHICH]
    for i in tl.static_range(1, POLES):
        found = tl.where(pole == i, TABLE[4 * i + WHICH], found)
    return found


@triton.jit
def no_states(BOTH: tl.constexpr, COMPLEX: tl.constexpr):
    """What a walk starts with: states of u, of x if BOTH; for a real pole then also of ties."""
    states = ()
    for _ in tl.static_range((4 if BOTH else 2) if COMPLEX else (4 if BOTH else 1)):
        states = states + (tl.zeros((1,), tl.float32),)
    return states


@triton.jit
def start_of(step, N, BACK: tl.constexpr, BLOCK: tl.constexpr):
    """The first rank of the block that a walk comes to in that step."""
    return (tl.cdiv(N, BLOCK) - 1 - step if BACK else step) * BLOCK


@triton.jit
def ranks_of(step, N, BACK: tl.constexpr, BLOCK: tl.constexpr):
    """All ranks of that block."""
    return start_of(step, N, BACK, BLOCK) + tl.arange(0, BLOCK)


@triton.jit
def decayed(p_re, p_im, x):
    """``exp(-p x)``, real and imaginary part; zero far away, where angles would be large."""
    capped = tl.minimum(x, 40.0)
    size = tl.where(x <= 40.0, tl.exp(-p_re * capped), 0.0)
    re, im = rotation(p_im * capped, EXACT=True)
    return size * re, size * im


@triton.jit
def shares(
    u, x, S, step, N, inverse_width, states, pole, BACK: tl.constexpr, BOTH: tl.constexpr,
    TABLE: tl.constexpr, POLES: tl.constexpr, COMPLEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What one pole in one direction adds to κu, κx, κ'u and κ'x in one step of a walk.

    The ranks themselves are left out, and u and x are those of the ranks before. And the states
    after it. x and slopes are only looked at if BOTH.
    """
    n = ranks_of(step, N, BACK, BLOCK)
    m, linked = before(n, N, BACK)
    here = tl.load(S + tl.minimum(n, N - 1))
    there = tl.load(S + tl.maximum(tl.minimum(m, N - 1), 0))
    gap = tl.abs(here - there)
    # States come from the rank before the block. What is left of them at a rank follows from the
    # numbers, not from all the steps in between, whose errors would add up.
    edge = start_of(step, N, BACK, BLOCK) + (BLOCK if BACK else -1)
    way = tl.abs(here - tl.load(S + tl.maximum(tl.minimum(edge, N - 1), 0)))
    if COMPLEX:
        w_re, w_im = pole_entry(TABLE, 0, pole, POLES), pole_entry(TABLE, 1, pole, POLES)
        p_re, p_im = pole_entry(TABLE, 2, pole, POLES), pole_entry(TABLE, 3, pole, POLES)
        v_re = w_re * p_re - w_im * p_im
        v_im = w_re * p_im + w_im * p_re
        a_re, a_im = decayed(p_re, p_im, tl.where(linked, gap * inverse_width, float("inf")))
        left_re, left_im = decayed(p_re, p_im, way * inverse_width)
        f_re, f_im, g_re, g_im, after = complex_run(
            u, x, a_re, a_im, left_re, left_im, states, BOTH, BACK, BLOCK
        )
        ku = w_re * f_re - w_im * f_im
        kx = w_re * g_re - w_im * g_im
        u_slope = v_re * f_re - v_im * f_im
        x_slope = v_re * g_re - v_im * g_im
    else:
        decay, left = tl.exp(-gap * inverse_width), tl.exp(-way * inverse_width)
        decay = tl.where(linked, decay, 0.0)
        own = states[:2] if BOTH else states
        ku, kx, after = real_run(u, x, decay, left, own, BOTH, BACK, BLOCK)
        u_slope, x_slope = ku, kx
        if BOTH:  # equal numbers are left out
            same, left = tl.where(linked & (gap == 0.0), 1.0, 0.0), tl.where(way == 0.0, 1.0, 0.0)
            u_tied, x_tied, end = real_run(u, x, same, left, states[2:], BOTH, BACK, BLOCK)
            u_slope = ku - u_tied
            x_slope = kx - x_tied
            after = after + end
    if not BACK:
        u_slope = -u_slope
        x_slope = -x_slope
    return ku, kx, u_slope * inverse_width, x_slope * inverse_width, after


@triton.jit
def operands(X, P, Y, n, inside, length):
    """u and x of :func:`walk` at ranks n."""
    if X is not None:
        x = tl.load(X + n, mask=inside, other=0.0)
        u = x if P is None else tl.load(P + n, mask=inside, other=0.0)
    elif P is None:
        x = tl.where(inside & (n < length), 1.0, 0.0)
        u = x
    else:
        scale = tl.load(Y + n, mask=inside, other=0.0)
        x = tl.where(scale == 0.0, 0.0, 1.0)
        u = tl.load(P + n, mask=inside, other=0.0) * (-scale * scale)
    return u, x


@triton.jit
def walk(
    S, X, P, Y, SLOPE, length, inverse_width, N, pole, BACK: tl.constexpr, TABLE: tl.constexpr,
    POLES: tl.constexpr, COMPLEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One pole in one direction; every walk but the first adds its share of ``κx`` to Y.

    With P: of ``p · κ'x + x · κ'p`` to SLOPE instead.

    Without X, x is one below `length` and zero from there on, and Y becomes one over ``κx``, or
    zero; with P, Y is that already, and P its gradient, and x is one where Y is not zero.
    """
    added = (pole > 0) | BACK
    states = no_states(P is not None, COMPLEX)
    for step in range(tl.cdiv(N, BLOCK)):
        n = ranks_of(step, N, BACK, BLOCK)
        inside = n < N
        u, x = operands(X, P, Y, n, inside, length)
        m, linked = before(n, N, BACK)
        u_before, x_before = operands(X, P, Y, m, linked, length)
        y, _, u_slope, x_slope, states = shares(
            u_before, x_before, S, step, N, inverse_width, states, pole, BACK, P is not None, TABLE,
            POLES, COMPLEX, BLOCK,
        )  # fmt: skip
        if P is not None:
            slope = u * x_slope + x * u_slope
            slope += tl.load(SLOPE + n, mask=inside & added, other=0.0)
            tl.store(SLOPE + n, slope, mask=inside)
        else:
            y += tl.where(added, tl.load(Y + n, mask=inside & added, other=0.0), x)
            if BACK and X is None:
                one_over = tl.where(n < length, 1.0 / tl.where(n < length, y, 1.0), 0.0)
                y = tl.where(pole == POLES - 1, one_over, y)
            tl.store(Y + n, y, mask=inside)


@triton.jit
def walks(
    S, X, P, Y, SLOPE, length, inverse_width, N, TABLE: tl.constexpr, POLES: tl.constexpr,
    COMPLEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every pole in both directions; then Y, or SLOPE, is whole."""
    for back in tl.static_range(2):
        for pole in range(POLES):
            walk(
                S, X, P, Y, SLOPE, length, inverse_width, N, pole, back == 1, TABLE, POLES,
                COMPLEX, BLOCK,
            )  # fmt: skip
            tl.debug_barrier()  # the next walk reads what this one has written


@triton.jit(do_not_specialize=("L",))
def column_kernel(
    X, P, S, LENGTHS, INVERSE_WIDTH, Y, SLOPE, N, L, TABLE: tl.constexpr, POLES: tl.constexpr,
    COMPLEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalisers of one slice, or a slope; :func:`walk` says which."""
    pair = tl.program_id(0).to(tl.int64)
    length = N
    if LENGTHS is not None:
        length = tl.load(LENGTHS + pair // L)
    if X is not None:
        X += pair * N
    if Y is not None:
        Y += pair * N
    if P is not None:
        P += pair * N
        SLOPE += pair * N
    inverse_width = tl.load(INVERSE_WIDTH + pair // L)
    walks(S + pair * N, X, P, Y, SLOPE, length, inverse_width, N, TABLE, POLES, COMPLEX, BLOCK)


def column_config(values: Tensor, metric: str, exact: bool) -> dict[str, Any]:
    """What kernels that walk along the ranks are told about them and about κ.

    `exact` where rows are float32.
    """
    table = exponentials(metric, exact)
    numbers = tuple(
        number
        for w, p in zip(table.weights, table.poles, strict=True)
        for number in (complex(w).real, complex(w).imag, complex(p).real, complex(p).imag)
    )
    batch, slices, ranks = values.shape
    most = BLOCK if batch * slices < CROWD else CROWDED_BLOCK
    block = min(most, max(LEAST_BLOCK, power_of_2(ranks)))
    return {
        "N": ranks, "L": slices, "TABLE": numbers, "POLES": len(table.poles),
        "COMPLEX": metric != "absolute", "BLOCK": block,
        "num_warps": max(1, block // 256),
    }  # fmt: skip


def sorted_slope(
    p: Tensor, x: Tensor, values: Tensor, inverse_width: Tensor, metric: str, exact: bool
) -> Tensor:
    """``p · κ'x + x · κ'p``: the gradient of ``pᵀ κ x`` in the values."""
    slope = torch.empty_like(values)
    column_kernel[(values.shape[0] * values.shape[1],)](
        x, p, values, None, inverse_width, None, slope,
        **column_config(values, metric, exact),
    )  # fmt: skip
    return slope


def width_gradient(d_values: Tensor, values: Tensor, inverse_width: Tensor) -> Tensor:
    """The gradient of the inverse width, (batch,), from that of the numbers that it multiplies."""
    # Forces cancel pairwise: centred numbers and double sums keep what is left of them.
    centred = values - values.mean(-1, keepdim=True)
    total = (d_values * centred).sum((1, 2), dtype=torch.float64)
    return (total / inverse_width).to(d_values.dtype)


def differentiable(scales: Operator, backward: Operator) -> None:
    """Registers the rules of scales that make a soft sort stochastic in one way or another.

    `scales` takes (values, lengths, inverse_width, metric, exact); `backward` takes its upstream
    and its result with the same, but for the lengths: where there is padding, scales are zero.
    """

    def empty(values: Tensor, *_: Any) -> Tensor:
        return values.new_empty(values.shape)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        values, _, width, ctx.metric, ctx.exact = inputs
        ctx.save_for_backward(output, values, width)

    @refuse_double_backward(f"espformer::{scales.name}")
    def gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found, values, width = ctx.saved_tensors
        slope = backward(grads[0], found, values, width, ctx.metric, ctx.exact)
        d_width = width_gradient(slope, values, width) if ctx.needs_input_grad[2] else None
        return slope, None, d_width, None, None

    scales.register_fake(empty)
    backward.register_fake(empty)
    scales.register_autograd(gradients, setup_context=setup)


@operator("row_scales")
def row_scales(
    values: Tensor, lengths: Tensor | None, inverse_width: Tensor, metric: str, exact: bool
) -> Tensor:
    """One over ``κ 1``, what makes a soft sort row-stochastic, (batch, L, N); zero at padding."""
    y = torch.empty_like(values)
    column_kernel[(values.shape[0] * values.shape[1],)](
        None, None, values, lengths, inverse_width, y, None,
        **column_config(values, metric, exact),
    )  # fmt: skip
    return y


@operator("row_scales_backward")
def row_scales_backward(
    upstream: Tensor, scales: Tensor, values: Tensor, inverse_width: Tensor, metric: str,
    exact: bool,
) -> Tensor:  # fmt: skip
    """The gradient of the values."""
    slope = torch.empty_like(values)
    column_kernel[(values.shape[0] * values.shape[1],)](
        None, upstream, values, None, inverse_width, scales, slope,
        **column_config(values, metric, exact),
    )  # fmt: skip
    return slope


differentiable(row_scales, row_scales_backward)
