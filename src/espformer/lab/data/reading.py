"""Reading the formats that data sets come in, with errors that name the file and the remedy."""

from __future__ import annotations

import contextlib
import io
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from espformer.lab.data.cache import Array, cache_key, cached_array
from espformer.lab.data.files import DataError, require
from espformer.lab.errors import first_line

# Images decoded at a time: a few tens of MB.
CHUNK = 256


def read_npz(path: Path, arrays: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Read the arrays of an ``.npz`` file.

    Args:
        path: of the file.
        arrays: name → shape that is expected, -1 for any extent.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            content = {name: file[name] for name in arrays if name in file}
            present = list(file)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(_unreadable(path, "an .npz file", error)) from error
    for name, shape in arrays.items():
        if name not in content:
            raise DataError(f"{path} has no array '{name}', only {', '.join(present) or 'none'}")
        got = content[name].shape
        fits = len(got) == len(shape) and all(
            extent in (-1, found) for extent, found in zip(shape, got, strict=True)
        )
        if not fits:
            raise DataError(f"{path}: '{name}' has shape {got}, expected {shape}")
    return content


def read_table(paths: Sequence[Path], columns: Mapping[str, tuple[str, ...]]) -> Any:
    """Columns of parquet files, one below the other, as a ``pyarrow.Table``.

    Args:
        paths: of the files.
        columns: our name of each column → the names it may have in the file.
    """
    tables = []
    for path in paths:
        names = _columns(path, columns)
        with _parquet(path) as parquet:
            table = parquet.read_table(path, columns=list(names.values()))
        tables.append(table.select(list(names.values())).rename_columns(list(names)))
    return require("pyarrow").concat_tables(tables, promote_options="permissive")


@contextlib.contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """Yield what reads parquet files; a file that cannot be read is told."""
    try:
        yield require("pyarrow.parquet")
    except (OSError, require("pyarrow").ArrowException) as error:
        raise DataError(_unreadable(path, "a parquet file", error)) from error


def read_texts(table: Any, column: str, paths: Sequence[Path]) -> list[str]:
    """Return a column of texts, none of them missing."""
    texts = table[column].to_pylist()
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"{_names(paths)}: row {row} of '{column}' is {text!r}, not a text")
    return texts


def read_labels(labels: Any, classes: int, paths: Sequence[Path]) -> Tensor:
    """Labels as (examples,) int64, each in [0, classes)."""
    values = np.asarray(labels)
    if values.dtype.kind not in "iu":
        raise DataError(f"{_names(paths)}: labels must be integers, got {values.dtype}")
    if len(values) and not (values.min() >= 0 and values.max() < classes):
        raise DataError(
            f"{_names(paths)}: labels must be in 0..{classes - 1}, got "
            f"{values.min()}..{values.max()}"
        )
    return torch.from_numpy(values.astype(np.int64))


def read_images(paths: Sequence[Path], content: list[str], *, size: int, channels: int) -> Tensor:
    """Return the column ``image`` of parquet files, decoded once and kept in the cache.

    Images of another size are resized to (size, size), bilinearly.

    Args:
        paths: of the files; the column holds encoded images, or structs that hold them as `bytes`.
        content: checksums of the files.
        size: height and width.
        channels: 3 for RGB, 1 for grey.

    Returns:
        (examples, channels, size, size), uint8.
    """
    require("PIL")
    parquet = require("pyarrow.parquet")
    for path in paths:
        _columns(path, {"image": ("image",)})
    examples = sum(parquet.read_metadata(path).num_rows for path in paths)
    array = cached_array(
        cache_key("images", content, size, channels),
        (examples, channels, size, size),
        np.uint8,
        lambda: _decoded(paths, size, channels),
    )
    return torch.from_numpy(array)


def _decoded(paths: Sequence[Path], size: int, channels: int) -> Iterator[Array]:
    decode = partial(_decode, size=size, channels=channels)
    # Decoding leaves the interpreter free, so threads do.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for path in paths:
            row = 0
            with _parquet(path) as parquet:
                for batch in parquet.ParquetFile(path).iter_batches(CHUNK, columns=["image"]):
                    values = batch.column(0).to_pylist()
                    where = [f"{path}, row {row + i}" for i in range(len(values))]
                    yield np.stack(list(pool.map(decode, values, where)))
                    row += len(values)


def _decode(value: Any, where: str, *, size: int, channels: int) -> Array:
    from PIL import Image

    encoded = value["bytes"] if isinstance(value, dict) else value
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            pixels = image.convert("RGB" if channels == 3 else "L")
    except (OSError, ValueError, TypeError, SyntaxError) as error:
        raise DataError(f"{where}: the image cannot be decoded ({error})") from error
    if pixels.size != (size, size):
        pixels = pixels.resize((size, size), Image.Resampling.BILINEAR)
    array = np.asarray(pixels)
    return array[None] if channels == 1 else array.transpose(2, 0, 1)


def _columns(path: Path, columns: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    with _parquet(path) as parquet:
        present = parquet.read_schema(path).names
    names = {}
    for ours, theirs in columns.items():
        found = next((name for name in theirs if name in present), None)
        if found is None:
            raise DataError(
                f"{path} has no column {' or '.join(theirs)}, only {', '.join(present)}"
            )
        names[ours] = found
    return names


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(str(path) for path in paths)


def _unreadable(path: Path, form: str, error: Exception) -> str:
    return (
        f"{path} cannot be read as {form} ({first_line(error)}). "
        "It is cut short or damaged: fetch it again."
    )
