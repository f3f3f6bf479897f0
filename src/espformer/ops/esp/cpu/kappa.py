"""The kernel matrix κ of the sorted numbers of one slice, and products with it, for both metrics.

``κ[n, j] = k(|s_n - s_j| · inv_bandwidth)``; kernels are compiled once for both.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from espformer.ops.esp.cpu import absolute, gaussian
from espformer.ops.esp.cpu.compiling import part
from espformer.ops.esp.cpu.rows import zeros
from espformer.ops.esp.cpu.simd import LANES
from espformer.ops.esp.exponentials import exponential_sum


class Table(NamedTuple):
    """Poles and weights of a sum of exponentials, once for the left and once for the right."""

    is_gaussian: bool
    decays: np.ndarray  # -Re p, twice
    turns: np.ndarray  # -Im p, twice
    weights: np.ndarray  # Re w, twice, then Im w, twice
    slopes: np.ndarray  # -w p for the left, w p for the right, in the same order
    is_left: np.ndarray  # ones, then zeros
    is_right: np.ndarray
    lanes: tuple[int, ...]  # for the poles of both sides


def table_of(metric: str, dtype: torch.dtype) -> Table:
    """The table of a metric; that of the absolute one is not looked at."""
    lanes = LANES[16 if dtype == torch.float64 else 8]
    count = 4 * len(lanes)
    found = exponential_sum(metric, dtype)
    poles, weights = np.zeros(count, np.complex128), np.zeros(count, np.complex128)
    poles[: len(found.poles)], weights[: len(found.weights)] = found.poles, found.weights
    number = np.float64 if dtype == torch.float64 else np.float32

    def both(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return np.concatenate([left, right]).astype(number)

    def parts(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return np.concatenate([left.real, right.real, left.imag, right.imag]).astype(number)

    slopes = weights * poles
    ones, none = np.ones(count), np.zeros(count)
    return Table(
        metric == "squared", both(-poles.real, -poles.real), both(-poles.imag, -poles.imag),
        parts(weights, weights), parts(-slopes, slopes), both(ones, none), both(none, ones), lanes,
    )  # fmt: skip


class Chunks(NamedTuple):
    """Coefficients of the squared metric, see `gaussian`; empty for the absolute one."""

    reading: np.ndarray  # (ranks, chunk and states): of κ
    pulling: np.ndarray  # (ranks, chunk and states): of its derivative
    into: np.ndarray  # (ranks, states): of what a rank adds to the states
    hops: np.ndarray  # (chunks, 2, states): what is left of them from chunk to chunk
    here: np.ndarray  # the numbers of one chunk


class Kappa(NamedTuple):
    """κ of the n sorted numbers of one side of one slice."""

    n: int
    points: np.ndarray  # (n,), ascending
    inv_bandwidth: float
    decays: np.ndarray  # (n,): of the absolute metric, see `absolute`
    gaps: np.ndarray
    table: Table
    chunks: Chunks
    is_gaussian: bool


@part
def new_kappa(table, count, dtype):  # type: ignore[no-untyped-def]
    """Room for the kernels of `count` numbers."""
    room = -(-count // 16) * 16
    decays, gaps = zeros(room, dtype), zeros(room, dtype)
    many = 0
    states = 0
    if table.is_gaussian:
        # The longest rows: of one chunk, or of a chunk and the states; a few are read too many.
        many, states = count + 4, 16 * len(table.lanes)
    stride = max(gaussian.SHORT + 8, gaussian.CHUNK + states)
    chunks = Chunks(
        zeros(many * stride, dtype), zeros(many * stride, dtype), zeros(many * states, dtype),
        zeros((many // gaussian.CHUNK + 1) * 2 * states, dtype), zeros(stride, dtype),
    )  # fmt: skip
    return Kappa(0, gaps, decays.dtype.type(1), decays, gaps, table, chunks, False)


@part
def set_kappa(room, points, n, inv_bandwidth, hard, average, with_slope):  # type: ignore[no-untyped-def]
    """The kernel of n sorted numbers, in the room of another."""
    table = room.table
    is_gaussian = table.is_gaussian and not hard
    if is_gaussian:
        gaussian.set_chunks(table, points, n, inv_bandwidth, with_slope, room.chunks)
    else:
        absolute.set_decays(points, n, inv_bandwidth, hard, average, room.gaps, room.decays)
    return Kappa(n, points, inv_bandwidth, room.decays, room.gaps, table, room.chunks, is_gaussian)


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
