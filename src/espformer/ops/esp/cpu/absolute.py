"""Products with the kernel ``κ[n, j] = exp(-|s_n - s_j| / t)`` of sorted numbers, by recurrences.

With ``a_n = exp(-(s_n - s_{n-1}) / t)``, one scan to the right and one to the left,

    f_n = a_n f_{n-1} + x_n,    b_n = a_{n+1} (b_{n+1} + x_{n+1}),    (κx)_n = f_n + b_n.

A scan restarts every `BLOCK` ranks, and the previous blocks are added with their decay: in float32
the errors of thousands of successive additions would be visible.

Rows are blocks of `lanes` columns, one after the other in a flat array: row i starts at
``i * width``. A hard sort is the same with ``a_n`` zero, or one where numbers are equal.
"""

from __future__ import annotations

from espformer.ops.esp.cpu.compiling import part, stand_alone
from espformer.ops.esp.cpu.simd import LANES, exp, fill, load, store, where_above

ELEMENTWISE = LANES[16]
BLOCK = 64


@part
def set_decays(points, n, inv_bandwidth, hard, average, decays):  # type: ignore[no-untyped-def]
    """``decays[i] = exp(-(points[i] - points[i - 1]) · inv_bandwidth)``.

    A hard sort is the limit of zero temperature: the decay is one between equal numbers if they
    share a rank (`average`), and zero otherwise. The array is padded to a multiple of 16. Returns
    whether any two numbers are equal.
    """
    stand_alone()
    decays[0] = 0
    tied = False
    for i in range(1, n):
        tied |= points[i] == points[i - 1]
        decays[i] = (points[i - 1] - points[i]) * inv_bandwidth
    if hard:
        for i in range(1, n):
            decays[i] = 1 if average and points[i] == points[i - 1] else 0
        return tied
    most = points.dtype.type(41.4)  # exp of less is negligible, see `exponentials.NEGLIGIBLE`
    for i in range(0, n, 16):
        x = load(decays, i, ELEMENTWISE)
        store(decays, i, where_above(x, -most, exp(x)))
    decays[0] = 0
    return tied


@part
def multiply(kappa, x, order, scale, y, lanes):  # type: ignore[no-untyped-def]
    """``y_n = Σ_j κ[n, j] scale_j x[order_j]``."""
    stand_alone()
    n, decays = kappa.n, kappa.decays
    width = 8 * len(lanes)
    zero, one = fill(decays.dtype.type(0), lanes), decays.dtype.type(1)
    carried = zero
    for start in range(0, n, BLOCK):
        own, rest = zero, one
        for i in range(start, min(start + BLOCK, n)):
            rest *= decays[i]
            own = decays[i] * own + scale[i] * load(x, order[i] * width, lanes)
            store(y, i * width, own + rest * carried)
        carried = own + rest * carried
    carried = zero
    for start in range(n - 2, -1, -BLOCK):
        own, rest = zero, one
        for i in range(start, max(start - BLOCK, -1), -1):
            a, j = decays[i + 1], i + 1
            rest *= a
            own = a * (own + scale[j] * load(x, order[j] * width, lanes))
            store(y, i * width, load(y, i * width, lanes) + (own + rest * carried))
        carried = own + rest * carried


@part
def multiply_with_slope(kappa, x, order, scale, y, slope, lanes):  # type: ignore[no-untyped-def]
    """`multiply`, and ``slope_n = Σ_j sign(s_j - s_n) κ[n, j] scale_j x[order_j]``.

    That is t times the derivative in s_n, for numbers that all differ.
    """
    stand_alone()
    n, decays = kappa.n, kappa.decays
    width = 8 * len(lanes)
    zero, one = fill(decays.dtype.type(0), lanes), decays.dtype.type(1)
    carried = zero
    for start in range(0, n, BLOCK):
        own, rest = zero, one
        for i in range(start, min(start + BLOCK, n)):
            rest *= decays[i]
            own = decays[i] * own
            store(slope, i * width, own + rest * carried)
            own = own + scale[i] * load(x, order[i] * width, lanes)
        carried = own + rest * carried
    carried, here = zero, zero
    a = one
    for start in range(n - 1, -1, -BLOCK):
        own, rest = zero, one
        for i in range(start, max(start - BLOCK, -1), -1):
            rest *= a
            own = a * (own + here)
            a = decays[i]
            right, left = own + rest * carried, load(slope, i * width, lanes)
            here = scale[i] * load(x, order[i] * width, lanes)
            store(y, i * width, left + right + here)
            store(slope, i * width, right - left)
        carried = own + rest * carried


