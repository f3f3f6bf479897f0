"""How kernels are compiled: once, kept on disk where that is possible, without Python's lock."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import event, types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.extending import intrinsic

# Arrays are not counted: kernels are given all the room that they need, and keep nothing. Counting
# took longer than the work on short sequences, and is done with locks that threads wait for.
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}
OPTIONS["no_cfunc_wrapper"] = True


def _source_stamp() -> str:
    """What all files of this package amount to: kernels contain functions of several of them."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


STAMP = _source_stamp()


class _KernelCache(FunctionCache):
    """Numba's cache on disk, with a file for every signature and state of the sources.

    Numba itself looks at the time of one source file only, and keeps one index for all signatures,
    which two processes that compile at a time can spoil for each other. What cannot be read is
    compiled again, and what cannot be written is not kept.
    """

    def _choose_file(self, sig: Any) -> None:
        name = hashlib.sha256(f"{STAMP} {sig}".encode()).hexdigest()[:24]
        self._cache_file = IndexDataCacheFile(
            cache_path=self._cache_path,
            filename_base=f"{self._impl.filename_base}-{name}",
            source_stamp=STAMP,
        )

    def _load_overload(self, sig: Any, target_context: Any) -> Any:
        self._choose_file(sig)
        try:
            return super()._load_overload(sig, target_context)
        except (OSError, EOFError, AttributeError, ImportError, pickle.UnpicklingError):
            return None

    def _save_overload(self, sig: Any, data: Any) -> None:
        self._choose_file(sig)
        with contextlib.suppress(OSError):
            super()._save_overload(sig, data)


def kernel(function: Callable[..., Any]) -> Any:
    """Compiles a function at its first call, and keeps what was compiled for later processes.

    Nothing is kept where no directory can be written to. Divisions follow IEEE 754, and no rule of
    floating point is relaxed: a head that holds NaN must not touch its neighbours.
    """
    dispatcher = numba.njit(**OPTIONS)(function)
    with contextlib.suppress(RuntimeError):  # numba found no directory for its cache
        dispatcher._cache = _KernelCache(function)
    return dispatcher


def part(function: Callable[..., Any]) -> Any:
    """A function that kernels call, and Python does not; it is compiled with them."""
    return numba.njit(no_cpython_wrapper=True, **OPTIONS)(function)


def relaxed(*flags: str) -> Callable[[Callable[..., Any]], Any]:
    """A part in which sums may be taken in another order ("reassoc"), or fused ("contract").

    Neither assumes that numbers are finite.
    """
    return numba.njit(no_cpython_wrapper=True, fastmath=set(flags), **OPTIONS)


@intrinsic
def stand_alone(typingctx):  # type: ignore[no-untyped-def]
    """Keeps the function that it stands in from being copied into its callers.

    A loop over rows that is called from several places is then compiled once for all of them,
    which takes half of the time; what a call costs is nothing beside the loop.
    """

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), generate


class _Announcer(event.Listener):
    """Says, once in a process, what a first call waits for, if it waits for over a second."""

    PATIENCE = 1.0

    def __init__(self) -> None:
        self.compiling = 0
        self.timer: threading.Timer | None = None
        self.said = False

    @staticmethod
    def _ours(event: Any) -> bool:
        name: str = event.data["dispatcher"].py_func.__module__
        return name.startswith(__package__)

    def on_start(self, event: Any) -> None:
        if not self._ours(event):
            return
        self.compiling += 1
        if self.timer is None and not self.said:
            self.timer = threading.Timer(self.PATIENCE, self.say)
            self.timer.daemon = True
            self.timer.start()

    def on_end(self, event: Any) -> None:
        if not self._ours(event):
            return
        self.compiling -= 1
        if self.compiling == 0 and self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def say(self) -> None:
        self.said = True
        logging.getLogger("espformer").warning(
            "espformer compiles its CPU kernels for this machine: once for each kind of problem, "
            "for some seconds; the result is kept on disk"
        )


event.register("numba:compile", _Announcer())
