"""Multi30k German to English: descriptions of photographs (Elliott et al. 2016), raw text."""

from pathlib import Path

from espformer.lab.data.base import Task
from espformer.lab.data.files import Hub, Source, find
from espformer.lab.data.translation import read_pairs, translation_task

__all__ = ["SOURCE", "load"]

SOURCE = Source(
    name="multi30k",
    folder="multi30k_de_en",
    splits={
        "train": (("train.parquet",), ("train.de", "train.en")),
        "valid": (("valid.parquet",), ("val.de", "val.en")),
        "test": (("test2016.parquet",), ("test_2016_flickr.de", "test_2016_flickr.en")),
    },
    layout={
        "train.parquet": "de, en; or as plain text: train.de and train.en, a sentence on each line",
        "valid.parquet": "the same, or val.de and val.en",
        "test2016.parquet": "the same, or test_2016_flickr.de and test_2016_flickr.en",
    },
    where="bentrevett/multi30k on the hub, or data/task1/raw of github.com/multi30k/dataset.",
    licence="Flickr30k captions, non-commercial research; commonly listed as CC BY-NC-SA 4.0",
    rows={"train": 29_000, "valid": 1_014, "test": 1_000},
    sums={
        "train.parquet": (
            (1_076_520, "565da12ef1534ef1121fdac8ef8549dc11db63f75bfeac22419c2a7109ae2ac6"),
        ),
        "valid.parquet": (
            (49_833, "0b27c5e7788d4e2421ba5f818f2276e5c4f4a414aa3fc90a2614d321f3fe5bd1"),
        ),
        "test2016.parquet": (
            (47_425, "600b3f0c8e486a566f091f5e1232f06208ac092876471d35e12bb1648cdee1f9"),
        ),
    },
    hub=Hub(
        "bentrevett/multi30k",
        "default",
        {"train": "train", "valid": "validation", "test": "test"},
    ),
)


def load(
    *,
    data_dir: str | Path | None = None,
    seed: int = 0,
    max_length: int = 175,
    vocabulary_size: int = 10_000,
) -> Task:
    """Pairs of a German source and an English target; the test split is the one of 2016.

    Args:
        data_dir: as in :func:`espformer.lab.data.load`.
        seed: not used, nothing here is drawn.
        max_length: tokens of a sentence, bos and eos counted; longer pairs are not trained on.
        vocabulary_size: tokens of the joint vocabulary, learnt from both sides of the training
            pairs.
    """
    files = find(SOURCE, data_dir)
    pairs = {split: read_pairs(paths) for split, paths in files.splits.items()}
    return translation_task(
        files,
        pairs,
        max_length=max_length,
        vocabulary_size=vocabulary_size,
        text_form="raw",
        bleu_tokenize="13a",
    )
