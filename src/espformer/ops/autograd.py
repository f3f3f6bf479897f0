"""Pieces of autograd shared by the operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Tensor | None, ...]]


class _Refusal(torch.autograd.Function):
    """Passes gradients through and raises when somebody differentiates them again."""

    @staticmethod
    def forward(ctx: Any, name: str, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.name = name
        return tuple(None if g is None else g.view_as(g) for g in grads)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        raise RuntimeError(
            f"{ctx.name} can be differentiated once, not twice: its backward is hand-written. "
            'For second derivatives pass backend="dense".'
        )


def refuse_double_backward(name: str) -> Callable[[Backward], Backward]:
    """Decorates the backward of an autograd function that has no derivative of its own."""

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def wrapped(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            with torch.no_grad():
                results = backward(ctx, *grads)
            if not torch.is_grad_enabled():
                return results
            # With create_graph=True the gradients look differentiable: mark those that are not.
            found = [r for r in results if r is not None]
            marked = iter(_Refusal.apply(name, *(r.requires_grad_() for r in found)))
            return tuple(None if r is None else next(marked) for r in results)

        return wrapped

    return decorate
