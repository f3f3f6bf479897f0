"""Private functions of torch (names that begin with ``_``) that this library needs.

They are used in this file only, so a version of torch that renames one breaks one file, and
``tests/ops/common/test_torch_internals.py`` names the function.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

__all__ = [
    "autograd_inside_an_operator",
    "can_decide_by",
    "can_read",
    "has_dispatch_modes",
    "is_exporting",
    "is_recorded",
    "is_transformed",
    "softmax_backward",
    "tree_leaves",
]


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
