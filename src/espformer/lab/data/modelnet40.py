"""ModelNet40: objects of 40 kinds as points on their surface (Wu et al. 2015).

1,024 points of each object, centred and within the unit sphere; the paper samples 5,000 for Set
Transformers, which this form of the data does not have.
"""

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from espformer.lab.data.base import Task, TensorSet, check_fraction, hold_out, sizes
from espformer.lab.data.files import DataError, Files, find, source_of
from espformer.lab.data.reading import read_labels, read_npz
from espformer.lab.data.transforms import PointCloudAugment, RotateScale

POINTS, CLASSES = 1024, 40
# Coordinates are stored as multiples of 1/2048.
STEPS = 2048
SOURCE = source_of("modelnet40")


def load(
    *,
    data_dir: str | Path | None = None,
    seed: int = 0,
    points: int = 1024,
    protocol: Literal["pct", "set_transformer"] = "pct",
    augment: bool = True,
    validation: float = 0.0,
) -> Task:
    """Point clouds (batch, points, 3) of 40 kinds of objects.

    Args:
        data_dir, seed: as in :func:`espformer.lab.data.load`.
        points: how many of each object, at most 1024: the first ones, which are a random sample.
        protocol: "pct" keeps coordinates in the unit sphere and trains with
            :class:`~espformer.lab.data.transforms.PointCloudAugment`; "set_transformer" gives each
            cloud mean 0 and deviation 1 over all its coordinates and trains with
            :class:`~espformer.lab.data.transforms.RotateScale`.
        augment: change clouds at random, in training only.
        validation: share of the training objects to hold out as ``valid``, of each class alike.
    """
    name = SOURCE.name
    check_fraction(name, "validation", validation, whole=False)
    if not 1 <= points <= POINTS:
        raise ValueError(f"load('{name}'): points must be in 1..{POINTS}, got {points}")
    if protocol not in ("pct", "set_transformer"):
        raise ValueError(
            f"load('{name}'): protocol must be pct or set_transformer, got {protocol!r}"
        )
    files = find(SOURCE, data_dir)
    names: dict[str, None] = {}
    whole, test = (_read(files, split, points, names) for split in ("train", "test"))
    if protocol == "set_transformer":
        whole, test = (TensorSet(_standardised(data.inputs), data.labels) for data in (whole, test))
    train, valid = hold_out(whole, validation, seed)
    found = {"train": len(whole), "test": len(test)}
    transform = PointCloudAugment() if protocol == "pct" else RotateScale()
    return Task(
        name=name,
        train=train,
        valid=valid,
        test=test,
        classes=CLASSES,
        augment=transform if augment else None,
        info={
            **files.info(sizes(train, valid, test), found),
            "class_names": list(names),
            "points": points,
            "channels": 3,
            "protocol": protocol,
        },
    )


def _read(files: Files, split: str, points: int, names: dict[str, None]) -> TensorSet:
    clouds, labels = [], []
    for path in files.splits[split]:
        arrays = read_npz(
            path,
            {"points_i16": (-1, POINTS, 3), "label": (-1,), "class_names": (CLASSES,)},
        )
        clouds.append(torch.from_numpy(arrays["points_i16"][:, :points].astype("float32")))
        labels.append(read_labels(arrays["label"], CLASSES, [path]))
        names.update(dict.fromkeys(arrays["class_names"].tolist()))
        if len(names) != CLASSES:
            raise DataError(f"{path}: class_names differ from those of the other files")
    return TensorSet(torch.cat(clouds).div_(STEPS), torch.cat(labels))


def _standardised(clouds: Tensor) -> Tensor:
    """Give each cloud mean 0 and deviation 1 over all its coordinates."""
    mean = clouds.mean((1, 2), keepdim=True)
    return (clouds - mean) / clouds.std((1, 2), keepdim=True, correction=0).clamp(min=1e-12)
