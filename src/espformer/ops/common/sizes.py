"""Sizes of grids and blocks. Triton's own functions of that kind take microseconds a call."""

from __future__ import annotations


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def power_of_2(x: int) -> int:
    """The least power of two that is not below x, which is at least one."""
    return 1 << (x - 1).bit_length()


def width_arguments(width: int) -> dict[str, int]:
    """The width of rows as arguments of a kernel: D at compile time, or D8 at run time.

    Powers of two, and widths that no eight columns fill, are compiled for. All others share one
    compiled kernel: D is zero, and the width is ``8 · D8``, so that loads of eight columns are
    known to be aligned.
    """
    shared = width % 8 == 0 and width & (width - 1) != 0
    return {"D": 0 if shared else width, "D8": width // 8}
