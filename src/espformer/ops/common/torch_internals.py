"""What this library needs of torch and torch does not promise: names that begin with ``_``.

They stand here alone, so that a new version of torch that renames one breaks one file, and
``tests/ops/common/test_torch_internals.py`` says which.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

__all__ = [
    "autograd_inside_an_operator",
    "has_dispatch_modes",
    "is_exporting",
    "is_transformed",
    "tree_leaves",
]


def is_exporting() -> bool:
    """True inside ``torch.export`` and its users, False inside ``torch.compile``.

    :func:`torch.compiler.is_exporting` itself is True in both while torch 2.11 compiles.
    """
    return bool(torch.compiler._is_exporting_flag)


def has_dispatch_modes() -> bool:
    """Whether a mode that fakes, counts or rewrites operators is at work."""
    return torch._C._len_torch_dispatch_stack() > 0


def is_transformed() -> bool:
    """Whether transforms of ``torch.func`` are at work."""
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return active is not None and not torch.compiler.is_compiling() and active()


@contextmanager
def autograd_inside_an_operator() -> Iterator[None]:
    """Records gradients inside an operator, where torch has turned autograd off as a whole."""
    key = torch._C.DispatchKey
    with ExitStack() as stack:
        for off in (key.AutogradFunctionality, key.AutogradOther, key.ADInplaceOrView):
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(off, False))
        stack.enter_context(torch.enable_grad())
        yield


def tree_leaves(tree: Any) -> list[Any]:
    """Whatever lists, tuples, dictionaries and outputs of models hold, in order."""
    leaves: list[Any] = torch.utils._pytree.tree_leaves(tree)
    return leaves
