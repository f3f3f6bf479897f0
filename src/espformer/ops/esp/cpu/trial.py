"""A kernel that shows whether this numba compiles what the others are made of.

Kernels need parts of numba that have no documented interface: its compiler, its cache, and LLVM
vectors as a type of their own. A version of numba that has changed them must not be used.
"""

from __future__ import annotations

import numpy as np

from espformer.ops.esp.cpu.compiling import kernel, part, stand_alone
from espformer.ops.esp.cpu.simd import LANES, exp, fill, load, store, total

EIGHT = LANES[8]


@part
def _exponentials(x, y, lanes):  # type: ignore[no-untyped-def]
    stand_alone()
    store(y, 0, exp(load(x, 0, lanes)) * fill(x.dtype.type(2), lanes))
    return total(load(y, 0, lanes))


@kernel
def _trial(x, y):  # type: ignore[no-untyped-def]
    return _exponentials(x, y, EIGHT)


def try_kernel() -> None:
    """Compiles a small kernel, or takes it from the cache on disk, and checks what it computes."""
    x = np.linspace(-1, 1, 8, dtype=np.float32)
    y = np.empty_like(x)
    found, expected = _trial(x, y), 2 * np.exp(x)
    if not (np.allclose(y, expected) and np.allclose(found, expected.sum())):
        raise ArithmeticError(f"a kernel computes {y}, expected {expected}")
