"""TweetEval, sentiment: tweets, negative, neutral or positive (Barbieri et al. 2020).

The paper has tweets that are positive or negative, the benchmark neutral ones too. Both are here.
"""

from pathlib import Path

from espformer.lab.data.base import Task
from espformer.lab.data.files import Files, find, source_of
from espformer.lab.data.reading import read_labels, read_table, read_texts
from espformer.lab.data.text import Texts, text_task

NAMES = ["negative", "neutral", "positive"]
SOURCE = source_of("tweeteval")


def load(
    *,
    data_dir: str | Path | None = None,
    seed: int = 0,
    classes: int = 3,
    max_length: int = 128,
    vocabulary_size: int = 16_000,
) -> Task:
    """Tweets (batch, tokens) with the published splits.

    Args:
        data_dir, seed: as in :func:`espformer.lab.data.load`.
        classes: 3, as published; 2 leaves the neutral tweets out of every split and calls negative
            0 and positive 1.
        max_length: tokens kept of a tweet, the first ones.
        vocabulary_size: tokens of the vocabulary, learnt from the training tweets.
    """
    if classes not in (2, 3):
        raise ValueError(f"load('tweeteval'): classes must be 2 or 3, got {classes}")
    files = find(SOURCE, data_dir)
    splits = {split: read(files, split) for split in ("train", "valid", "test")}
    found = {split: len(texts) for split, (texts, _) in splits.items()}
    if classes == 2:
        splits = {split: _without_neutral(texts) for split, texts in splits.items()}
    return text_task(
        files,
        splits,
        class_names=NAMES if classes == 3 else [NAMES[0], NAMES[2]],
        max_length=max_length,
        vocabulary_size=vocabulary_size,
        validation=0.0,
        seed=seed,
        found=found,
    )


def read(files: Files, split: str) -> Texts:
    """Return the texts and labels of a published split."""
    paths = files.splits[split]
    table = read_table(paths, {"text": ("text",), "label": ("label",)})
    return read_texts(table, "text", paths), read_labels(table["label"], 3, paths)


def _without_neutral(texts: Texts) -> Texts:
    sentences, labels = texts
    kept = labels != 1
    return [s for s, keep in zip(sentences, kept.tolist(), strict=True) if keep], labels[kept] // 2
