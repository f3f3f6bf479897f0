"""The temperature of a soft sort, for one row: its spread, and the bandwidth of its kernel.

Numbers are multiplied by a power of two first, which rounds nothing, so that neither their spread
nor a kernel's bandwidth leaves the range of their dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from espformer.ops.esp.cpu.compiling import part, relaxed, stand_alone


class Unit(NamedTuple):
    """The temperatures of a call and their unit."""

    temperatures: np.ndarray  # (batch,) or (1,)
    in_spreads: bool  # a share of the spread of a row, else a distance
    squared: bool  # of which the square root is the bandwidth, unless a share
    least: float  # bandwidths are held between these two
    most: float
    eps: float  # of the dtype of the numbers: its rounding,
    tiny: float  # what a spread of nothing is taken for,
    greatest: float  # its largest number,
    doublings: int  # and the largest power of two that numbers are scaled by


@part
def unit_of(temperatures, in_spreads, limits):  # type: ignore[no-untyped-def]
    """That of the absolute metric, with the last six fields in an array."""
    return Unit(
        temperatures, in_spreads, False, limits[0], limits[1], limits[2], limits[3], limits[4],
        np.int64(limits[5]),
    )  # fmt: skip


FACTOR, MEAN, SPREAD, FREE = range(4)  # of a row; FREE is one where nothing was clamped


@relaxed("reassoc", "contract")
def moments(points, n):  # type: ignore[no-untyped-def]
    """The mean of numbers, and their mean squared distance from it, in float64.

    They are counted from the first one: that keeps the digits of numbers far from zero.
    """
    stand_alone()
    first = np.float64(points[0])
    mean = 0.0
    for i in range(n):
        mean += points[i] - first
    mean = mean / n
    variance = 0.0
    for i in range(n):
        x = points[i] - first - mean
        variance += x * x
    return first + mean, variance / n


@part
def measure(points, n, t, unit, shape):  # type: ignore[no-untyped-def]
    """Scales n sorted numbers, finds their shape, and gives back 1 over the kernel's bandwidth.

    NaN, and nothing else, if any number is not finite: such numbers stand first or last.
    """
    stand_alone()
    largest = max(abs(np.float64(points[0])), abs(np.float64(points[n - 1])))
    if not largest <= unit.greatest or np.isnan(points[0]) or np.isnan(points[n - 1]):
        return np.nan
    exponent = 0
    if largest > 0:
        exponent = np.int64(np.ceil(np.log2(largest)))
    exponent = min(max(exponent, -unit.doublings), unit.doublings)
    factor = 2.0 ** np.float64(-exponent)
    number = points.dtype.type(factor)
    for i in range(n):
        points[i] *= number
    mean, variance = moments(points, n)
    rounding = 8 * unit.eps * largest * factor
    spreads = variance > rounding * rounding
    spread = np.sqrt(variance) if spreads else max(largest * factor, unit.tiny)
    bandwidth = t
    if unit.in_spreads:
        bandwidth = t * spread
    elif unit.squared:
        bandwidth = np.sqrt(t) * factor
    else:
        bandwidth = t * factor
    clamped = min(max(bandwidth, unit.least), unit.most)
    shape[FACTOR], shape[MEAN] = factor, mean
    shape[SPREAD] = spread if spreads else 0
    shape[FREE] = 1 if clamped == bandwidth else 0
    return 1 / clamped
