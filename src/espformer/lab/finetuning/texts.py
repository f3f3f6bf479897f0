"""Labelled texts as token ids of a pre-trained model's own tokenizer."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from espformer.lab.data import Task, TensorSet, imdb, tweeteval
from espformer.lab.data.files import DataError, Files, Source, find
from espformer.lab.data.reading import read_labels, read_table, read_texts
from espformer.lab.data.splits import hold_out
from espformer.lab.finetuning.config import FinetuneRun
from espformer.lab.training.errors import RunError

__all__ = ["load_texts"]

SOURCES: dict[str, tuple[Source, list[str]]] = {
    "tweeteval": (tweeteval.SOURCE, tweeteval.NAMES),
    "imdb": (imdb.SOURCE, ["negative", "positive"]),
}
# Where the published set has no validation split: this share of the training texts.
HELD_OUT = 0.04


def load_texts(run: FinetuneRun, tokenizer: Any) -> Task:
    """The data of a run; the same for every seed, which decides about batches alone."""
    source, names = SOURCES[run.data.set.name]
    try:
        files = find(source, run.data.directory)
        sets = {split: _read(files, split, names, run, tokenizer) for split in source.splits}
    except (DataError, OSError, ImportError) as error:
        raise RunError(str(error)) from error
    found = {split: len(data) for split, data in sets.items()}
    if "valid" not in sets:
        sets["train"], held = hold_out(sets["train"], HELD_OUT, seed=0)
        assert held is not None
        sets["valid"] = held
    if run.examples is not None:
        sets = {split: _some(data, run.examples) for split, data in sets.items()}
    info = files.info({split: len(data) for split, data in sets.items()}, found)
    if run.examples is not None:
        info["differences"].append(f"only {run.examples} examples of each split were used")
    counts = torch.bincount(sets["test"].labels, minlength=len(names))
    return Task(
        name=source.name,
        train=sets["train"],
        valid=sets["valid"],
        test=sets["test"],
        classes=len(names),
        info={
            **info,
            "class_names": names,
            "max_length": run.max_length,
            "tokenizer": type(tokenizer).__name__,
            "vocabulary_size": len(tokenizer),
            "largest_class_percent": 100 * float(counts.max() / counts.sum()),
        },
    )


def _read(
    files: Files, split: str, names: list[str], run: FinetuneRun, tokenizer: Any
) -> TensorSet:
    paths: tuple[Path, ...] = files.splits[split]
    table = read_table(paths, {"text": ("text",), "label": ("label",)})
    texts = read_texts(table, "text", paths)
    if files.source.name == "imdb":
        texts = [text.replace("<br />", " ") for text in texts]
    labels = read_labels(table["label"], len(names), paths)
    ids = tokenizer(texts, truncation=True, max_length=run.max_length)["input_ids"]
    return TensorSet(*_padded(ids, labels, tokenizer.pad_token_id or 0))


def _padded(ids: list[list[int]], labels: Tensor, padding: int) -> tuple[Tensor, Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in ids])
    inside = torch.arange(int(lengths.max())) < lengths[:, None]
    padded = torch.full(inside.shape, padding, dtype=torch.int32)
    padded[inside] = torch.tensor([token for row in ids for token in row], dtype=torch.int32)
    return padded, labels, lengths


def _some(data: TensorSet, count: int) -> TensorSet:
    """So many examples, spread over the set: files may be ordered."""
    if len(data) <= count:
        return data
    return data.subset(torch.arange(count) * len(data) // count)
