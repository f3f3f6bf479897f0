"""Operators as torch sees them: schema, autograd registration, and rules for fake tensors."""

from typing import Any

import torch
from torch import Tensor

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def strided(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same numbers, every matrix with the strides of its transpose."""

    def turned(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() < 2:
            return x
        return x.detach().mT.contiguous().mT.requires_grad_(x.requires_grad)

    return tuple(turned(x) for x in arguments)


def check_operator(operator: Any, arguments: tuple[Any, ...], strides: bool = True) -> None:
    """Check an operator, and with `strides` its rule for fake tensors on arguments that are not
    contiguous: a compiler relies on the strides that it promises.
    """
    torch.library.opcheck(operator.custom, arguments, test_utils=CHECKS)
    if strides:
        torch.library.opcheck(operator.custom, strided(arguments), test_utils="test_faketensor")
