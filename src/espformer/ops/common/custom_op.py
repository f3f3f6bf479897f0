"""Operators that are registered with torch, and cost a plain call where nobody looks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

PLAIN = (Tensor, torch.nn.Parameter)


def _launchable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a function contiguous tensors, on the GPU that kernels are launched on."""

    @functools.wraps(function)
    def launch(*args: Any) -> Any:
        args = tuple([x.contiguous() if isinstance(x, Tensor) else x for x in args])
        first = next(x for x in args if isinstance(x, Tensor))
        if not first.is_cuda or first.device.index == torch.cuda.current_device():
            return function(*args)
        with torch.cuda.device(first.device):
            return function(*args)

    return launch


class Operator:
    """A torch custom operator that eager code calls without the dispatcher.

    Compilers, exporters, fake and wrapped tensors meet ``torch.ops.espformer.<name>``, with its
    fake and autograd rules. Ordinary tensors go straight to the function, through an autograd
    function if a gradient is wanted: an attention call makes half a dozen operators, and the
    dispatcher's way through Python would take longer than the kernels of a small problem.
    """

    def __init__(self, name: str, function: Callable[..., Any], schema: str | None) -> None:
        self.name = name.split("::")[-1]
        self.function = function = _launchable(function)
        if schema is None:
            plain = function.__wrapped__  # type: ignore[attr-defined]
            schema = torch.library.infer_schema(plain, mutates_args=())
        self.custom = torch.library.custom_op(name, function, mutates_args=(), schema=schema)
        self.with_gradient: Any = None
        self.__doc__ = function.__doc__

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        self.custom.register_fake(fake)
        return fake

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None]
    ) -> None:
        self.custom.register_autograd(backward, setup_context=setup_context)

        # Not with a setup_context of its own: torch would look up the signature at every call.
        def forward(ctx: Any, *args: Any) -> Any:
            output = self.function(*args)
            setup_context(ctx, args, output)
            return output

        members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self.with_gradient = type(self.name, (torch.autograd.Function,), members)

    def __call__(self, *args: Any) -> Any:
        tensors = [x for x in args if isinstance(x, Tensor)]
        plain, wanted = True, False
        for x in tensors:
            plain = plain and type(x) in PLAIN
            wanted = wanted or x.requires_grad
        if torch.compiler.is_compiling() or not plain:
            return self.custom(*args)
        wanted = wanted and torch.is_grad_enabled()
        if forward_ad._current_level >= 0:  # which autograd functions refuse, in torch's words
            wanted = wanted or any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
        if wanted and self.with_gradient is not None:
            return self.with_gradient.apply(*args)
        return self.function(*args)


def operator(name: str, schema: str | None = None) -> Callable[[Callable[..., Any]], Operator]:
    """Decorates a function of tensors, numbers and strings as ``espformer::<name>``.

    Its schema is that of its signature, unless one is given: for functions with ``*args``.
    """
    return lambda function: Operator(f"espformer::{name}", function, schema)
