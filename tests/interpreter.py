"""Triton's interpreter, faster: kernels compute the same, in a fraction of the time.

The interpreter runs a kernel operation by operation, and spends more time around an operation than
on it. Everything here depends on how one version of Triton is written: with another version, a name
may be missing, and what follows it is left as it is.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from triton.runtime import interpreter

language = interpreter.tl
core = language.core


def hasten() -> None:
    for change in (patch_once, check_no_overflow, know_types, scan_blocks):
        with contextlib.suppress(AttributeError):
            change()


def patch_once() -> None:
    """Replace functions of Triton's language by interpreted ones once for each launch of a kernel.

    Triton does so whenever a kernel calls a function. A function sees `triton.language`, or its
    `core` alone if it is Triton's.
    """
    replaced: set[tuple[bool, ...]] = set()
    launch = interpreter.GridExecutor.__call__

    @functools.cache
    def seen_by(function: Callable[..., object]) -> tuple[bool, ...]:
        modules = list(function.__globals__.values())
        return tuple(any(x is y for x in modules) for y in (language, core))

    def launched(self: interpreter.GridExecutor, *args: object, **options: object) -> None:
        replaced.clear()
        launch(self, *args, **options)

    def called(self: interpreter.InterpretedFunction, *args: object, **options: object) -> object:
        if seen_by(self.fn) not in replaced:
            interpreter._patch_lang(self.fn)
            replaced.add(seen_by(self.fn))
        try:
            return self.rewrite()(*args, **options)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__ = launched
    interpreter.InterpretedFunction.__call__ = called


def check_no_overflow() -> None:
    """Compute no conditions that nobody looks at.

    For each sum and product of integers Triton computes whether it overflows, in five operations.
    It is asserted with the option `debug` alone.
    """
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def know_types() -> None:
    """Work out once for every type what an operation asks of the types of its operands."""
    numpy_dtype = interpreter._get_np_dtype
    dtypes: dict[str, np.dtype[Any]] = {}

    def known_dtype(kind: Any) -> np.dtype[Any]:
        found = dtypes.get(kind.name)
        if found is None:
            found = dtypes[kind.name] = numpy_dtype(kind)
        return found

    interpreter._get_np_dtype = known_dtype

    describe_block, blocks = core.block_type.__init__, {}

    def described(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(core._unwrap_if_constexpr(x) for x in shape))
        if key not in blocks:
            describe_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key], element_ty=element_ty)

    core.block_type.__init__ = described

    make_tensor, tensors = core.tensor.__init__, {}

    def made(self: Any, handle: Any, type: Any) -> None:
        if type.name in tensors:
            vars(self).update(tensors[type.name], handle=handle, type=type)
        else:
            make_tensor(self, handle, type)
            tensors[type.name] = vars(self) | {"handle": None}

    core.tensor.__init__ = made


def scan_blocks() -> None:
    """Scan whole blocks in as many steps as a GPU takes, not number by number.

    Every step combines all numbers with those 1, 2, 4, ... places before them: what is combined
    must be associative, as on a GPU.
    """

    def scan(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
        found = [x.handle.data for x in inputs]
        count = found[0].shape[self.axis]
        places = np.arange(count).reshape([-1] + [1] * (found[0].ndim - 1 - self.axis))
        step = 1
        while step < count:
            before = places >= step
            earlier = [np.roll(x, step, self.axis) for x in found]
            operands = (
                self.to_tensor(x, y.dtype)
                for parts in (earlier, found)
                for x, y in zip(parts, inputs, strict=True)
            )
            combined = self.combine_fn.fn(*operands)
            if isinstance(combined, core.tensor):
                combined = (combined,)
            found = [
                np.where(before, new.handle.data, old).astype(old.dtype)
                for new, old in zip(combined, found, strict=True)
            ]
            step *= 2
        return [self.to_tensor(x, y.dtype) for x, y in zip(found, inputs, strict=True)]

    if hasattr(interpreter.ScanOps, "generic_scan"):
        interpreter.ScanOps.generic_scan = scan
