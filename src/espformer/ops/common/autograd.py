"""Autograd helpers that the operators share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Tensor | None, ...]]
UNCHANGED: AbstractContextManager[None] = nullcontext()


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Turns autocast off: operators choose their own dtypes, forward and backward."""
    kind = device.type
    known = kind in ("cuda", "cpu") or torch.amp.is_autocast_available(kind)  # not for "meta"
    if known and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return UNCHANGED


class _Refusal(torch.autograd.Function):
    """Returns the first `count` tensors unchanged; differentiating them raises an error."""

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
    """Decorates the backward of an autograd function that cannot be differentiated itself.

    Autocast is off in it, as in the forward pass. `instead` is the backend that can be
    differentiated twice, for the error message.
    """

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def wrapped(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            defined = next((x for x in grads if x is not None), None)
            plain = UNCHANGED if defined is None else without_autocast(defined.device)
            if not torch.is_grad_enabled():
                with plain:  # saved tensors are read once: checkpointing recomputes them
                    return backward(ctx, *grads)
            with torch.no_grad(), plain:
                results = backward(ctx, *grads)
            # With create_graph=True the gradients would look like constants, and second
            # derivatives would silently be zero. So tie them to the tensors they depend on.
            causes = [x for x in (*ctx.saved_tensors, *grads) if x is not None and x.requires_grad]
            if not causes:
                return results
            found = [x for x in results if x is not None]
            marked = iter(_Refusal.apply(name, instead, len(found), *found, *causes))
            return tuple(None if x is None else next(marked) for x in results)

        return wrapped

    return decorate
