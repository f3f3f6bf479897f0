"""Launches of Triton kernels that cost little from Python, and the sizes of their grids and blocks.

A call of attention makes dozens of launches, of kernels with up to forty arguments. Triton binds
and classifies all of them anew at every launch, which takes longer than the kernels of a small
problem. Here all that follows from the shapes of a call is worked out once per shape (:func:`once`)
and kept as a :class:`Launch`: a kernel with everything but its tensors.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

T = TypeVar("T", bound=Callable[..., Any])
Shape = tuple[int, ...]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MOST_SHAPES = 512  # that every function of shapes remembers

# Versions whose `CompiledKernel.run` takes the arguments that `Launch` gives it, and whose NVIDIA
# backend compiles for nothing else of a tensor than its dtype and whether 16 divides its address.
KNOWN = ((3, 6), (3, 7))
VERSION = tuple(int(number) for number in triton.__version__.split(".")[:2])
DIRECT = VERSION in KNOWN and torch.version.hip is None and not INTERPRETED


_remembering: list[Any] = []


def once(function: T) -> T:
    """Remembers what a function of shapes, dtypes and numbers returns."""
    remembered = functools.lru_cache(MOST_SHAPES)(function)
    _remembering.append(remembered)
    return remembered  # type: ignore[return-value]


def forget() -> None:
    """Forgets it all: for tests that change the sizes of blocks."""
    for function in _remembering:
        function.cache_clear()


class Launch:
    """A kernel with its grid and all arguments but its tensors, which a call gives in their order.

    The first call with tensors of some dtypes and alignment is made by Triton, which compiles. The
    kernel that it picked is kept, and called directly from then on. Numbers and constants are part
    of the launch itself, so the dtypes of the tensors, which of them are None, whether 16 divides
    their addresses, and the device are all that Triton's choice can depend on.

    Triton launches by itself whenever somebody watches (a profiler's hooks), and in a version that
    is not `KNOWN`, which is said once. Tensors are contiguous and on the current device: kernels
    are launched inside of an :func:`espformer.ops.common.operators.operator`, which sees to both.
    """

    __slots__ = ("arguments", "compiled", "grid", "kernel", "places", "slots", "tensor_names")

    def __init__(self, kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        self.kernel = kernel
        self.arguments = arguments
        names = kernel.arg_names
        self.tensor_names = [name for name in names if name not in arguments]
        self.slots = [i for i, name in enumerate(names) if name not in arguments]
        self.places = [arguments.get(name) for name in names]
        self.grid = (*grid, 1, 1)[:3]
        self.compiled: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        if not DIRECT or _is_watched() or self.kernel.pre_run_hooks:
            _tell_of_version()
            self._launch_by_triton(tensors)
            return
        places, addresses, last = self.places.copy(), 0, None
        dtypes: list[torch.dtype | None] = []
        for slot, x in zip(self.slots, tensors, strict=True):
            if x is None:
                dtypes.append(None)
            else:
                places[slot] = address = x.data_ptr()
                addresses |= address
                dtypes.append(x.dtype)
                last = x
        device = -1 if last is None else last.get_device()
        key = (device, *dtypes)
        if addresses & 15:
            given = [places[slot] for slot in self.slots]
            key += tuple([address is None or address & 15 for address in given])
        found = self.compiled.get(key)
        if found is None:
            compiled = self._launch_by_triton(tensors)
            if isinstance(compiled, CompiledKernel):
                self.compiled[key] = compiled.run, compiled.function, compiled.packed_metadata
            return
        run, function, metadata = found
        stream = driver.active.get_current_stream(device)
        run(*self.grid, stream, function, metadata, None, None, None, *places)

    def _launch_by_triton(self, tensors: tuple[Tensor | None, ...]) -> Any:
        given = dict(zip(self.tensor_names, tensors, strict=True))
        return self.kernel[self.grid](**given, **self.arguments)


@functools.cache
def _tell_of_version() -> None:
    """Warns, once, if the version alone is why Triton launches by itself."""
    if VERSION in KNOWN or torch.version.hip is not None or INTERPRETED:
        return
    known = " and ".join(".".join(map(str, version)) for version in KNOWN)
    warnings.warn(
        f"espformer launches its kernels directly with triton {known}, and not with triton "
        f"{triton.__version__}, which it does not know: results are the same, but calls from "
        "Python are slower. Install one of these versions, or a newer espformer",
        RuntimeWarning,
        stacklevel=3,
    )


def _is_watched() -> bool:
    """Whether hooks want to see launches; chains of hooks are always there, and mostly empty."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up. Triton's own functions of that kind take microseconds a call."""
    return -(-x // y)


def power_of_2(x: int) -> int:
    """The least power of two that is not below x, which is at least one."""
    return 1 << (x - 1).bit_length()


def width_arguments(width: int) -> dict[str, int]:
    """The width of rows as arguments of a kernel: D at compile time, or D8 at run time.

    Powers of two, and widths that no eight columns fill, are compiled for. All others share one
    compiled kernel: D is zero, and the width is ``8 · D8``, so that loads of eight columns are
    known to be aligned.
    """
    shared = width % 8 == 0 and width & (width - 1) != 0
    return {"D": 0 if shared else width, "D8": width // 8}
