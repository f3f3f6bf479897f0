"""IMDb: film reviews, negative or positive (Maas et al. 2011).

The paper's text classifier reads 512 tokens of a vocabulary of 16,000. Its vocabulary was learnt
from WikiText-103; ours is learnt from the training reviews.
"""

from pathlib import Path
from typing import Literal

import numpy as np
import torch

from espformer.lab.data.base import POOL, Task, check_fraction
from espformer.lab.data.files import Files, find, source_of
from espformer.lab.data.reading import read_labels, read_table, read_texts
from espformer.lab.data.text import Texts, text_task

NAMES = ["negative", "positive"]
SOURCE = source_of("imdb")


def load(
    *,
    data_dir: str | Path | None = None,
    seed: int = 0,
    split: Literal["published", "pooled"] = "published",
    max_length: int = 512,
    vocabulary_size: int = 16_000,
    validation: float = 0.0,
) -> Task:
    """Reviews (batch, tokens), negative (0) or positive (1); line breaks ``<br />`` are spaces.

    Args:
        data_dir, seed: as in :func:`espformer.lab.data.load`.
        split: "published" is 25,000 reviews each for training and testing; "pooled" puts all of
            them together and tests on a fifth drawn by the seed, as the code of the paper does.
        max_length: tokens kept of a review, the first ones.
        vocabulary_size: tokens of the vocabulary, learnt from the training reviews.
        validation: share of the training reviews to hold out as ``valid``, of each class alike.
    """
    check_fraction("imdb", "validation", validation, whole=False)
    if split not in ("published", "pooled"):
        raise ValueError(f"load('imdb'): split must be published or pooled, got {split!r}")
    files = find(SOURCE, data_dir)
    splits = {part: read(files, part) for part in ("train", "test")}
    if split == "pooled":
        splits = _pooled(splits, seed)
    task = text_task(
        files,
        splits,
        class_names=NAMES,
        max_length=max_length,
        vocabulary_size=vocabulary_size,
        validation=validation,
        seed=seed,
    )
    task.info["split"] = split
    return task


def read(files: Files, split: str) -> Texts:
    """Return the texts and labels of a published split."""
    paths = files.splits[split]
    table = read_table(paths, {"text": ("text",), "label": ("label",)})
    texts = [text.replace("<br />", " ") for text in read_texts(table, "text", paths)]
    return texts, read_labels(table["label"], 2, paths)


def _pooled(splits: dict[str, Texts], seed: int) -> dict[str, Texts]:
    texts = splits["train"][0] + splits["test"][0]
    labels = torch.cat([splits["train"][1], splits["test"][1]])
    order = np.random.RandomState([seed, POOL]).permutation(len(texts))
    count = len(texts) * 4 // 5
    parts = {"train": np.sort(order[:count]), "test": np.sort(order[count:])}
    return {
        part: ([texts[row] for row in rows.tolist()], labels[torch.from_numpy(rows)])
        for part, rows in parts.items()
    }
