"""Compilation of kernels: once, cached on disk if possible, without the GIL."""

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
from numba import _dynfunc
from numba.core import event, types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.extending import intrinsic

# No reference counting of arrays: kernels get all the memory they need and keep no references. For
# short sequences counting would take longer than the work, and its locks would block threads.
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}
OPTIONS["no_cfunc_wrapper"] = True


def _source_stamp() -> str:
    """A hash of all source files of this package, because a kernel contains functions of several
    files.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


STAMP = _source_stamp()


class _KernelCache(FunctionCache):
    """Numba's cache on disk, with a file for every signature and state of the sources.

    Numba's own cache checks the date of one source file only, and keeps one index for all
    signatures, which two processes that compile at the same time can corrupt. Entries that cannot
    be read are compiled again; entries that cannot be written are not cached.
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


class _PartLibrary(JITCodeLibrary):
    """The code of a part as it was written: it is optimised and translated in kernels alone."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


class _PartCompiler(Compiler):
    """Numba's compiler, for functions that are called by kernels only.

    Numba would optimise a function and translate it to machine code once for itself, once more with
    each function that calls it, and so on upwards: half of the time that kernels take to compile.
    """

    def define_pipelines(self) -> Any:
        state = self.state
        state.flags.no_compile = True
        state.library = _PartLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        return super().define_pipelines()

    def compile_extra(self, function: Callable[..., Any]) -> Any:
        """The result, with an entry point that has no code: callers find the part by it."""
        result = super().compile_extra(function)
        entry = _dynfunc.make_function(
            result.fndesc.lookup_module(), function.__name__, "", 0, result.environment,
            (result.library,),
        )  # fmt: skip
        result.target_context.insert_user_function(entry, result.fndesc, [result.library])
        return result._replace(entry_point=entry)


PART_OPTIONS = {**OPTIONS, "no_cpython_wrapper": True, "pipeline_class": _PartCompiler}


def kernel(function: Callable[..., Any]) -> Any:
    """Compiles a function at its first call, and keeps what was compiled for later processes.

    If no directory is writable, nothing is cached. Divisions follow IEEE 754 and fast-math is off:
    a head with NaN must not affect its neighbours.
    """
    dispatcher = numba.njit(**OPTIONS)(function)
    with contextlib.suppress(RuntimeError):  # numba found no directory for its cache
        dispatcher._cache = _KernelCache(function)
    return dispatcher


def part(function: Callable[..., Any]) -> Any:
    """A function that is called by kernels only, and compiled with them.

    It has no entry of its own: Python must call its ``py_func``, and crashes otherwise.
    """
    return numba.njit(**PART_OPTIONS)(function)


def relaxed(*flags: str) -> Callable[[Callable[..., Any]], Any]:
    """A part in which sums may be taken in another order ("reassoc"), or fused ("contract").

    Neither assumes that numbers are finite.
    """
    return numba.njit(fastmath=set(flags), **PART_OPTIONS)


@intrinsic
def stand_alone(typingctx):  # type: ignore[no-untyped-def]
    """Keeps the enclosing function from being inlined into its callers.

    A loop over rows that is called from several places is then compiled only once, which halves the
    compile time. The cost of a call is negligible compared with the loop.
    """

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), generate


class _Announcer(event.Listener):
    """Prints once per process that kernels are being compiled, if this takes more than a second."""

    PATIENCE = 1.0

    def __init__(self) -> None:
        self.compiling = 0
        self.timer: threading.Timer | None = None
        self.said = False

    @staticmethod
    def _ours(event: Any) -> bool:
        name: str | None = event.data["dispatcher"].py_func.__module__  # none if made by exec
        return name is not None and name.startswith(__package__)

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