@part
def multiply_with_slope_of_ties(kappa, x, order, scale, y, slope, lanes):  # type: ignore[no-untyped-def]
    """The same where numbers are equal: between these the derivative is zero.

    The order of equal numbers is arbitrary and must not change their gradients.
    """
    stand_alone()
    n, points, decays = kappa.n, kappa.points, kappa.decays
    width = 8 * len(lanes)
    zero, one = fill(decays.dtype.type(0), lanes), decays.dtype.type(1)
    carried, left = zero, zero
    for start in range(0, n, BLOCK):
        own, rest = zero, one
        for i in range(start, min(start + BLOCK, n)):
            rest *= decays[i]
            own = decays[i] * own
            if i == 0 or points[i] != points[i - 1]:
                left = own + rest * carried
            own = own + scale[i] * load(x, order[i] * width, lanes)
            store(slope, i * width, left)
        carried = own + rest * carried
    carried, right, here = zero, zero, zero  # `here` is at this number, `right` beyond it
    own, rest, steps = zero, one, 0
    for i in range(n - 1, -1, -1):
        if i == n - 1 or points[i] != points[i + 1]:
            if i < n - 1:
                rest *= decays[i + 1]
                own = decays[i + 1] * (own + here)
                right = own + rest * carried
                steps += 1
                if steps == BLOCK:
                    own, rest, carried, steps = zero, one, right, 0
            here = scale[i] * load(x, order[i] * width, lanes)
            if i > 0 and points[i - 1] == points[i]:
                here = here + _sum_of_equal(points, i - 1, x, order, scale, lanes)
        left = load(slope, i * width, lanes)
        store(y, i * width, left + right + here)
        store(slope, i * width, right - left)


@part
def _sum_of_equal(points, last, x, order, scale, lanes):  # type: ignore[no-untyped-def]
    """``Σ_j scale_j x[order_j]`` for all numbers up to rank `last` that are equal to its own."""
    width = 8 * len(lanes)
    found, own = fill(points.dtype.type(0), lanes), fill(points.dtype.type(0), lanes)
    j = last
    while j >= 0 and points[j] == points[last]:
        own = own + scale[j] * load(x, order[j] * width, lanes)
        j -= 1
        if (last - j) % BLOCK == 0:
            found, own = found + own, fill(points.dtype.type(0), lanes)
    return found + own


@part
def multiply_column(kappa, x, y):  # type: ignore[no-untyped-def]
    """``y = κ x`` for one number per rank; the two scans run side by side.

    Each scan writes its results until the two pass each other, and adds to those of the other
    afterwards.
    """
    stand_alone()
    n, decays = kappa.n, kappa.decays
    zero, one = decays.dtype.type(0), decays.dtype.type(1)
    left_carried, right_carried = zero, zero
    for start in range(0, n, BLOCK):
        left, left_rest, right, right_rest = zero, one, zero, one
        for i in range(start, min(start + BLOCK, n)):
            j = n - 1 - i
            left_rest *= decays[i]
            left = decays[i] * left + x[i]
            if i > 0:
                right_rest *= decays[j + 1]
                right = decays[j + 1] * (right + x[j + 1])
            from_left, from_right = (
                left + left_rest * left_carried,
                right + right_rest * right_carried,
            )
            if i < j:
                y[i], y[j] = from_left, from_right
            elif i == j:
                y[i] = from_left + from_right
            else:
                y[i] += from_left
                y[j] += from_right
        left_carried = left + left_rest * left_carried
        right_carried = right + right_rest * right_carried


@part
def multiply_column_with_slope(kappa, x, y, slope):  # type: ignore[no-untyped-def]
    """``y = κ x`` and its derivative in ``s_n · inv_bandwidth``, for one number per rank.

    As `multiply_column`; between equal numbers the derivative is zero. States are in float64, which
    is as fast for single numbers and accurate over thousands of additions.
    """
    stand_alone()
    n, points, decays = kappa.n, kappa.points, kappa.decays
    below, at_left, above, at_right = 0.0, 0.0, 0.0, 0.0
    for i in range(n):
        j = n - 1 - i
        # Equal numbers share a rank, unless a hard sort separates them: then the decay is zero.
        if i > 0 and (points[i] != points[i - 1] or decays[i] == 0):
            below, at_left = decays[i] * (below + at_left), 0.0
        if i > 0 and (points[j] != points[j + 1] or decays[j + 1] == 0):
            above, at_right = decays[j + 1] * (above + at_right), 0.0
        at_left += x[i]
        if i < j:
            y[i], slope[i] = below + at_left, -below
            y[j], slope[j] = above + at_right, above
        else:
            if i == j:
                y[i], slope[i] = 0, 0
            y[i] += below + at_left
            slope[i] -= below
            y[j] += above + at_right
            slope[j] += above
        at_right += x[j]
