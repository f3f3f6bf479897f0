"""The 8×8 handwritten digits that scikit-learn ships: the one data set inside this package.

1,797 images of 16 grey levels (Alpaydin & Kaynak 1998), small enough to learn on a laptop in
seconds. They have no published split: a fifth of each class is set apart for testing, always the
same fifth.
"""

import base64
import hashlib
import importlib.resources
import json
import zlib
from pathlib import Path

import numpy as np
import torch

from espformer.lab.data.base import (
    TEST,
    Task,
    TensorSet,
    check_fraction,
    hold_out,
    sizes,
    stratified,
)
from espformer.lab.data.transforms import Normalise

IMAGES, SIZE, LEVELS = 1797, 8, 16
# Of the training images, divided by 16.
MEAN, STD = 0.3052, 0.3762


def load(*, data_dir: str | Path | None = None, seed: int = 0, validation: float = 0.0) -> Task:
    """Images (batch, 1, 8, 8), values 0 to 16, of the digits 0 to 9.

    Args:
        data_dir: not used, the images are part of the package.
        seed: as in :func:`espformer.lab.data.load`.
        validation: share of the training images to hold out as ``valid``, of each class alike.
    """
    check_fraction("digits", "validation", validation, whole=False)
    resource = importlib.resources.files("espformer.lab.data").joinpath("digits.json")
    document = json.loads(resource.read_text(encoding="utf-8"))
    content = zlib.decompress(base64.b64decode(document["images_then_labels"]))
    numbers = np.frombuffer(content, np.uint8).copy()
    images = torch.from_numpy(numbers[: IMAGES * SIZE**2]).view(IMAGES, 1, SIZE, SIZE)
    everything = TensorSet(images, torch.from_numpy(numbers[IMAGES * SIZE**2 :]))

    # The seed has no part in this: every run is tested on the same images.
    tested, kept = stratified(everything.labels, 0.2, 0, TEST)
    train, valid = hold_out(everything.subset(kept), validation, seed)
    test = everything.subset(tested)
    return Task(
        name="digits",
        train=train,
        valid=valid,
        test=test,
        classes=10,
        normalise=Normalise([MEAN], [STD], scale=LEVELS),
        info={
            "source": "part of the package, the images of sklearn.datasets.load_digits",
            "sizes": sizes(train, valid, test),
            "sha256": {"digits.json": hashlib.sha256(content).hexdigest()},
            "checked_against": "nothing",
            "licence": document["licence"],
            "differences": ["no split is published: a fifth of each class is ours for testing"],
            "image_size": SIZE,
            "channels": 1,
        },
    )
