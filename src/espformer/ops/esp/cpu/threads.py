"""Threads for kernels that release the GIL: as many as ``torch.get_num_threads()``.

Each thread owns whole heads, or some slices of a head. Partial results are added in a fixed order,
so results are deterministic.

Where torch has GNU's OpenMP, the threads are those that torch computes with itself. After an
operation these wait for the next one without going to sleep, for milliseconds: threads of our own
would have to share the cores with them.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from espformer.ops.common.forks import is_forked

# With fewer multiplications than this, waking another thread takes longer than the work.
WORTH_A_THREAD = 1 << 18

# Heads are divided into several shares for each thread: if one begins late, because another program
# uses its core, the others do more of them. A share has at least this many multiplications, so that
# calling its kernel takes no more than a sixteenth of it.
SHARES_OF_A_THREAD = 4
WORTH_A_SHARE = 16 * WORTH_A_THREAD


class Share(NamedTuple):
    """The heads ``[h0, h1)`` and the slices ``[l0, l1)``, which add to the partial sum `part`."""

    h0: int
    h1: int
    l0: int
    l1: int
    part: int


def split_work(heads: int, slices: int, work: int) -> list[Share]:
    """As many shares as threads, or several times that; `work` counts multiplications."""
    threads = min(torch.get_num_threads(), max(1, work // WORTH_A_THREAD))
    if threads == 1:
        return [Share(0, heads, 0, slices, 0)]
    if heads >= threads:
        most = min(heads, SHARES_OF_A_THREAD * threads, work // WORTH_A_SHARE)
        bounds = _bounds(heads, max(threads, most))
        return [Share(h0, h1, 0, slices, 0) for h0, h1 in bounds]
    bounds = _bounds(slices, min(slices, -(-threads // max(1, heads))))
    return [
        Share(head, head + 1, l0, l1, part)
        for head in range(heads)
        for part, (l0, l1) in enumerate(bounds)
    ]


def _bounds(count: int, parts: int) -> list[tuple[int, int]]:
    cuts = [count * i // parts for i in range(parts + 1)]
    return list(itertools.pairwise(cuts))


def once_per_thread(make: Callable[[], Any]) -> Callable[[], Any]:
    """`make`, called once by each thread that asks; later it gets the same again."""
    made: dict[int, Any] = {}

    def get() -> Any:
        own = threading.get_ident()
        if own not in made:
            made[own] = make()
        return made[own]

    return get


_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _find_openmp() -> Any:
    """``GOMP_parallel`` of the OpenMP that torch is linked with; None if it has no such function.

    None, too, in a process that was forked off: OpenMP's threads do not live on in it, and OpenMP,
    which does not know, would wait for them.
    """
    if is_forked():
        return None
    try:
        torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        found = torch_library.GOMP_parallel
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = (_BODY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return found


class _Pool:
    """Threads that wait for work; a process that was forked off starts its own."""

    def __init__(self) -> None:
        self.openmp = _find_openmp()
        self.reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.leave_openmp)

    def leave_openmp(self) -> None:
        self.openmp = None
        self.reset()

    def reset(self) -> None:
        self.lock, self.size = threading.Lock(), 0
        self.executor: ThreadPoolExecutor | None = None

    def of(self, threads: int) -> ThreadPoolExecutor:
        with self.lock:
            if self.executor is None or self.size < threads:
                if self.executor is not None:
                    self.executor.shutdown(wait=False)
                self.executor = ThreadPoolExecutor(threads, thread_name_prefix="espformer")
                self.size = threads
            return self.executor


_pool = _Pool()


def run(kernel: Callable[..., Any], work: list[Share], arguments: Callable[[int], tuple]) -> None:
    """``kernel(h0, h1, l0, l1, *arguments(i))`` for every share i of the work."""
    left = iter(range(len(work)))  # which Python's lock hands out one by one

    def take_shares() -> None:
        for index in left:
            kernel(*work[index][:4], *arguments(index))

    threads = min(len(work), torch.get_num_threads())
    if threads < 2:
        take_shares()
        return
    # A smaller team would end torch's other threads, which torch would then start again.
    if _pool.openmp is not None and len(work) >= torch.get_num_threads():
        _run_with_torch(take_shares, threads)
        return
    executor = _pool.of(threads - 1)
    waiting = [executor.submit(take_shares) for _ in range(1, threads)]
    try:
        take_shares()
    finally:
        for future in waiting:
            future.result()


def _run_with_torch(take_shares: Callable[[], None], threads: int) -> None:
    """Calls `take_shares` in as many threads as OpenMP gives."""
    errors, began = [], set()

    def work(_: int) -> None:
        try:
            began.add(threading.get_ident())
            take_shares()
        except BaseException as error:  # nobody above would hear of it
            errors.append(error)

    _pool.openmp(_BODY(work), None, threads, 0)
    if errors:
        raise errors[0]
    if threading.get_ident() not in began:
        # A signal came before `try`, and ctypes drops what its handler raised, most likely this.
        raise KeyboardInterrupt
    take_shares()  # none is left unless OpenMP gave no thread that could work
