"""The data sets of the paper, each as a :class:`Task` with the same interface.

    >>> import espformer.lab.data
    >>> task = espformer.lab.data.load("digits")
    >>> len(task.train), len(task.test), task.classes
    (1438, 359, 10)

Files are looked for in ``data_dir``, then in the folder that ``ESPFORMER_DATA`` names, then on the
hub; where they are nowhere, the error says where to get them and how to lay them out. Only digits
is part of the package.
"""

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from espformer.lab.data.base import Batch, Task, TensorSet
from espformer.lab.data.files import DataError, DataMissing
from espformer.lab.errors import nearest
from espformer.ops.common.optional import how_to_install

__all__ = [
    "Batch",
    "DataError",
    "DataMissing",
    "Task",
    "TensorSet",
    "available",
    "load",
    "options",
]

_MODULES = (
    "cats_dogs",
    "digits",
    "imdb",
    "iwslt14",
    "mnist",
    "modelnet40",
    "multi30k",
    "tweeteval",
)


def available() -> tuple[str, ...]:
    """Names of the data sets.

    Example:
        >>> available()
        ('cats_dogs', 'digits', 'imdb', 'iwslt14', 'mnist', 'modelnet40', 'multi30k', 'tweeteval')
    """
    return _MODULES


def options(name: str) -> dict[str, Any]:
    """Options of a data set beside data_dir and seed, with their defaults.

    Example:
        >>> options("digits")
        {'validation': 0.0}
    """
    parameters = inspect.signature(_loader(name)).parameters.values()
    return {p.name: p.default for p in parameters if p.name not in ("data_dir", "seed")}


def load(name: str, *, data_dir: str | Path | None = None, seed: int = 0, **chosen: Any) -> Task:
    """Load a data set.

    Args:
        name: one of :func:`available`.
        data_dir: folder with the data; :mod:`espformer.lab.data.files` says where else is looked.
        seed: of random choices of examples (subsets, held-out parts), not of training.
        **chosen: options of the data set: :func:`options` lists them, its module explains them.

    Raises:
        ValueError: for an unknown name or a value out of range.
        TypeError: for an unknown option.
        DataMissing: when the files are not found; the message tells how to get them.
        DataError: when they are damaged.

    Example:
        >>> load("digits", validation=0.1).info["sizes"]
        {'train': 1295, 'valid': 143, 'test': 359}
    """
    loader = _loader(name)
    known = options(name)
    for option in chosen:
        if option not in known:
            raise TypeError(f"load('{name}') has no option '{option}', {nearest(option, known)}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"load('{name}'): seed must be an integer in [0, 2**32), got {seed!r}")
    return loader(data_dir=data_dir, seed=seed, **chosen)


def _loader(name: str) -> Callable[..., Task]:
    if name not in _MODULES:
        raise ValueError(f"no data set '{name}', {nearest(name, _MODULES)}")
    try:
        module = importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("espformer"):
            raise
        raise ImportError(
            f"espformer.lab.data needs {how_to_install(error.name, 'train')}"
        ) from error
    loader: Callable[..., Task] = module.load
    return loader
