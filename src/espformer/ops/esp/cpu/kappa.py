"""The kernel matrix κ of the sorted numbers of one slice, and products with it, for both metrics.

``κ[n, j] = k(|s_n - s_j| · inv_bandwidth)``; kernels are compiled once for both.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from espformer.ops.esp.cpu import absolute, gaussian
from espformer.ops.esp.cpu.compiling import part
from espformer.ops.esp.cpu.simd import LANES
from espformer.ops.esp.exponentials import exponential_sum


def table_of(metric: str, dtype: torch.dtype) -> tuple[np.ndarray, tuple[int, ...]]:
    """The poles of a metric, once for the left and once for the right, and lanes for them.

    The rows are -Re p, -Im p, Re w, Im w, the parts of -w p (left) and w p (right), then ones for
    the left, and ones for the right. The absolute metric has no rows: it needs none.
    """
    lanes = LANES[16 if dtype == torch.float64 else 8]
    number = np.float64 if dtype == torch.float64 else np.float32
    if metric == "absolute":
        return np.zeros((0, 8 * len(lanes)), number), lanes
    found = exponential_sum(metric, dtype)
    poles, weights = np.zeros((2, 4 * len(lanes)), np.complex128)
    poles[: len(found.poles)], weights[: len(found.weights)] = found.poles, found.weights
    slopes, ones, none = weights * poles, np.ones(len(poles)), np.zeros(len(poles))
    rows = [
        (-poles.real, -poles.real), (-poles.imag, -poles.imag),
        (weights.real, weights.real), (weights.imag, weights.imag),
        (-slopes.real, slopes.real), (-slopes.imag, slopes.imag), (ones, none), (none, ones),
    ]  # fmt: skip
    return np.array([np.concatenate(row) for row in rows]).astype(number), lanes


class Kappa(NamedTuple):
    """κ of the n sorted numbers of one side of one slice.

    Few fields: whatever is passed from function to function is compiled again and again.
    """

    n: int
    inv_bandwidth: float
    is_gaussian: bool
    tied: bool  # whether any two numbers are equal; not looked at if it is Gaussian
    points: np.ndarray  # (n,), ascending
    decays: np.ndarray  # (n,): of the absolute metric, see `absolute`
    coefficients: np.ndarray  # of the squared one, see `gaussian`
    scratch: np.ndarray  # for its products
    table: np.ndarray
    lanes: tuple[int, ...]


@part
def set_kappa(
    points, n, inv_bandwidth, hard, average, with_slope, table, lanes, decays, coefficients, scratch
):  # type: ignore[no-untyped-def]
    """The kernel of n sorted numbers; what it consists of is written to the last three."""
    is_gaussian, tied = len(table) > 0 and not hard, False
    if is_gaussian:
        gaussian.set_chunks(
            table, lanes, points, n, inv_bandwidth, with_slope, coefficients, scratch
        )
    else:
        tied = absolute.set_decays(points, n, inv_bandwidth, hard, average, decays)
    return Kappa(
        n, inv_bandwidth, is_gaussian, tied, points, decays, coefficients, scratch, table, lanes
    )


@part
def multiply(kappa, x, order, scale, y, lanes):  # type: ignore[no-untyped-def]
    """``y_n = Σ_j κ[n, j] scale_j x[order_j]``."""
    if kappa.is_gaussian:
        gaussian.multiply(kappa, x, order, scale, y, y[:0], lanes)
    else:
        absolute.multiply(kappa, x, order, scale, y, lanes)


@part
def multiply_with_slope(kappa, x, order, scale, y, slope, lanes):  # type: ignore[no-untyped-def]
    """`multiply`, and its derivative in ``s_n · inv_bandwidth``."""
    if kappa.is_gaussian:
        gaussian.multiply(kappa, x, order, scale, y, slope, lanes)
    elif kappa.tied:
        absolute.multiply_with_slope_of_ties(kappa, x, order, scale, y, slope, lanes)
    else:
        absolute.multiply_with_slope(kappa, x, order, scale, y, slope, lanes)


@part
def multiply_column(kappa, x, y):  # type: ignore[no-untyped-def]
    """``y = κ x`` for one number per rank."""
    if kappa.is_gaussian:
        gaussian.multiply_column(kappa, x, y)
    else:
        absolute.multiply_column(kappa, x, y)


@part
def stretch(kappa, x, x_order, x_scale, p, p_order, p_scale, lanes):  # type: ignore[no-untyped-def]
    """The gradient of ``Σ_n p_n · (κx)_n`` in `inv_bandwidth`, added up pair by pair."""
    if kappa.is_gaussian:
        return gaussian.stretch(kappa, x, x_order, x_scale, p, p_order, p_scale, lanes)
    return absolute.stretch(kappa, x, x_order, x_scale, p, p_order, p_scale, lanes)
