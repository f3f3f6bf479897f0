"""How operators sit on torch: what runs around them, and their gradients written by hand.

Private names of torch (those that begin with ``_``) stand in this file only, so a version of torch
that renames one breaks one file, and ``tests/ops/common/test_operators.py`` names the function.
From top to bottom:

- what a call runs under: an export, a trace, dispatch modes, transforms of functions, autocast;
- what torch has for itself: autograd inside an operator, a gradient of softmax, leaves of trees;
- operators. They choose their own dtypes, so autocast is off in them (:func:`without_autocast`).
  Their gradients cannot be differentiated (:func:`refuse_double_backward`). Those with kernels of
  their own are custom operators of torch, which eager code calls without the dispatcher
  (:func:`operator`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

PLAIN = (Tensor, torch.nn.Parameter)
Backward = Callable[..., tuple[Tensor | None, ...]]
UNCHANGED: AbstractContextManager[None] = nullcontext()


def is_exporting() -> bool:
    """True inside ``torch.export`` and what is built on it, False inside ``torch.compile``.

    In torch 2.11, :func:`torch.compiler.is_exporting` is True in both.
    """
    return bool(torch.compiler._is_exporting_flag)


def is_recorded() -> bool:
    """In ``torch.export`` and ``torch.jit.trace``: graphs that run without this library."""
    return is_exporting() or (not torch.compiler.is_compiling() and torch.jit.is_tracing())


def has_dispatch_modes() -> bool:
    """Whether a torch dispatch mode is active, which may fake, count or rewrite operators."""
    return torch._C._len_torch_dispatch_stack() > 0


def is_transformed() -> bool:
    """Whether transforms of ``torch.func`` are active."""
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return active is not None and not torch.compiler.is_compiling() and active()


def can_read(*tensors: Tensor) -> bool:
    """Whether Python can look at the values of these tensors, for instance to check them.

    Not while a call is compiled, exported or captured as a CUDA graph. A tensor on the meta device
    and a fake one have no values, and one that ``vmap`` batches has many.
    """
    if torch.compiler.is_compiling():
        return False
    if any(x.is_meta or isinstance(x, FakeTensor) or _is_batched(x) for x in tensors):
        return False
    return not any(x.is_cuda for x in tensors) or not torch.cuda.is_current_stream_capturing()


def can_decide_by(*tensors: Tensor) -> bool:
    """Whether Python may also take another way by their values: not in a call that is traced, since
    the trace must serve other values.
    """
    return not torch.jit.is_tracing() and can_read(*tensors)


def _is_batched(x: Tensor) -> bool:
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
    while wrapped and not torch._C._functorch.is_batchedtensor(x):
        x = torch._C._functorch.get_unwrapped(x)
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
    return wrapped


def has_autocast(device: torch.device) -> bool:
    """Whether autocast is on; never for devices that do not know it, such as "meta"."""
    kind = device.type
    known = kind in ("cuda", "cpu") or torch.amp.is_autocast_available(kind)
    return known and torch.is_autocast_enabled(kind)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Turns autocast off: operators choose their own dtypes, forward and backward."""
    return torch.autocast(device.type, enabled=False) if has_autocast(device) else UNCHANGED


@contextmanager
def autograd_inside_an_operator() -> Iterator[None]:
    """Turns autograd on inside a custom operator, where torch has disabled it."""
    key = torch._C.DispatchKey
    with ExitStack() as stack:
        for off in (key.AutogradFunctionality, key.AutogradOther, key.ADInplaceOrView):
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(off, False))
        stack.enter_context(torch.enable_grad())
        yield


