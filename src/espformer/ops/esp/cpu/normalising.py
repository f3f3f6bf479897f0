"""The scales that turn the kernel of sorted numbers into a soft sort: one number per rank.

``S = diag(out) κ diag(in)`` with ``out = 1/κ1``, ``in = 1`` (rows sum to one), or with ``out = in``
from the Chebyshev steps of `balancing` (rows and columns do). The steps are differentiated one by
one, as in torch, so the gradient is exactly that of the computed function.
"""

from __future__ import annotations

from espformer.ops.esp.cpu.compiling import part, stand_alone
from espformer.ops.esp.cpu.kappa import multiply_column
from espformer.ops.esp.cpu.simd import LANES, exp, load, log, store

WIDE = LANES[16]


@part
def power(x, exponent, n, y):  # type: ignore[no-untyped-def]
    """``y = x ** exponent`` for positive x; what lies behind n is overwritten."""
    stand_alone()
    for i in range(0, n, 16):
        store(y, i, exp(exponent * log(load(x, i, WIDE))))


@part
def row_scales(kappa, ones, scale):  # type: ignore[no-untyped-def]
    """``1 / κ1``."""
    multiply_column(kappa, ones, scale)
    for i in range(kappa.n):
        scale[i] = 1 / scale[i]


@part
def balance_steps(kappa, ones, exponents, x, r, spare):  # type: ignore[no-untyped-def]
    """``x_0 = (κ1)^(-1/2)``, ``r_i = x_i κx_i``, ``x_{i+1} = x_i r_i^(-ω_i)``.

    `x` is (steps + 1, n), `r` (steps + 1, n), in whole vectors, with κ1 in the last row.
    """
    stand_alone()
    n = kappa.n
    steps = len(exponents)
    multiply_column(kappa, ones, r[steps])
    power(r[steps], exponents.dtype.type(-0.5), n, x[0])
    for step in range(steps):
        multiply_column(kappa, x[step], r[step])
        for i in range(n):
            r[step, i] *= x[step, i]
        power(r[step], -exponents[step], n, spare)
        for i in range(n):
            x[step + 1, i] = x[step, i] * spare[i]


@part
def balance_gradient(kappa, exponents, x, r, dx, spare, other, pairs, many):  # type: ignore[no-untyped-def]
    """The backward pass of `balance_steps`, from ``dx``, which is overwritten, in whole vectors.

    Every product κx with an upstream gradient p is a pair of columns that contributes to the
    gradient of the points. Pairs are written to blocks of `many` pairs, (blocks, …): of every rank
    first the operands, then the gradients.
    """
    stand_alone()
    n = kappa.n
    steps = len(exponents)
    for step in range(steps - 1, -1, -1):
        block, place, exponent = step // many, step % many, exponents[step]
        for i in range(0, n, 16):
            # dr_i = -ω x_{i+1} / r dx_{i+1}; what κx receives is dr x_i
            before, after = load(x[step], i, WIDE), load(x[step + 1], i, WIDE)
            arrived = after * load(dx, i, WIDE)
            store(spare, i, -exponent * (arrived * before / load(r[step], i, WIDE)))
            store(dx, i, (1 - exponent) * (arrived / before))
        for i in range(n):
            pairs[block, place + 2 * many * i] = x[step, i]
            pairs[block, place + 2 * many * i + many] = spare[i]
        multiply_column(kappa, spare, other)
        for i in range(n):
            dx[i] += other[i]
    half, block, place = exponents.dtype.type(-0.5), steps // many, steps % many
    for i in range(n):
        pairs[block, place + 2 * many * i] = 1
        pairs[block, place + 2 * many * i + many] = half * x[0, i] / r[steps, i] * dx[i]
