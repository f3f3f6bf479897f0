"""Cats and Dogs: photographs from Kaggle's and Microsoft's "Asirra" set, two classes.

The protocol is that of the Sinkformers' experiment, which the paper repeats: images of 224×224
squeezed to [0, 1] and nothing else; random resized crops and mirroring in training; subsets of 1,
10 and 25 % of the training images, the same ones for every method.
"""

from pathlib import Path

from espformer.lab.data.base import (
    TEST,
    Task,
    TensorSet,
    check_fraction,
    check_sizes,
    digest,
    hold_out,
    sizes,
    stratified,
)
from espformer.lab.data.files import Files, find, source_of
from espformer.lab.data.reading import read_images, read_labels, read_table
from espformer.lab.data.transforms import Normalise, RandomResizedCrop

SOURCE = source_of("cats_dogs")


def load(
    *,
    data_dir: str | Path | None = None,
    seed: int = 0,
    fraction: float = 1.0,
    images: int | None = None,
    image_size: int = 224,
    augment: bool = True,
    validation: float = 0.0,
) -> Task:
    """Images (batch, 3, image_size, image_size) of cats (0) and dogs (1).

    Args:
        data_dir, seed: as in :func:`espformer.lab.data.load`.
        fraction: share of the training images, of each class alike: 0.01, 0.1, 0.25 and 1 in the
            paper. A seed determines the images, and a smaller share is part of a larger one.
        images: how many training images, as many of each class, instead of a share of them.
        image_size: height and width.
        augment: random resized crops and mirroring, in training only.
        validation: share of the chosen images to hold out as ``valid``, of each class alike.
    """
    name = SOURCE.name
    check_fraction(name, "fraction", fraction, whole=True)
    if images is not None and fraction != 1:
        raise ValueError(
            f"load('{name}'): give a number of images or a fraction of them, not both; got "
            f"images={images} and fraction={fraction}"
        )
    check_fraction(name, "validation", validation, whole=False)
    check_sizes(name, image_size=image_size)
    files = find(SOURCE, data_dir)
    if files.splits["train"] == files.splits["test"]:
        everything = _read(files, "train", image_size)
        # The seed has no part in this: every run is tested on the same images.
        tested, kept = stratified(everything.labels, 0.2, 0, TEST)
        whole, test = everything.subset(kept), everything.subset(tested)
    else:
        whole, test = (_read(files, split, image_size) for split in ("train", "test"))

    if images is not None:
        if not 2 <= images <= len(whole):
            raise ValueError(
                f"load('{name}'): images must be between 2 and the {len(whole)} that there are for "
                f"training, got {images}"
            )
        fraction = images / len(whole)
    chosen, _ = stratified(whole.labels, fraction, seed)
    train = whole if fraction == 1 else whole.subset(chosen)
    train, valid = hold_out(train, validation, seed)
    found = {"train": len(whole), "test": len(test)}
    return Task(
        name=name,
        train=train,
        valid=valid,
        test=test,
        classes=2,
        augment=RandomResizedCrop() if augment else None,
        normalise=Normalise([0.0] * 3, [1.0] * 3),
        info={
            **files.info(sizes(train, valid, test), found),
            "class_names": ["cat", "dog"],
            "image_size": image_size,
            "channels": 3,
            "subset": {"fraction": fraction, "seed": seed, "sha256": digest(chosen)},
        },
    )


def _read(files: Files, split: str, image_size: int) -> TensorSet:
    paths = files.splits[split]
    table = read_table(paths, {"label": ("label", "labels")})
    images = read_images(paths, files.content(split), size=image_size, channels=3)
    return TensorSet(images, read_labels(table["label"], 2, paths))
