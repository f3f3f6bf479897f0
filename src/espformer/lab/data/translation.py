"""Data sets of sentence pairs: a joint vocabulary, pairs of token ids, a task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from espformer.lab.data.base import Batch, Indices, Task, check_sizes
from espformer.lab.data.files import DataError, Files
from espformer.lab.data.reading import read_table, read_texts
from espformer.lab.data.vocabulary import Ragged, Vocabulary, encode

SOURCE, TARGET = "de", "en"

# Widths of padded batches are multiples of this, for aligned rows. Sentences of a batch are of like
# lengths, and a batch is never recorded: more would be padding for nothing.
WIDTH_MULTIPLE = 8


class PairSet(Dataset[Batch]):
    """Pairs of sentences as token ids, and as texts.

    Args:
        source: sentences to translate, each ends with eos.
        target: their translations, each from bos to eos.
        source_texts, target_texts: the same as texts, as they stand in the files: the references
            for BLEU.

    Example:
        >>> ids = Ragged(torch.tensor([2, 5, 3, 2, 6, 7, 3]), torch.tensor([0, 3, 7]))
        >>> pairs = PairSet(ids, ids, ["a", "b c"], ["a", "b c"])
        >>> pairs.batch([0, 1])["target_mask"].sum(1)
        tensor([3, 4])
    """

    def __init__(
        self, source: Ragged, target: Ragged, source_texts: list[str], target_texts: list[str]
    ) -> None:
        self.source, self.target = source, target
        self.source_texts, self.target_texts = source_texts, target_texts
        self._widest = {
            "source": int(source.lengths.max()) if len(source) else 0,
            "target": int(target.lengths.max()) if len(target) else 0,
        }

    def __len__(self) -> int:
        return len(self.source)

    @property
    def source_lengths(self) -> Tensor:
        """(pairs,), int64, eos counted: what batches of equal length are made by."""
        return self.source.lengths

    @property
    def target_lengths(self) -> Tensor:
        """(pairs,), int64, bos and eos counted."""
        return self.target.lengths

    def batch(self, indices: Indices) -> Batch:
        """The batch of these pairs, cut to its longest sentences."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        batch = {}
        for name, ids in (("source", self.source), ("target", self.target)):
            lengths = ids.lengths[rows]
            longest = int(lengths.max()) if len(lengths) else 0
            # One more than a multiple for targets: training cuts a token off either end.
            extra = int(name == "target")
            width = -(-(longest - extra) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE + extra
            # Never wider than the set: a model has no positions beyond max_length.
            width = min(width, self._widest[name])
            batch[name] = ids.padded(rows, width)
            batch[f"{name}_mask"] = torch.arange(width) < lengths[:, None]
        return batch

    def __getitems__(self, indices: list[int]) -> Batch:
        return self.batch(indices)


def read_pairs(paths: Sequence[Path]) -> dict[str, list[str]]:
    """Pairs from one parquet file with a column for each language, or from a text file for each.

    Returns:
        "de" and "en", and "source" where the file says from where each pair is.
    """
    if all(path.suffix == ".parquet" for path in paths):
        columns = {language: (language,) for language in (SOURCE, TARGET)}
        table = read_table(paths, columns)
        pairs = {language: read_texts(table, language, paths) for language in columns}
        try:
            origin = read_table(paths, {"source": ("source",)})
        except DataError:
            return pairs
        return pairs | {"source": read_texts(origin, "source", paths)}
    pairs = {}
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 text ({error}): fetch it again") from error
        pairs[path.suffix[1:]] = lines[:-1] if lines[-1] == "" else lines
    counts = {language: len(lines) for language, lines in pairs.items()}
    if len(set(counts.values())) != 1:
        raise DataError(f"{' and '.join(map(str, paths))} differ in length: {counts} lines")
    return pairs


def translation_task(
    files: Files,
    pairs: dict[str, dict[str, list[str]]],
    *,
    max_length: int,
    vocabulary_size: int,
    **info: Any,
) -> Task:
    """Return a task of sentence pairs, German to English, with one vocabulary for both languages.

    Training pairs with a sentence of more than `max_length` tokens are left out; the other splits
    keep every pair, cut where they must be, so that scores are of the whole split.

    Args:
        files: where the pairs came from.
        pairs: for "train", "valid" and "test" what :func:`read_pairs` returns.
        max_length: tokens of a sentence, bos and eos counted.
        vocabulary_size: tokens of the vocabulary, special ones among them.
        info: more for ``Task.info``.
    """
    name = files.source.name
    check_sizes(name, vocabulary_size=vocabulary_size)
    if max_length < 3:
        raise ValueError(f"load('{name}'): max_length must be at least 3, got {max_length}")
    train = pairs["train"]
    # Nothing is normalised: what is decoded can then equal a reference, character for character.
    vocabulary = Vocabulary.learn(
        train[SOURCE] + train[TARGET], vocabulary_size, normalisation="identity"
    )
    found = {split: len(texts[SOURCE]) for split, texts in pairs.items()}
    sets, left_out = {}, 0
    for split, texts in pairs.items():
        source = _with_ends(encode(vocabulary, texts[SOURCE], max_length), bos=False)
        target = _with_ends(encode(vocabulary, texts[TARGET], max_length), bos=True)
        fits = (source.lengths <= max_length) & (target.lengths <= max_length)
        source_texts, target_texts = texts[SOURCE], texts[TARGET]
        if split == "train":
            left_out = int((~fits).sum())
            rows = fits.nonzero()[:, 0]
            source, target = (ids.take(rows, ids.lengths[rows]) for ids in (source, target))
            source_texts = [source_texts[row] for row in rows.tolist()]
            target_texts = [target_texts[row] for row in rows.tolist()]
        else:
            source, target = _cut(source, max_length), _cut(target, max_length)
        sets[split] = PairSet(source, target, source_texts, target_texts)
    return Task(
        name=name,
        train=sets["train"],
        valid=sets["valid"],
        test=sets["test"],
        vocabulary=vocabulary,
        info={
            **files.info({split: len(data) for split, data in sets.items()}, found),
            "languages": [SOURCE, TARGET],
            "max_length": max_length,
            "left_out_of_training": left_out,
            "vocabulary_size": len(vocabulary),
            "vocabulary_sha256": vocabulary.digest,
            "padding": vocabulary.padding,
            "bos": vocabulary.bos,
            "eos": vocabulary.eos,
            **info,
        },
    )


def _with_ends(ids: Ragged, *, bos: bool) -> Ragged:
    """Return every sequence with eos behind it, and bos before it."""
    ends = 1 + int(bos)
    sequences = torch.arange(len(ids))
    starts = ids.starts + ends * torch.arange(len(ids) + 1)
    tokens = torch.full((len(ids.tokens) + ends * len(ids),), Vocabulary.eos, dtype=torch.int32)
    shift = torch.repeat_interleave(ends * sequences + int(bos), ids.lengths)
    tokens[torch.arange(len(ids.tokens)) + shift] = ids.tokens
    if bos:
        tokens[starts[:-1]] = Vocabulary.bos
    return Ragged(tokens, starts)


def _cut(ids: Ragged, limit: int) -> Ragged:
    """Cut sequences to at most `limit` tokens, of which the last is eos."""
    cut = ids.take(torch.arange(len(ids)), ids.lengths.clamp(max=limit))
    cut.tokens[cut.starts[1:] - 1] = Vocabulary.eos
    return cut
