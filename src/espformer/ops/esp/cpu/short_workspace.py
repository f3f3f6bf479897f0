"""The workspace of plans of short sequences: one per thread, allocated in Python."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from espformer.ops.esp.cpu.workspace import DIGITS

# Matrices of the workspace: kernels of both sides, what they are scaled to, the right one after the
# coupling, the plan, its gradient and those of both sides; matrices of a head, of query tokens by
# key tokens, or of key tokens by query tokens if banded. `*_AT` are costs and forces with columns
# in rank order if banded, else their transposes.
KAPPA_Q, KAPPA_K, LEFT, RIGHT, COUPLED, PLAN, COSTS, MEAN, COSTS_AT = range(9)
D_PLAN, D_PLAN_T, D_LEFT, D_RIGHT, D_COUPLED, FORCES, D_COSTS, FORCES_AT = range(9, 17)
FORWARD, ALL = COSTS_AT + 1, FORCES_AT + 1

# Ranges of tiles: of both kernels, of the right one after the coupling and its transpose, of the
# plan; and any summand.
Q_TILES, K_TILES, C_TILES, C_TILES_T, P_TILES, ANY = range(6)
REACH, REACH_OF_FLOAT32 = 41.4, 17.6  # exp(-x) of more is negligible

# Rows of integers, after those of `soft_plan`, all of them places where rows of a matrix begin: row
# after row; the token at every rank, of queries and of keys, padding last; the rank of every query.
ROWS, Q_PLACES, K_PLACES, Q_RANKS = range(4, 8)

# Columns of the workspace.
ONES, Q_NUMBERS, K_NUMBERS, BY_TOKEN, MIXED, SLOPES, D_SCALE, ACROSS = range(8)

Q_ROWS, K_ROWS, V_ROWS, OUT_ROWS, TURNED = range(5)  # rows of tokens


class ShortWorkspace(NamedTuple):
    """Scratch arrays, reused from head to head; all their entries are finite."""

    keys: np.ndarray  # uint64: what is sorted, twice
    integers: np.ndarray  # (8, …): tokens, their order, counts, ranks; places
    tiles: np.ndarray  # (6, 2, stride / 8): ranges
    columns: np.ndarray  # (8, stride + 8): one number per rank, or per token
    steps: np.ndarray  # (2, steps, whole): x and r of the balancing
    pairs: np.ndarray  # (1, stride · 2 · steps): operands of the balancing, and upstream gradients
    operands: np.ndarray  # (steps · stride): the former, by token
    matrices: np.ndarray  # (…, stride · stride)
    rows: np.ndarray  # (5, stride · width): rows of tokens
    stride: int
    width: int


def new_short_workspace(
    tokens: int, columns: int, dtype: np.dtype, steps: int, matrices: int
) -> ShortWorkspace:
    """For up to so many tokens, whose rows have up to so many columns."""
    stride, width, whole = (-(-x // to) * to for x, to in ((tokens, 8), (columns, 8), (tokens, 16)))
    made = np.ones((2, steps, whole), dtype)
    squares = np.zeros((matrices, stride * stride), dtype)
    tiles = np.zeros((6, 2, stride // 8), np.int64)
    tiles[:, 1] = stride // 8
    tiles[ANY, 1] = 1 << 30
    return ShortWorkspace(
        np.empty(2 * tokens, np.uint64), np.empty((8, max(stride, DIGITS)), np.int32), tiles,
        np.zeros((8, whole), dtype), made, np.zeros((1, (stride + 1) * 2 * steps), dtype),
        np.zeros(steps * stride, dtype),
        squares, np.zeros((5, stride * width), dtype),
        stride, width,
    )  # fmt: skip
