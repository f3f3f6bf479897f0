"""Soft sorts and soft ranks of numbers themselves: one column, rows that sum to one.

The torch twin is `SoftSort` of :mod:`espformer.sorting`, with `ops.esp.linear` below it. For sorted
numbers s, bandwidths w and ``u = s / w`` all that is needed are sums over what lies to the left of
a rank, and to its right, of some weights x and of their distances γ,

    L_n = Σ_{j<n} κ_nj x_j,        l_n = Σ_{j<n} κ_nj x_j γ_nj,        R_n, r_n for j > n,

which one recurrence finds without a difference: ``l_n = a_n (l_{n-1} + γ_{n-1,n} (L_{n-1} +
x_{n-1}))`` with ``a_n = κ_{n-1,n}``. Numbers are sorted relative to where they stand, with γ the
distance ``|u_n - u_j|`` and weights of one, and ranks with γ the count of ranks ``|n - j|`` and
weights o:

    sort_n = s_n + w e_n,  e = (r - l) o,      o = 1 / (1 + L + R),
    rank_n = n + 1 + e_n,  e = (r - l) / q,    q = κ o.

So a narrow kernel costs no digits: nothing of the size of s is taken from its like. The derivative
of κ_nj in u_n is its sign, ``sign(j - n) κ_nj``, which is zero between equal numbers.
"""

from __future__ import annotations

import numpy as np

from espformer.ops.esp.cpu.absolute import set_decays
from espformer.ops.esp.cpu.compiling import kernel, part, relaxed, stand_alone
from espformer.ops.esp.cpu.measuring import FACTOR, FREE, MEAN, SPREAD, measure, unit_of
from espformer.ops.esp.cpu.rows import clear, copy, number_ranks
from espformer.ops.esp.cpu.sort import sort_tokens

# What the forward keeps for the backward, in one array: every tensor costs microseconds. Rows of N
# numbers: sorted numbers, o, e, and the derivative of e_n in u_n where n itself moves; of ranks
# also 1/q, and Σ_j sign(j - n) κ_nj. Behind them, what `measure` finds (the mean from the middle
# number on) and one over the bandwidth. The order has an array of its own, since hooks on saved
# tensors may round numbers, but not integers; behind it stands how many numbers take part.
POINTS, SCALES, SHIFTS, PULLS, OF_SORT = range(5)
MASSES, SIGNS, OF_RANKS = range(4, 7)
INV_BANDWIDTH, SHAPE = range(4, 6)
# Scratch memory, rows of N numbers.
DECAYS, GAPS, LEFT, RIGHT, LEFT_FAR, RIGHT_FAR, WEIGHTS, MORE, FOUND, PRODUCT, MANY = range(11)


@relaxed("contract")
def sums(decays, x, n, left, right):  # type: ignore[no-untyped-def]
    """L and R of weights x, both scans side by side, in float64."""
    stand_alone()
    below, above = 0.0, 0.0
    for i in range(n):
        j = n - 1 - i
        below = np.float64(decays[i]) * below
        left[i] = below
        below += x[i]
        right[j] = above
        above = np.float64(decays[j]) * (above + x[j])


@relaxed("contract")
def sums_and_moments(decays, gaps, x, n, left, right, left_far, right_far):  # type: ignore[no-untyped-def]
    """The same, and l and r; `gaps` are the distances of neighbours, times their decays."""
    stand_alone()
    below, above, far_below, far_above = 0.0, 0.0, 0.0, 0.0
    for i in range(n):
        j = n - 1 - i
        far_below = np.float64(decays[i]) * far_below + np.float64(gaps[i]) * below
        below = np.float64(decays[i]) * below
        left[i], left_far[i] = below, far_below
        below += x[i]
        right[j], right_far[j] = above, far_above
        above += x[j]
        far_above = np.float64(decays[j]) * far_above + np.float64(gaps[j]) * above
        above = np.float64(decays[j]) * above


@part
def signed(points, n, tied, left, right, out):  # type: ignore[no-untyped-def]
    """``Σ_j sign(s_j - s_n) κ_nj x_j``: R - L, without the numbers that are equal to s_n."""
    stand_alone()
    for i in range(n):
        out[i] = right[i] - left[i]
    start = 0
    while tied and start < n:
        end = end_of_equal(points, start, n)
        for i in range(start, end):
            out[i] = right[end - 1] - left[start]
        start = end


