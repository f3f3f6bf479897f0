"""Balanced scales: x with ``x · κx = 1``, in one launch, and their gradient in two.

Damped steps lead to x (`espformer/ops/esp/balancing.py`). The gradient is that of where they lead,
not of the steps, so nothing of them is kept: while ``x · κx`` stays one, a change of κ moves x by

    (I + P) (dx / x) = -x · (dκ x),    P = diag(x) κ diag(x),

and an upstream u asks for the solution of ``(I + P) v = x · u``. The spectrum of ``I + P`` lies in
[1, 2], which is what made the exponents of the steps the best, and they are here too: with
``a = x · v``

    a ← a + ω (x² · (u - κa) - a)    from    a = 2/3 x² · u,

and the gradient of the numbers is the slope of ``-aᵀ κ x`` (the kernel holds -a: that is what the
slope is taken of). It differs from that of the steps by a few 1e-6.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.common.custom_op import operator
from espformer.ops.esp.balancing import chebyshev_exponents
from espformer.ops.esp.triton.column import column_config, differentiable, sorted_slope, walks

# The first step starts from ones, and is a plain square root.
FORWARD = (0.5, *chebyshev_exponents())
BACKWARD = tuple(chebyshev_exponents())


@triton.jit(do_not_specialize=("L",))
def settle_kernel(
    Z, UPSTREAM, SCALE, S, LENGTHS, INVERSE_WIDTH, Y, N, L, EXPONENTS: tl.constexpr,
    STEPS: tl.constexpr, TABLE: tl.constexpr, POLES: tl.constexpr, COMPLEX: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """All steps of one slice: Z becomes x, or -a where there is an UPSTREAM. Y is room for κz."""
    pair = tl.program_id(0).to(tl.int64)
    inverse_width = tl.load(INVERSE_WIDTH + pair // L)
    length = N
    if LENGTHS is not None:
        length = tl.load(LENGTHS + pair // L)
    S += pair * N
    Z += pair * N
    Y += pair * N
    if UPSTREAM is not None:
        UPSTREAM += pair * N
        SCALE += pair * N
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        z = tl.where(n < length, 1.0, 0.0)
        if UPSTREAM is not None:
            x = tl.load(SCALE + n, mask=n < N, other=0.0)
            z = x * x * tl.load(UPSTREAM + n, mask=n < N, other=0.0) * (-2 / 3)
        tl.store(Z + n, z, mask=n < N)
    tl.debug_barrier()
    for step in range(STEPS):
        exponent = EXPONENTS[0]
        for i in tl.static_range(1, STEPS):
            exponent = tl.where(step == i, EXPONENTS[i], exponent)
        walks(S, Z, None, Y, None, length, inverse_width, N, TABLE, POLES, COMPLEX, BLOCK)
        for start in range(0, N, BLOCK):
            n = start + tl.arange(0, BLOCK)
            z = tl.load(Z + n, mask=n < N, other=0.0)
            y = tl.load(Y + n, mask=n < N, other=0.0)
            if UPSTREAM is None:
                sums = tl.where(n < length, z * y, 1.0)
                z *= tl.exp2(-exponent * tl.log2(sums))
            else:
                x = tl.load(SCALE + n, mask=n < N, other=0.0)
                u = tl.load(UPSTREAM + n, mask=n < N, other=0.0)
                z -= exponent * (x * x * (u + y) + z)
            tl.store(Z + n, z, mask=n < N)
        tl.debug_barrier()


@operator("balanced_scales")
def balanced_scales(
    values: Tensor, lengths: Tensor | None, inverse_width: Tensor, metric: str, exact: bool
) -> Tensor:
    """What makes ``diag(x) κ diag(x)`` doubly stochastic, (batch, L, N); zero at padding."""
    x, y = torch.empty_like(values), torch.empty_like(values)
    settle_kernel[(values.shape[0] * values.shape[1],)](
        x, None, None, values, lengths, inverse_width, y, EXPONENTS=FORWARD, STEPS=len(FORWARD),
        **column_config(values, metric, exact),
    )  # fmt: skip
    return x


@operator("balanced_scales_backward")
def balanced_scales_backward(
    upstream: Tensor, scales: Tensor, values: Tensor, inverse_width: Tensor, metric: str,
    exact: bool,
) -> Tensor:  # fmt: skip
    """The gradient of the values."""
    a, y = torch.empty_like(values), torch.empty_like(values)
    settle_kernel[(values.shape[0] * values.shape[1],)](
        a, upstream, scales, values, None, inverse_width, y, EXPONENTS=BACKWARD,
        STEPS=len(BACKWARD), **column_config(values, metric, exact),
    )  # fmt: skip
    return sorted_slope(a, scales, values, inverse_width, metric, exact)


differentiable(balanced_scales, balanced_scales_backward)
