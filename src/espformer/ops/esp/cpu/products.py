"""Products with the kernel of sorted numbers, whatever the metric: chosen by the kernel's type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core.extending import overload

from espformer.ops.esp.cpu import absolute

KINDS = {absolute.Laplacian: absolute, absolute.Table: absolute}


def _by_kernel(name: str) -> Callable[..., Any]:
    """The function `name` of the module that the type of the first argument belongs to."""

    def function(kernel: Any, *operands: Any) -> Any:
        raise NotImplementedError("only inside compiled kernels")

    function.__name__ = name

    @overload(function, strict=False)
    def choose(kernel: Any, *operands: Any) -> Any:
        chosen = getattr(KINDS[kernel.instance_class], name)
        return lambda kernel, *operands: chosen(kernel, *operands)

    return function


new_kernel = _by_kernel("new_kernel")
set_kernel = _by_kernel("set_kernel")
multiply = _by_kernel("multiply")
multiply_with_slope = _by_kernel("multiply_with_slope")
multiply_column = _by_kernel("multiply_column")
stretch = _by_kernel("stretch")