@part
def counted(points, n, tied, left, right, left_far, right_far, out):  # type: ignore[no-untyped-def]
    """l + r where distances count ranks, without the numbers that are equal to s_n."""
    stand_alone()
    for i in range(n):
        out[i] = left_far[i] + right_far[i]
    start = 0
    while tied and start < n:
        end = end_of_equal(points, start, n)
        for i in range(start, end):
            below = left_far[start] + (i - start) * left[start]
            out[i] = below + right_far[end - 1] + (end - 1 - i) * right[end - 1]
        start = end


@part
def end_of_equal(points, start, n):  # type: ignore[no-untyped-def]
    """The rank after the last number that is equal to that at `start`."""
    end = start + 1
    while end < n and points[end] == points[start]:
        end += 1
    return end


@part
def set_gaps(points, n, inv_bandwidth, ranks, decays, gaps):  # type: ignore[no-untyped-def]
    """Writes decays, and times these the distances of neighbours: in bandwidths, or one rank each.

    Returns whether any distance is zero.
    """
    stand_alone()
    number = points.dtype.type
    tied = set_decays(points, n, number(inv_bandwidth), False, True, decays)
    gaps[0] = 0
    for i in range(1, n):
        gaps[i] = decays[i] * (
            number(1) if ranks else (points[i] - points[i - 1]) * number(inv_bandwidth)
        )
    return tied


@part
def sides_of(buffers):  # type: ignore[no-untyped-def]
    """Sums to the left and to the right, and moments likewise."""
    return buffers[LEFT], buffers[RIGHT], buffers[LEFT_FAR], buffers[RIGHT_FAR]


@part
def start_row(buffers, n):  # type: ignore[no-untyped-def]
    """`sides_of` the buffers, for weights of one."""
    for i in range(n):
        buffers[WEIGHTS, i] = 1
    return sides_of(buffers)


@part
def sort_row(points, n, shape, tied, buffers, kept, out):  # type: ignore[no-untyped-def]
    """``s + w e``, in the scale of the numbers."""
    stand_alone()
    left, right, left_far, right_far = start_row(buffers, n)
    scales, shifts, pulls, difference = kept[SCALES], kept[SHIFTS], kept[PULLS], buffers[MORE]
    number = points.dtype.type
    one = number(1)
    sums_and_moments(
        buffers[DECAYS], buffers[GAPS], buffers[WEIGHTS], n, left, right, left_far, right_far
    )  # fmt: skip
    signed(points, n, tied, left, right, difference)
    back, bandwidth = number(1 / shape[FACTOR]), number(1 / shape[INV_BANDWIDTH])
    for i in range(n):
        scale = one / (one + left[i] + right[i])
        shift = (right_far[i] - left_far[i]) * scale
        scales[i], shifts[i] = scale, shift
        pulls[i] = (right_far[i] + left_far[i] - shift * difference[i]) * scale
        out[i] = back * (points[i] + bandwidth * shift)


@part
def rank_row(points, n, tied, order, buffers, kept, out):  # type: ignore[no-untyped-def]
    """``n + 1 + e_n`` of every rank, at its token."""
    stand_alone()
    left, right, left_far, right_far = start_row(buffers, n)
    scales, shifts, pulls, masses = kept[SCALES], kept[SHIFTS], kept[PULLS], kept[MASSES]
    difference, sizes = buffers[MORE], buffers[FOUND]
    one = points.dtype.type(1)
    sums(buffers[DECAYS], buffers[WEIGHTS], n, left, right)
    signed(points, n, tied, left, right, kept[SIGNS])
    for i in range(n):
        scales[i] = one / (one + left[i] + right[i])
    sums_and_moments(buffers[DECAYS], buffers[GAPS], scales, n, left, right, left_far, right_far)
    signed(points, n, tied, left, right, difference)
    counted(points, n, tied, left, right, left_far, right_far, sizes)
    for i in range(n):
        mass = one / (scales[i] + left[i] + right[i])
        shift = (right_far[i] - left_far[i]) * mass
        masses[i], shifts[i] = mass, shift
        pulls[i] = (sizes[i] - shift * difference[i]) * mass
    for i in range(n):
        out[order[i]] = np.float64(i + 1) + shifts[i]


