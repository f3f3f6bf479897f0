"""Sizes of grids and blocks. Triton's own functions for this take microseconds per call."""

from __future__ import annotations


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def power_of_2(x: int) -> int:
    """The smallest power of two that is at least x, for x ≥ 1."""
    return 1 << (x - 1).bit_length()


def width_arguments(width: int) -> dict[str, int]:
    """The width of rows as kernel arguments: D, a compile-time constant, or D8, at run time.

    Powers of two, and widths that are not multiples of eight, get a kernel of their own. All other
    widths share one compiled kernel: D is zero and the width is ``8 · D8``, so that the compiler
    knows that loads of eight columns are aligned.
    """
    shared = width % 8 == 0 and width & (width - 1) != 0
    return {"D": 0 if shared else width, "D8": width // 8}
