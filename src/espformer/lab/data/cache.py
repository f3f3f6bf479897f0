"""A cache of what was computed from a data set: decoded images, token ids.

Files lie in ``ESPFORMER_CACHE``, or ``~/.cache/espformer``; their names are hashes of all that the
content depends on, so nothing in there is ever out of date and all of it may be deleted. A file is
written under another name and then renamed: a reader never sees half of one, and of two processes
that write the same file either may win. Where nothing can be written, everything works without.
"""

import contextlib
import hashlib
import io
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from espformer.lab.files import replacing

ENVIRONMENT = "ESPFORMER_CACHE"
# Part of every key: raise it when the same inputs begin to give other contents.
VERSION = 1
ABANDONED = 24 * 3600.0

Array = np.ndarray[Any, np.dtype[Any]]


class CacheWarning(UserWarning):
    """The cache cannot be written: what it would have saved is computed again the next time."""


def directory() -> Path:
    """Return the folder of the cache; it need not exist."""
    return Path(os.path.expanduser(os.environ.get(ENVIRONMENT) or "~/.cache/espformer"))


def cache_key(kind: str, *parts: Any) -> str:
    """Return a name for content that depends on these parts, which must be fit for JSON.

    Example:
        >>> cache_key("tokens", 1) == cache_key("tokens", 1) != cache_key("tokens", 2)
        True
    """
    content = json.dumps([VERSION, *parts], sort_keys=True).encode()
    return f"{kind}-{hashlib.sha256(content).hexdigest()[:32]}"


def cached_bytes(key: str, build: Callable[[], bytes]) -> bytes:
    """Return the bytes kept under this key, or newly built ones, which are then kept."""
    name = f"{key}.bin"
    with contextlib.suppress(OSError):
        digest, _, content = (directory() / name).read_bytes().partition(b"\n")
        if digest == hashlib.sha256(content).hexdigest().encode():
            return content
    content = build()
    digest = hashlib.sha256(content).hexdigest().encode()
    _keep(name, [digest, b"\n", content])
    return content


def cached_array(
    key: str, shape: tuple[int, ...], dtype: Any, chunks: Callable[[], Iterable[Array]]
) -> Array:
    """Return the array kept under this key, mapped into memory rather than read.

    Args:
        key: from :func:`cache_key`.
        shape, dtype: of the whole array.
        chunks: called to build it, a few rows at a time.
    """
    name = f"{key}.npy"
    array = _map(name, shape, dtype)
    if array is not None:
        return array
    _keep(name, _npy(shape, dtype, chunks()))
    array = _map(name, shape, dtype)
    if array is None:
        array = np.concatenate([np.asarray(chunk, dtype) for chunk in chunks()])
    return array.reshape(shape)


def _map(name: str, shape: tuple[int, ...], dtype: Any) -> Array | None:
    try:
        # Copy on write: torch takes only writable memory, and nobody may write to the file.
        array: Array = np.load(directory() / name, mmap_mode="c")
    except (OSError, ValueError, EOFError):
        return None
    return array if array.shape == shape and array.dtype == np.dtype(dtype) else None


def _npy(shape: tuple[int, ...], dtype: Any, chunks: Iterable[Array]) -> Iterator[bytes]:
    header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}

    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, header)
    yield file.getvalue()
    for chunk in chunks:
        yield np.ascontiguousarray(chunk, dtype).tobytes()


def _keep(name: str, parts: Iterable[bytes]) -> None:
    """Write a file of the cache, or warn that it cannot be; errors of making `parts` are raised."""
    making = False
    try:
        _sweep(directory(), name)
        # Written, not mapped: a full disk is then an error to catch, not the end of the process.
        with replacing(directory() / name) as temporary, open(temporary, "wb") as file:
            making = True
            for part in parts:
                making = False
                file.write(part)
                making = True
            making = False
    except OSError as error:
        if making:
            raise
        warnings.warn(
            f"{name} cannot be kept in the cache ({error}): it will be computed again next time. "
            f"Set {ENVIRONMENT} to a folder with room that can be written to.",
            CacheWarning,
            stacklevel=3,
        )


def _sweep(folder: Path, name: str) -> None:
    """Remove what killed processes left of this file, long ago."""
    for left in folder.glob(f".{name}.*.part"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > ABANDONED:
                left.unlink()