@kernel
def sort_or_rank(
    h0, h1, l0, l1, numbers, mask, temperatures, t, in_spreads, limits, ranks, out, kept,
    orders, shape, keys, integers, buffers,
):  # type: ignore[no-untyped-def] # fmt: skip
    """Soft sorts, or ranks, of (batch, N) numbers; NaN for rows that hold one, zero for padding."""
    unit = unit_of(temperatures, in_spreads, limits)
    spare, counts, tokens = integers[0], integers[1], number_ranks(integers[2])
    size = numbers.shape[1]
    for head in range(h0, h1):
        n, own, order = size, kept[head], orders[head]
        if mask.shape[1] > 0:
            clear(out[head], size)
            n = 0
            for i in range(size):
                if mask[head, i]:
                    tokens[n] = i
                    n += 1
        order[size] = n
        if n == 0:
            continue
        points = own[POINTS]
        sort_tokens(numbers[head], tokens, n, order, points, keys, spare, counts)
        if len(temperatures):
            t = np.float64(temperatures[head])
        shape[INV_BANDWIDTH] = measure(points, n, t, unit, shape)
        if np.isnan(shape[INV_BANDWIDTH]):
            copy(tokens, n, order)
            for i in range(n):
                out[head, tokens[i] if ranks else i] = np.nan
        else:
            tied = set_gaps(points, n, shape[INV_BANDWIDTH], ranks, buffers[DECAYS], buffers[GAPS])
            if ranks:
                rank_row(points, n, tied, order, buffers, own, out[head])
            else:
                sort_row(points, n, shape, tied, buffers, own, out[head])
        shape[MEAN] -= points[n // 2]
        copy(shape, SHAPE, points[size:])


@part
def sort_row_gradient(points, n, tied, upstream, buffers, kept, found):  # type: ignore[no-untyped-def]
    """The gradient g of ``s + w e`` in s, at a given bandwidth.

    With ``x = o g`` it is ``g_n ∂e_n + (κx)_n - l_n - r_n - Σ_j sign(j - n) κ_nj x_j e_j``.
    """
    stand_alone()
    left, right, left_far, right_far = sides_of(buffers)
    weights, more, shifts, pulls = buffers[WEIGHTS], buffers[MORE], kept[SHIFTS], kept[PULLS]
    for i in range(n):
        weights[i] = upstream[i] * kept[SCALES, i]
        more[i] = weights[i] * shifts[i]
    sums_and_moments(buffers[DECAYS], buffers[GAPS], weights, n, left, right, left_far, right_far)
    for i in range(n):
        found[i] = upstream[i] * pulls[i] + (left[i] + right[i] + weights[i])
        found[i] -= left_far[i] + right_far[i]
    sums(buffers[DECAYS], more, n, left, right)
    signed(points, n, tied, left, right, weights)
    for i in range(n):
        found[i] -= weights[i]


@part
def rank_row_gradient(points, n, tied, order, upstream, buffers, kept, found):  # type: ignore[no-untyped-def]
    """The gradient g of ``n + 1 + e_n`` in u.

    With ``x = g / q``, the ranks that mix with n pull at o_n by ``E = l - r - κ(x e)``, and through
    ``o = 1 / κ1`` at the kernel by ``h = -o² E``. Together it is
    ``g_n ∂e_n - o_n (l_n + r_n + Σ_j sign κ_nj x_j e_j) + Σ_j sign κ_nj (h_n + h_j)``.
    """
    stand_alone()
    left, right, left_far, right_far = sides_of(buffers)
    weights, more, product = buffers[WEIGHTS], buffers[MORE], buffers[PRODUCT]
    scales, shifts, pulls = kept[SCALES], kept[SHIFTS], kept[PULLS]
    for i in range(n):
        product[i] = upstream[order[i]]
    for i in range(n):
        weights[i] = product[i] * kept[MASSES, i]
        more[i] = weights[i] * shifts[i]
        found[i] = product[i] * pulls[i]
    sums_and_moments(buffers[DECAYS], buffers[GAPS], weights, n, left, right, left_far, right_far)
    counted(points, n, tied, left, right, left_far, right_far, product)
    for i in range(n):
        found[i] -= scales[i] * product[i]
        weights[i] = left_far[i] - right_far[i] - more[i]
    sums(buffers[DECAYS], more, n, left, right)
    signed(points, n, tied, left, right, product)
    for i in range(n):
        found[i] -= scales[i] * product[i]
        weights[i] = -scales[i] * scales[i] * (weights[i] - left[i] - right[i])
    sums(buffers[DECAYS], weights, n, left, right)
    signed(points, n, tied, left, right, product)
    for i in range(n):
        found[i] += weights[i] * kept[SIGNS, i] + product[i]


@relaxed("reassoc", "contract")
def gradient_in_bandwidth(points, n, mean, inv_bandwidth, ranks, upstream, shifts, found):  # type: ignore[no-untyped-def]
    """The gradient in w of what depends on ``u = s / w``, and of sorts in w itself.

    ``-Σ_n u_n f_n`` with f the gradient in s: forces add up to zero, so numbers are counted from
    their mean. Of sorts, which are ``s + w e``, f is without that of s, and ``Σ_n g_n e_n`` comes
    to it.
    """
    stand_alone()
    total, middle = 0.0, np.float64(mean)
    if ranks:
        for i in range(n):
            total -= (points[i] - middle) * found[i]
        return total * inv_bandwidth * inv_bandwidth
    for i in range(n):
        total -= (points[i] - middle) * (np.float64(found[i]) - upstream[i])
    total *= inv_bandwidth
    for i in range(n):
        total += np.float64(upstream[i]) * shifts[i]
    return total


@kernel
def sort_or_rank_gradient(
    h0, h1, l0, l1, upstream, temperatures, t, in_spreads, limits, ranks, kept, orders,
    d_numbers, d_temperatures, buffers,
):  # type: ignore[no-untyped-def] # fmt: skip
    """Gradients in the numbers and in the temperatures; `d_numbers` is zero for padding.

    With a bandwidth ``w = t σ`` every number also moves the spread:
    ``dσ/ds_n = (s_n - mean) / (n σ)``.
    """
    unit = unit_of(temperatures, in_spreads, limits)
    size = upstream.shape[1]
    for head in range(h0, h1):
        own, tokens, points = kept[head], orders[head], kept[head, POINTS]
        n, shape = np.int64(tokens[size]), points[size:]  # as in the forward: one type to compile
        d_temperatures[head] = 0
        if n < size:
            clear(d_numbers[head], size)
        if n == 0:
            continue
        inv_bandwidth = np.float64(shape[INV_BANDWIDTH])
        if np.isnan(inv_bandwidth):
            for i in range(n):
                d_numbers[head, tokens[i]] = np.nan
            d_temperatures[head] = np.nan
            continue
        tied = set_gaps(points, n, inv_bandwidth, ranks, buffers[DECAYS], buffers[GAPS])
        found = buffers[FOUND]
        if ranks:
            rank_row_gradient(points, n, tied, tokens, upstream[head], buffers, own, found)
        else:
            sort_row_gradient(points, n, tied, upstream[head], buffers, own, found)
        # Sorts have the scale of the numbers: whatever these were multiplied with cancels.
        factor, spread = np.float64(shape[FACTOR]), np.float64(shape[SPREAD])
        mean = np.float64(points[n // 2]) + shape[MEAN]
        scale, own_scale = (factor * inv_bandwidth, factor) if ranks else (1.0, 1.0)
        if ranks and in_spreads and spread == 0:
            scale = 0.0
        spread_pull = 0.0
        if shape[FREE] > 0:
            d_bandwidth = own_scale * gradient_in_bandwidth(
                points, n, mean, inv_bandwidth, ranks, upstream[head], own[SHIFTS], found
            )
            if len(temperatures):
                t = np.float64(temperatures[head])
            d_temperatures[head] = hold(d_bandwidth / (factor * inv_bandwidth * t), unit.greatest)
            if in_spreads and spread > 0:
                spread_pull = d_bandwidth / (inv_bandwidth * n * spread * spread)
        for i in range(n):
            force = scale * np.float64(found[i]) + spread_pull * (points[i] - mean)
            d_numbers[head, tokens[i]] = hold(force, unit.greatest)


@part
def hold(x, greatest):  # type: ignore[no-untyped-def]
    return min(max(x, -greatest), greatest)
