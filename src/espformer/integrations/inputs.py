"""Inputs of a model as its users hold them: a tensor, arguments in order, or arguments by name."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

__all__ = ["Inputs", "call_arguments"]

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]


def call_arguments(name: str, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a model's call, those in order and those by name; `name` is the caller."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, str) or not isinstance(inputs, Sequence):
        raise TypeError(
            f"{name}: the inputs of a model must be a tensor, a tuple of arguments or a dictionary "
            f"of keyword arguments, got {type(inputs).__name__} (texts must be tokenised first)"
        )
    return tuple(inputs), {}
