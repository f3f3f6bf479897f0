"""Multi30k German to English: descriptions of photographs (Elliott et al. 2016), raw text."""

from pathlib import Path

from espformer.lab.data.base import Task
from espformer.lab.data.files import find, source_of
from espformer.lab.data.translation import read_pairs, translation_task

SOURCE = source_of("multi30k")


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
