"""Pieces of autograd shared by the operators."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Tensor | None, ...]]


_NOTHING, _CPU = nullcontext(), torch.device("cpu")


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Operators choose their dtypes themselves, forwards and backwards."""
    kind = device.type
    known = kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)  # not for "meta"
    if known and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return _NOTHING


class _Refusal(torch.autograd.Function):
    """Passes on the first `count` tensors and raises when somebody differentiates them."""

    @staticmethod
    def forward(
        ctx: Any, name: str, instead: str, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.name, ctx.instead = name, instead
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        raise RuntimeError(
            f"{ctx.name} can be differentiated once, not twice: its backward is hand-written. "
            f'For second derivatives pass backend="{ctx.instead}".'
        )


def refuse_double_backward(name: str, instead: str = "dense") -> Callable[[Backward], Backward]:
    """Decorates the backward of an autograd function that has no derivative of its own.

    Autocast is off in it, as it was in the forward. `instead` is the backend that can be
    differentiated twice.
    """

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def wrapped(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            devices = (x.device for x in grads if x is not None)
            device = next(devices, _CPU)  # all may be undefined
            if not torch.is_grad_enabled():  # as most often
                with without_autocast(device):
                    return backward(ctx, *grads)
            with torch.no_grad(), without_autocast(device):
                results = backward(ctx, *grads)
            # With create_graph=True the gradients look like constants: tie them to what they
            # depend on, so that nobody takes a second derivative for zero.
            causes = [x for x in (*ctx.saved_tensors, *grads) if x is not None and x.requires_grad]
            if not causes:
                return results
            found = [x for x in results if x is not None]
            marked = iter(_Refusal.apply(name, instead, len(found), *found, *causes))
            return tuple(None if x is None else next(marked) for x in results)

        return wrapped

    return decorate