def softmax_backward(upstream: Tensor, weights: Tensor) -> Tensor:
    """The gradient of the logits of a softmax over the last dimension, in one launch."""
    return torch._softmax_backward_data(upstream, weights, -1, weights.dtype)


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of nested lists, tuples, dictionaries and model outputs, in order."""
    leaves: list[Any] = torch.utils._pytree.tree_leaves(tree)
    return leaves


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
        @functools.wraps(backward)
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


def _launchable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes tensor arguments contiguous and their GPU the current one, for kernel launches."""

    @functools.wraps(function)
    def launch(*args: Any) -> Any:
        args = tuple([x.contiguous() if isinstance(x, Tensor) else x for x in args])
        index = next(x for x in args if isinstance(x, Tensor)).get_device()  # -1 is a CPU
        if index < 0 or index == torch.cuda.current_device():
            return function(*args)
        with torch.cuda.device(index):
            return function(*args)

    return launch


def _without_none(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns empty tensors instead of None, which a torch operator cannot return."""

    @functools.wraps(function)
    def filled(*args: Any) -> Any:
        found = function(*args)
        if not isinstance(found, tuple) or all(x is not None for x in found):
            return found
        like = next(x for x in args if isinstance(x, Tensor))
        return tuple(like.new_empty(0) if x is None else x for x in found)

    return filled


class Operator:
    """A torch custom operator that eager code calls without the dispatcher.

    Compilers, exporters, fake tensors, tensor subclasses and dispatch modes (such as those of
    selective checkpointing) call ``torch.ops.espformer.<name>``,
    with its fake and autograd rules. Plain tensors go directly to the function, or to an autograd
    function if a gradient is needed: for small problems the dispatcher would take longer in Python
    than the kernels take on the GPU.

    The function may return None among its results, where the torch operator has an empty tensor.
    With `keeps`, all results but the first are for the backward pass: a call returns the first one,
    and ``setup_context`` sees all of them.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], schema: str | None, keeps: bool
    ) -> None:
        self.name, self.keeps = name.split("::")[-1], keeps
        self.function = _launchable(function)
        if schema is None:
            schema = torch.library.infer_schema(function, mutates_args=())
        filled = _without_none(self.function)
        self.custom = torch.library.custom_op(name, filled, mutates_args=(), schema=schema)
        self.with_gradient: Any = None
        self.__doc__ = function.__doc__

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        self.custom.register_fake(fake)
        return fake

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None]
    ) -> None:
        def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            setup_context(ctx, inputs, output)
            if self.keeps:
                ctx.mark_non_differentiable(*output[1:])
                ctx.set_materialize_grads(False)

        self.custom.register_autograd(backward, setup_context=setup)

        # Not as a separate setup_context: torch would then inspect the signature at every call.
        def forward(ctx: Any, *args: Any) -> Any:
            output = self.function(*args)
            setup_context(ctx, args, output)
            return output[0] if self.keeps else output

        members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self.with_gradient = type(self.name, (torch.autograd.Function,), members)

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling() or has_dispatch_modes():
            return self._dispatched(args)
        wanted = False
        for x in args:
            if isinstance(x, Tensor):
                if type(x) not in PLAIN:
                    return self._dispatched(args)
                wanted = wanted or x.requires_grad
        if self.with_gradient is None:
            return self.function(*args)
        wanted = wanted and torch.is_grad_enabled()
        if forward_ad._current_level >= 0:  # let the autograd function raise torch's own error
            tensors = [x for x in args if isinstance(x, Tensor)]
            wanted = wanted or any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
        if wanted:
            return self.with_gradient.apply(*args)
        found = self.function(*args)
        return found[0] if self.keeps else found

    def _dispatched(self, args: tuple[Any, ...]) -> Any:
        found = self.custom(*args)
        return found[0] if self.keeps else found


def operator(
    name: str, schema: str | None = None, keeps: bool = False
) -> Callable[[Callable[..., Any]], Operator]:
    """Decorates a function of tensors, numbers and strings as ``espformer::<name>``.

    The schema is inferred from the signature; functions with ``*args`` must pass one.
    """
    return lambda function: Operator(f"espformer::{name}", function, schema, keeps)
