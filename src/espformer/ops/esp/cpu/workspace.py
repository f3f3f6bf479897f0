"""The workspace of kernels: one per thread, allocated in Python."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from espformer.ops.esp.cpu import gaussian

COLUMNS = 16  # rows of `columns`
DIGITS = 8 * 256  # counts of a sort by bytes


class Workspace(NamedTuple):
    """Scratch arrays; their contents are not kept between kernels."""

    keys: np.ndarray  # uint64: what is sorted, twice
    integers: np.ndarray  # (4, tokens): tokens, their order, counts, ranks
    columns: np.ndarray  # (2, 16, tokens): one number per rank
    steps: np.ndarray  # (2, steps, tokens): x and r of the balancing
    pairs: np.ndarray  # (2, 2 + blocks, tokens · 16): see `gradients`
    rows: np.ndarray  # (8, tokens · width): products with one block
    blocks: np.ndarray  # (4, blocks, tokens · width): operands and gradients
    decays: np.ndarray  # (2, tokens): of the kernels of both sides
    coefficients: np.ndarray  # (2, …)
    scratch: np.ndarray  # of products


def new_workspace(
    tokens: int, table: np.ndarray, *, columns: int = 0, lanes: tuple[int, ...] = (0,),
    steps: int = 0, pairs: int = 0,
) -> Workspace:  # fmt: skip
    """Space for up to `tokens` ranks, in a share of the work.

    Args:
        tokens: the most of either side.
        table: of poles, see `kappa.table_of`.
        columns: of the rows that are multiplied, in blocks of `lanes`.
        steps: of the balancing, if there are any.
        pairs: blocks of 16 columns that contribute to the gradient of the points.
    """
    dtype, width, whole = table.dtype, 8 * len(lanes), -(-tokens // 16) * 16
    coefficients = scratch = 0
    if len(table):
        most = max(width if columns else 0, 16 if pairs else 1)
        coefficients, scratch = gaussian.buffer_sizes(tokens, table.shape[1], most)
    blocks = -(-columns // width)
    return Workspace(
        np.empty(2 * tokens, np.uint64),
        np.empty((4, max(tokens, DIGITS)), np.int32),
        _columns((2, COLUMNS, whole), dtype),
        _columns((2, steps, whole), dtype),
        np.zeros((2, 2 + pairs if pairs else 0, tokens * 16), dtype),
        np.empty((8 if columns else 0, tokens * width), dtype),
        np.empty((4, blocks, tokens * width), dtype),
        np.zeros((2, whole), dtype),
        np.empty((2, coefficients), dtype),
        np.empty(scratch, dtype),
    )


def _columns(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Columns padded to whole vectors. Entries past the last rank are computed with, but not
    used.
    """
    found = np.zeros(shape, dtype)  # unwritten pages cost nothing
    found[..., -32:] = 1
    return found
