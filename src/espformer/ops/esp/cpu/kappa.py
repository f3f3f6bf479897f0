"""The kernel matrix κ of the sorted numbers of one slice, and products with it, for both metrics.

``κ[n, j] = k(|s_n - s_j| · inv_bandwidth)``. The metric is part of a kernel's type, through the
lanes for its poles (the absolute metric has none). So code for the squared metric is compiled only
if it is used.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba.core.extending import overload

from espformer.ops.esp.cpu import absolute, dense, gaussian
from espformer.ops.esp.cpu.compiling import PART_OPTIONS
from espformer.ops.esp.cpu.simd import LANES
from espformer.ops.esp.exponentials import exponential_sum


@cache
def table_of(metric: str, dtype: torch.dtype) -> tuple[np.ndarray, tuple[int, ...]]:
    """The poles of a metric, once for the left and once for the right, and lanes for them.

    The rows are -Re p, -Im p, Re w, Im w, the parts of -w p (left) and w p (right), then ones for
    the left, and ones for the right. The absolute metric has neither rows nor lanes.
    """
    number = np.float64 if dtype == torch.float64 else np.float32
    if metric == "absolute":
        return np.zeros((0, 0), number), ()
    lanes = LANES[16 if dtype == torch.float64 else 8]
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

    It has few fields, because passing fields from function to function takes compile time.
    """

    n: int
    inv_bandwidth: float
    tied: bool  # whether any two numbers are equal; the absolute metric asks
    points: np.ndarray  # (n,), ascending
    decays: np.ndarray  # (n,): of the absolute metric, see `absolute`
    coefficients: np.ndarray  # of the squared one, see `gaussian`
    scratch: np.ndarray  # for its products
    table: np.ndarray
    lanes: tuple[int, ...]


def _is_squared(owner: Any) -> bool:
    """Whether the type of a `Kappa`, or of the settings that one is made with, has poles."""
    field = "lanes" if "lanes" in owner.fields else "poles"
    return len(owner.types[owner.fields.index(field)]) > 0


def set_kappa(settings, points, n, inv_bandwidth, decays, coefficients, scratch):  # type: ignore[no-untyped-def]
    """The kernel of n sorted numbers; its parts are written to the last three arguments."""


@overload(set_kappa, jit_options=PART_OPTIONS)
def _set_kappa(settings, points, n, inv_bandwidth, decays, coefficients, scratch):  # type: ignore[no-untyped-def]
    def of_absolute(settings, points, n, inv_bandwidth, decays, coefficients, scratch):  # type: ignore[no-untyped-def]
        tied = absolute.set_decays(
            points, n, inv_bandwidth, settings.hard, settings.average, decays
        )
        return Kappa(
            n, inv_bandwidth, tied, points, decays, coefficients, scratch, settings.table,
            settings.poles,
        )  # fmt: skip

    def of_squared(settings, points, n, inv_bandwidth, decays, coefficients, scratch):  # type: ignore[no-untyped-def]
        gaussian.set_chunks(
            settings.table, settings.poles, points, n, inv_bandwidth, settings.slopes,
            coefficients, scratch,
        )  # fmt: skip
        return Kappa(
            n, inv_bandwidth, False, points, decays, coefficients, scratch, settings.table,
            settings.poles,
        )  # fmt: skip

    return of_squared if _is_squared(settings) else of_absolute


def multiply(kappa, x, order, scale, y, lanes):  # type: ignore[no-untyped-def]
    """``y_n = Σ_j κ[n, j] scale_j x[order_j]``."""


@overload(multiply, jit_options=PART_OPTIONS)
def _multiply(kappa, x, order, scale, y, lanes):  # type: ignore[no-untyped-def]
    def of_squared(kappa, x, order, scale, y, lanes):  # type: ignore[no-untyped-def]
        gaussian.multiply(kappa, x, order, scale, y, y[:0], lanes)

    return of_squared if _is_squared(kappa) else absolute.multiply.py_func


def multiply_with_slope(kappa, x, order, scale, y, slope, lanes):  # type: ignore[no-untyped-def]
    """`multiply`, and its derivative in ``s_n · inv_bandwidth``."""


@overload(multiply_with_slope, jit_options=PART_OPTIONS)
def _multiply_with_slope(kappa, x, order, scale, y, slope, lanes):  # type: ignore[no-untyped-def]
    def of_absolute(kappa, x, order, scale, y, slope, lanes):  # type: ignore[no-untyped-def]
        if kappa.tied:
            absolute.multiply_with_slope_of_ties(kappa, x, order, scale, y, slope, lanes)
        else:
            absolute.multiply_with_slope(kappa, x, order, scale, y, slope, lanes)

    return gaussian.multiply.py_func if _is_squared(kappa) else of_absolute


def multiply_column(kappa, x, y):  # type: ignore[no-untyped-def]
    """``y = κ x`` for one number per rank."""


@overload(multiply_column, jit_options=PART_OPTIONS)
def _multiply_column(kappa, x, y):  # type: ignore[no-untyped-def]
    if "matrix" in kappa.fields:
        return dense.multiply_column.py_func
    return (gaussian if _is_squared(kappa) else absolute).multiply_column.py_func


def multiply_column_with_slope(kappa, x, y, slope):  # type: ignore[no-untyped-def]
    """`multiply_column`, and its derivative in ``s_n · inv_bandwidth``."""


@overload(multiply_column_with_slope, jit_options=PART_OPTIONS)
def _multiply_column_with_slope(kappa, x, y, slope):  # type: ignore[no-untyped-def]
    return (gaussian if _is_squared(kappa) else absolute).multiply_column_with_slope.py_func
