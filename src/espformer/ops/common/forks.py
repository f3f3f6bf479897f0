"""Whether this process was forked off another one: threads of the parent do not live on in it."""

from __future__ import annotations

import multiprocessing
import os

_forked = False


def _remember() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    # At the import of the package: later, a fork may be over already.
    os.register_at_fork(after_in_child=_remember)


def is_forked() -> bool:
    """True after a fork, unless ``os.fork`` was called by hand before this package was imported."""
    return _forked or type(multiprocessing.current_process()).__name__ == "ForkProcess"
