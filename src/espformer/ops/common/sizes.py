"""Sizes of grids and blocks. Triton's own functions of that kind take microseconds a call."""

from __future__ import annotations


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def power_of_2(x: int) -> int:
    """The least power of two that is not below x, which is at least one."""
    return 1 << (x - 1).bit_length()
