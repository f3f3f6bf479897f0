"""Atomic writes, and locks against a second process."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from espformer.lab.errors import RunError

_MARGIN = 64 * 2**20

LOCK = ".lock"
"""File in the directory of a run that whoever works on it holds."""


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file atomically: after a failure it is unchanged."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, which takes its place when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def lock(path: Path, *, wait: bool) -> Iterator[None]:
    """Keep other processes out of such a block for its length.

    The system frees the lock when the process ends, however it ends. Where there are no such locks
    (Windows), two processes on one directory are the user's to avoid.

    Args:
        path: a directory, on which nothing is left behind, or a file that is made where it is not.
        wait: wait for the process that holds the lock, instead of refusing to begin.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    # Network file systems lock exclusively only what is open for writing, as a directory never is.
    flags = os.O_RDONLY if path.is_dir() else os.O_CREAT | os.O_RDWR
    handle = os.open(path, flags, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(f"{path.parent}: another process is working on this run") from None
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def new_directory(directory: Path) -> Iterator[None]:
    """Make a directory for work that may fail before it has left anything in it.

    What was made for it, and is empty but for its lock when the block fails, is removed again.
    """
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    check_directory(directory)
    try:
        yield
    except BaseException:
        if directory in made and [entry.name for entry in directory.iterdir()] == [LOCK]:
            (directory / LOCK).unlink()
        with contextlib.suppress(OSError):  # not empty
            for path in made:
                path.rmdir()
        raise


def check_directory(directory: Path, needed: int = 0) -> None:
    """Refuse a directory that cannot be written, or has not `needed` bytes left and a margin."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".writable") as file:
            file.write(b"0" * 4096)
            file.flush()
    except OSError as error:
        raise RunError(
            f"{directory}: cannot write here ({error.strerror}); choose another place with --output"
        ) from None
    free = shutil.disk_usage(directory).free
    if free < needed + _MARGIN:
        raise RunError(
            f"{directory}: {free / 2**20:.0f} MB free, and this run needs about "
            f"{(needed + _MARGIN) / 2**20:.0f} MB for its checkpoints; make room, or choose "
            "another place with --output"
        )


def tail(path: Path) -> str:
    """Return the end of a text file, some thousand characters; nothing where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def refuse_directory(path: Path, name: str) -> None:
    """Tell before work is done that a page cannot be written in place of a directory."""
    if path.is_dir():
        raise RunError(f"{path}: is a directory; name the page, such as {path / name}")
