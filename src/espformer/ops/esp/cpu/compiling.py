"""How the kernels are compiled: once, kept on disk where that is possible, without Python's lock."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numba
from numba.core import event

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def kernel(function: Callable[..., Any]) -> Any:
    """Compiles a function at its first call, and keeps what was compiled for later processes.

    Nothing is kept where no directory can be written to. Divisions follow IEEE 754, and no rule of
    floating point is relaxed: a head that holds NaN must not touch its neighbours.
    """
    try:
        return numba.njit(cache=True, **OPTIONS)(function)
    except RuntimeError:  # numba found no directory for its cache
        return numba.njit(**OPTIONS)(function)


def part(function: Callable[..., Any]) -> Any:
    """A function that kernels call; it is compiled with them."""
    return numba.njit(**OPTIONS)(function)


class _Announcer(event.Listener):
    """Says, once in a process, what a first call waits for, if it waits for over a second."""

    PATIENCE = 1.0

    def __init__(self) -> None:
        self.compiling = 0
        self.timer: threading.Timer | None = None
        self.said = False

    def on_start(self, event: Any) -> None:
        if self.said or not event.data["dispatcher"].py_func.__module__.startswith(__package__):
            return
        self.compiling += 1
        if self.timer is None:
            self.timer = threading.Timer(self.PATIENCE, self.say)
            self.timer.daemon = True
            self.timer.start()

    def on_end(self, event: Any) -> None:
        self.compiling -= 1
        if self.compiling <= 0 and self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def say(self) -> None:
        self.said = True
        logging.getLogger("espformer").warning(
            "espformer compiles its CPU kernels for this machine: once for each kind of problem, "
            "for some seconds; the result is kept on disk"
        )


event.register("numba:compile", _Announcer())
