"""IWSLT'14 German to English: transcripts of TED talks (Cettolo et al. 2014).

Texts are as fairseq's ``prepare-iwslt14.sh`` leaves them before byte-pair encoding: tokenised by
Moses and in lower case. Published BLEU scores are of such tokenised text.
"""

from pathlib import Path
from typing import Literal

from espformer.lab.data.base import Task
from espformer.lab.data.files import DataError, find, source_of
from espformer.lab.data.translation import read_pairs, translation_task

SOURCE = source_of("iwslt14")


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
