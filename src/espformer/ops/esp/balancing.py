"""Symmetric scaling of a kernel to a doubly-stochastic matrix in a fixed, small number of steps.

For a symmetric kernel κ we want x > 0 such that ``P = diag(x) κ diag(x)`` has unit row sums (and so
unit column sums). Damped fixed-point steps ``x ← x · (x · κx)^(-ω)`` change the logarithmic error δ
by ``δ ← (I - ω (I + P)) δ`` to first order. The kernels of soft sorting are positive definite, so P
has its spectrum in [0, 1] and ``I + P`` in [1, 2]: the best ω of a single step is 2/3 (the usual
square root, ω = 1/2, only halves the error), and the best sequence of n steps takes ω as the
inverses of the Chebyshev nodes of [1, 2], which divides the error by ``T_n(3) ≈ 5.83^n / 2``. Eight
steps leave about 1e-6 in the row sums of normal numbers, at every temperature and for both metrics,
and at worst, where most numbers are equal, less than 5e-5 (up to 65,536 of them); eight plain
square roots leave some 1e-3.
"""

from __future__ import annotations

import math

STEPS = 8


def chebyshev_exponents(steps: int = STEPS) -> list[float]:
    """The damping ω of every step, smallest first, so that early steps are the cautious ones."""
    nodes = [math.cos(math.pi * (2 * i + 1) / (2 * steps)) for i in range(steps)]
    return [1 / (1.5 + 0.5 * node) for node in nodes]
