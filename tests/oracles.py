"""ESP attention by brute force: loops over tokens of one head, sharing nothing with the library.

Written from the paper's formulas. Masked tokens are taken out before anything else happens,
couplings are made of fractions, and the doubly-stochastic soft sort is Sinkhorn's algorithm, run
to its end.
"""

import math
from fractions import Fraction

import numpy as np

Matrix = np.ndarray


def attention_matrix(
    query: Matrix,
    key: Matrix,
    *,
    sort_temperature: float = 0.3,
    temperature_unit: str = "spread",
    inverse_temperature: float = 0.0,
    metric: str = "absolute",
    balance: str = "rows",
    hard: bool = False,
    ties: str = "stable",
    coupling: str = "quantile",
    slices: Matrix | None = None,
    query_mask: Matrix | None = None,
    key_mask: Matrix | None = None,
    scale: float | None = None,
) -> Matrix:
    """``N · G`` of one head, (N, M)."""
    rows = [i for i in range(len(query)) if query_mask is None or query_mask[i]]
    columns = [j for j in range(len(key)) if key_mask is None or key_mask[j]]
    full = np.zeros((len(query), len(key)))
    if not rows or not columns:
        return full
    head_dim = query.shape[1]
    factor = head_dim**-0.5 if scale is None else scale
    Q, K = query[rows].astype(float) * factor, key[columns].astype(float) * factor
    theta = np.eye(head_dim) if slices is None else slices
    plans, costs = [], []
    for direction in theta:
        sort = hard_sort if hard else soft_sort
        option = ties if hard else (sort_temperature, temperature_unit, metric, balance)
        A, B = sort(Q @ direction, option), sort(K @ direction, option)
        T = COUPLINGS[coupling](len(rows), len(columns))
        U = A.T @ T @ B / len(rows)
        cost = 0.0
        for i in range(len(rows)):
            for j in range(len(columns)):
                cost += np.dot(Q[i] - K[j], Q[i] - K[j]) * U[i, j]
        plans.append(U)
        costs.append(cost)
    shares = [math.exp(-inverse_temperature * (cost - min(costs))) for cost in costs]
    G = sum(share / sum(shares) * plan for share, plan in zip(shares, plans, strict=True))
    full[np.ix_(rows, columns)] = len(rows) * G
    return full


def soft_sort(numbers: Matrix, option: tuple[float, str, str, str]) -> Matrix:
    """``softmax_i(-dist(sorted_n, v_i) / t)``; rows are ranks, columns are tokens.

    In units of the spread the width of the kernel is t times the standard deviation.
    """
    temperature, unit, metric, balance = option
    count = len(numbers)
    if unit == "spread":
        mean = sum(numbers) / count
        deviation = math.sqrt(sum((x - mean) ** 2 for x in numbers) / count)
        temperature *= deviation or 1.0
        temperature = temperature**2 if metric == "squared" else temperature
    ascending = sorted(numbers)
    kernel = np.zeros((count, count))
    for rank in range(count):
        for token in range(count):
            distance = abs(ascending[rank] - numbers[token])
            distance = distance**2 if metric == "squared" else distance
            kernel[rank, token] = math.exp(-distance / temperature)
    if balance == "rows":
        return kernel / kernel.sum(1, keepdims=True)
    for _ in range(1000):
        kernel /= kernel.sum(1, keepdims=True)
        kernel /= kernel.sum(0, keepdims=True)
        if abs(kernel.sum(1) - 1).max() < 1e-9:
            break
    return kernel


def hard_sort(numbers: Matrix, ties: str) -> Matrix:
    """The permutation matrix of a stable sort, or the mean over the tokens that tie."""
    order = sorted(range(len(numbers)), key=lambda token: (numbers[token], token))
    matrix = np.zeros((len(order), len(order)))
    for rank, token in enumerate(order):
        equal = [i for i in order if numbers[i] == numbers[token]] if ties == "average" else [token]
        for i in equal:
            matrix[rank, i] = 1 / len(equal)
    return matrix


def quantile(n: int, m: int) -> Matrix:
    """n times the overlap of ``[i/n, (i+1)/n]`` and ``[j/m, (j+1)/m]``."""
    T = np.zeros((n, m))
    for i in range(n):
        for j in range(m):
            start = max(Fraction(i, n), Fraction(j, m))
            end = min(Fraction(i + 1, n), Fraction(j + 1, m))
            T[i, j] = float(n * max(end - start, Fraction(0)))
    return T


def interpolate(n: int, m: int) -> Matrix:
    """Rank i stands at ``i · m/n`` among the keys; the last key is repeated."""
    T = np.zeros((n, m))
    for i in range(n):
        place = Fraction(i * m, n)
        below = math.floor(place)
        T[i, min(below, m - 1)] += float(1 - (place - below))
        T[i, min(below + 1, m - 1)] += float(place - below)
    return T


def identity(n: int, m: int) -> Matrix:
    """The rectangular identity."""
    return np.array([[float(i == j) for j in range(m)] for i in range(n)])


COUPLINGS = {"quantile": quantile, "interpolate": interpolate, "identity": identity}


def lifted_plan(x: Matrix, y: Matrix) -> Matrix:
    """The paper's ``u_θ`` between tokens with projections x and y, times N.

    The optimal plan Λ between the two measures on the line, whose atoms are classes of tied tokens,
    found by filling from the north-west corner; then ``u(x, y) = p(x) q(y) / (P Q) · Λ``.
    """
    p, q = Fraction(1, len(x)), Fraction(1, len(y))
    sources = {value: p * int((x == value).sum()) for value in sorted(set(x))}
    targets = {value: q * int((y == value).sum()) for value in sorted(set(y))}
    plan = np.zeros((len(x), len(y)))
    supply, demand = dict(sources), dict(targets)
    while supply and demand:
        a, b = next(iter(supply)), next(iter(demand))
        moved = min(supply[a], demand[b])
        for i in np.flatnonzero(x == a):
            for j in np.flatnonzero(y == b):
                plan[i, j] += float(p * q / (sources[a] * targets[b]) * moved)
        supply[a] -= moved
        demand[b] -= moved
        supply = {value: mass for value, mass in supply.items() if mass}
        demand = {value: mass for value, mass in demand.items() if mass}
    return len(x) * plan
