"""IWSLT'14 German to English: transcripts of TED talks (Cettolo et al. 2014).

Texts are as fairseq's ``prepare-iwslt14.sh`` leaves them before byte-pair encoding: tokenised by
Moses and in lower case. Published BLEU scores are of such tokenised text.
"""

from pathlib import Path
from typing import Literal

from espformer.lab.data.base import Task
from espformer.lab.data.files import DataError, Source, find
from espformer.lab.data.translation import read_pairs, translation_task

__all__ = ["SOURCE", "load"]


def _ways(*names: str) -> tuple[tuple[str, ...], ...]:
    parquet = tuple((f"{name}.parquet",) for name in names)
    return *parquet, (f"{names[0]}.de", f"{names[0]}.en")


SOURCE = Source(
    name="iwslt14",
    folder="iwslt14_de_en",
    splits={
        "train": _ways("train", "train_subset"),
        "valid": _ways("valid"),
        "test": _ways("test"),
    },
    layout={
        "train.parquet": "de, en; or as plain text: train.de and train.en, a sentence on each line",
        "valid.parquet": "the same",
        "test.parquet": "the same",
    },
    where=(
        "run prepare-iwslt14.sh of fairseq (examples/translation); train, valid and test in its "
        "folder iwslt14.tokenized.de-en/tmp are the plain text that is meant below."
    ),
    licence="TED transcripts, (c) TED Conferences LLC, CC BY-NC-ND 3.0",
    rows={"train": 160_239, "valid": 7_283, "test": 6_750},
    sums={
        "train_subset.parquet": (
            (4_411_645, "70802ca3773dd6209639b4fb003ebb7d7350e8855dc92ac34f0179833f8e38b0"),
        ),
        "valid.parquet": (
            (522_666, "4fb52ddaf375505efde54316af8bbd88463c1965c78319a1ea12e8045215515a"),
        ),
        "test.parquet": (
            (436_674, "7e3f6cba64d6a97c2df6fad8f6b503ccdb921be3212d283655be4769c91dcd63"),
        ),
    },
    notes=(
        "the training split is a part of the published one, with talks of IWSLT'17 beside it: "
        "scores cannot be compared with published ones",
    ),
)


def load(
    *,
    data_dir: str | Path | None = None,
    seed: int = 0,
    subset: Literal["iwslt14", "all"] = "iwslt14",
    max_length: int = 175,
    vocabulary_size: int = 10_000,
) -> Task:
    """Pairs of a German source and an English target.

    Args:
        data_dir: as in :func:`espformer.lab.data.load`.
        seed: not used, nothing here is drawn.
        subset: training pairs of IWSLT'14 alone, or all that the file holds. Only a file with a
            column `source` holds others.
        max_length: tokens of a sentence, bos and eos counted; longer pairs are not trained on.
        vocabulary_size: tokens of the joint vocabulary, learnt from both sides of the training
            pairs.
    """
    if subset not in ("iwslt14", "all"):
        raise ValueError(f"load('iwslt14'): subset must be iwslt14 or all, got {subset!r}")
    files = find(SOURCE, data_dir)
    pairs = {split: read_pairs(paths) for split, paths in files.splits.items()}
    origins = pairs["train"].get("source")
    if subset == "iwslt14" and origins is not None:
        kept = [row for row, origin in enumerate(origins) if origin == "iwslt14"]
        if not kept:
            raise DataError(
                f"{files.splits['train'][0]}: no row has 'iwslt14' in the column source; pass "
                "subset='all' to train on what there is"
            )
        pairs["train"] = {
            column: [texts[row] for row in kept] for column, texts in pairs["train"].items()
        }
    return translation_task(
        files,
        pairs,
        max_length=max_length,
        vocabulary_size=vocabulary_size,
        subset=subset,
        text_form="tokenised by Moses, lower case",
        bleu_tokenize="none",
    )
