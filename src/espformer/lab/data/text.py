"""Data sets of labelled texts: a vocabulary, token ids, a task."""

import torch
from torch import Tensor

from espformer.lab.data.base import Task, TensorSet, check_sizes, hold_out
from espformer.lab.data.files import Files
from espformer.lab.data.vocabulary import Vocabulary, encode

Texts = tuple[list[str], Tensor]
"""The texts of a split and their labels, (examples,)."""


def text_task(
    files: Files,
    splits: dict[str, Texts],
    *,
    class_names: list[str],
    max_length: int,
    vocabulary_size: int,
    validation: float,
    seed: int,
    found: dict[str, int] | None = None,
) -> Task:
    """Return a task of labelled texts: the vocabulary is learnt from the split `train`.

    Args:
        files: where the texts came from.
        splits: "train", "test" and perhaps "valid".
        class_names: in the order of the labels.
        max_length: tokens kept of a text, the first ones.
        vocabulary_size: tokens of the vocabulary, special ones among them.
        validation: share of the training texts to hold out, where there is no split "valid".
        seed: of that choice.
        found: published number of texts per split; by default those in `splits`.
    """
    name = files.source.name
    check_sizes(name, max_length=max_length, vocabulary_size=vocabulary_size)
    found = found or {split: len(texts) for split, (texts, _) in splits.items()}
    # Held-out texts are not to be learnt from, not even for the vocabulary.
    train_texts, train_labels = splits["train"]
    rows = torch.arange(len(train_texts))
    chosen, held = hold_out(TensorSet(rows, train_labels), validation, seed)
    if held is not None:
        splits = dict(splits)
        for split, part in (("train", chosen), ("valid", held)):
            splits[split] = ([train_texts[row] for row in part.inputs.tolist()], part.labels)
    vocabulary = Vocabulary.learn(splits["train"][0], vocabulary_size)
    sets, cut = {}, {}
    for split, (texts, labels) in splits.items():
        ids = encode(vocabulary, texts, max_length)
        padded = ids.padded(torch.arange(len(ids)), max_length).int()
        sets[split] = TensorSet(padded, labels, ids.lengths)
        cut[split] = int((ids.lengths == max_length).sum())
    return Task(
        name=name,
        train=sets["train"],
        valid=sets.get("valid"),
        test=sets["test"],
        classes=len(class_names),
        vocabulary=vocabulary,
        info={
            **files.info({split: len(data) for split, data in sets.items()}, found),
            "class_names": class_names,
            "max_length": max_length,
            "vocabulary_size": len(vocabulary),
            "vocabulary_sha256": vocabulary.digest,
            "padding": vocabulary.padding,
            "texts_of_full_length": cut,
        },
    )
