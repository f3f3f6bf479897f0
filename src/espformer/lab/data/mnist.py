"""MNIST: 28×28 handwritten digits (LeCun, Cortes & Burges 1998), for the effect of patch size."""

from pathlib import Path

import torch

from espformer.lab.data.base import Task, TensorSet, check_fraction, hold_out, sizes
from espformer.lab.data.files import Files, find, source_of
from espformer.lab.data.reading import read_images, read_labels, read_npz, read_table
from espformer.lab.data.transforms import Normalise

SOURCE = source_of("mnist")

MEAN, STD = 0.1307, 0.3081


def load(*, data_dir: str | Path | None = None, seed: int = 0, validation: float = 0.0) -> Task:
    """Images (batch, 1, 28, 28) of the digits 0 to 9.

    Args:
        data_dir, seed: as in :func:`espformer.lab.data.load`.
        validation: share of the training images to hold out as ``valid``, of each class alike.
    """
    check_fraction("mnist", "validation", validation, whole=False)
    files = find(SOURCE, data_dir)
    whole, test = (_read(files, split) for split in ("train", "test"))
    train, valid = hold_out(whole, validation, seed)
    found = {"train": len(whole), "test": len(test)}
    return Task(
        name="mnist",
        train=train,
        valid=valid,
        test=test,
        classes=10,
        normalise=Normalise([MEAN], [STD]),
        info={**files.info(sizes(train, valid, test), found), "image_size": 28, "channels": 1},
    )


def _read(files: Files, split: str) -> TensorSet:
    paths = files.splits[split]
    if paths[0].suffix == ".npz":
        shapes = {f"x_{split}": (-1, 28, 28), f"y_{split}": (-1,)}
        arrays = read_npz(paths[0], shapes)
        images = torch.from_numpy(arrays[f"x_{split}"])[:, None]
        return TensorSet(images, read_labels(arrays[f"y_{split}"], 10, paths))
    table = read_table(paths, {"label": ("label",)})
    images = read_images(paths, files.content(split), size=28, channels=1)
    return TensorSet(images, read_labels(table["label"], 10, paths))
