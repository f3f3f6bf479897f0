"""Rows of numbers that tests draw: their kinds, and what belongs to every draw."""

from collections.abc import Callable, Iterable
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch import Tensor

from tests.compare import UNITS

# Each is made of normal numbers. A test names the kinds that it draws: not every dtype holds all.
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "ties": torch.round,
    "clusters": lambda x: x.round() + 1e-4 * x,
    "wide": lambda x: 1e6 * x,
    "narrow": lambda x: 1e-6 * x,
    "widest": lambda x: 1e30 * x,
    "narrowest": lambda x: 1e-30 * x,
    "far": lambda x: x + 100,
    "one far": lambda x: torch.cat([x[..., 1:], 1e4 * x[..., :1].abs() + 1], -1),
    "equal": lambda x: torch.full_like(x, 3.0),
}


def apart(x: Tensor) -> Tensor:
    """Numbers that are equal, or differ by a few millionths of the largest at least.

    Scaling in float32 makes two of many numbers equal that differ in their last bit, and equal
    numbers do not pull at each other: a pair of a thousand changes a gradient by a thousandth.
    """
    step = 2.0 ** torch.frexp(x.abs().max()).exponent.double() * 2**-18
    return ((x.double() / step).round() * step).to(x.dtype)


def given_rows(kinds: Iterable[str], **more: st.SearchStrategy[Any]) -> Callable[..., Any]:
    """Draw what `draw_rows` takes, whether tokens are masked, and `more`."""
    return given(
        unit=st.sampled_from(UNITS),
        kind=st.sampled_from(sorted(kinds)),
        n=st.integers(1, 150),
        masked=st.booleans(),
        exponent=st.floats(-3, 1),
        seed=st.integers(0, 2**20),
        **more,
    )


def draw_rows(
    unit: str, kind: str, n: int, exponent: float, seed: int
) -> tuple[Tensor, float, float]:  # fmt: skip
    """Two rows of `n` numbers in float64, a temperature in `unit`, and the largest number."""
    torch.manual_seed(seed)
    x = KINDS[kind](torch.randn(2, n, dtype=torch.float64))
    largest = max(float(x.abs().max()), 1e-9)
    return x, 10.0**exponent * (largest if unit == "absolute" else 1.0), largest
