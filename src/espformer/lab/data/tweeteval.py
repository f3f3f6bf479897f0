"""TweetEval, sentiment: tweets, negative, neutral or positive (Barbieri et al. 2020).

The paper has tweets that are positive or negative, the benchmark neutral ones too. Both are here.
"""

from pathlib import Path

from espformer.lab.data.base import Task
from espformer.lab.data.files import Files, Hub, Source, find
from espformer.lab.data.reading import read_labels, read_table, read_texts
from espformer.lab.data.text import Texts, text_task

__all__ = ["SOURCE", "load"]

NAMES = ["negative", "neutral", "positive"]
COLUMNS = "text, label (0 = negative, 1 = neutral, 2 = positive)"
SOURCE = Source(
    name="tweeteval",
    folder="tweeteval_sentiment",
    splits={
        "train": (("train*.parquet",),),
        "valid": (("validation*.parquet",),),
        "test": (("test*.parquet",),),
    },
    layout={"train.parquet": COLUMNS, "validation.parquet": "the same", "test.parquet": "the same"},
    where="cardiffnlp/tweet_eval on the hub, configuration sentiment.",
    licence="Twitter's terms of service; SemEval-2017 task 4, for research",
    rows={"train": 45_615, "valid": 2_000, "test": 12_284},
    sums={
        "train.parquet": (
            (1_910_157, "34066c751a0a89b74c4e368099ea5dbc4b515c3e2006e6247fe78480e8724271"),
        ),
        "validation.parquet": (
            (94_265, "ade94c9f4135826c9edff3c4a9c554d982aa9298f8c5d698885b9ed76847195b"),
        ),
        "test.parquet": (
            (455_912, "478dac60874bd98b17da3b0b47a9b261412b4d75b9868ea03c8b77d1189f9dc7"),
        ),
    },
    notes=(
        "the texts of the training split were rebuilt from SemEval-2017 task 4A; 259 rows of "
        "near-identical tweets may be swapped, and 2 rows are a guess",
    ),
    hub=Hub(
        "cardiffnlp/tweet_eval",
        "sentiment",
        {"train": "train", "valid": "validation", "test": "test"},
    ),
)


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
    splits = {split: _read(files, split) for split in ("train", "valid", "test")}
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


def _read(files: Files, split: str) -> Texts:
    paths = files.splits[split]
    table = read_table(paths, {"text": ("text",), "label": ("label",)})
    return read_texts(table, "text", paths), read_labels(table["label"], 3, paths)


def _without_neutral(texts: Texts) -> Texts:
    sentences, labels = texts
    kept = labels != 1
    return [s for s, keep in zip(sentences, kept.tolist(), strict=True) if keep], labels[kept] // 2
