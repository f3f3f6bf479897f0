"""Texts as token ids: a byte-pair vocabulary, learnt from the training texts alone.

SentencePiece learns it, as in the text classifier that the paper builds on
(https://github.com/lyeoni/nlp-tutorial). Learning is deterministic, with one thread and no sampling
of texts: the same texts give the same model, byte for byte, in whatever order they come.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from espformer.lab.data.cache import cache_key, cached_bytes
from espformer.lab.data.files import DataError, require

# Texts encoded at a time.
CHUNK = 8192


class Vocabulary:
    """A SentencePiece model, with padding 0, unknown 1, bos 2, eos 3.

    Args:
        model: the serialised model.

    Example:
        >>> texts = ["the cat sat on the mat", "the dog sat on the cat"] * 10
        >>> vocabulary = Vocabulary.learn(texts, size=30)
        >>> vocabulary.decode(vocabulary.encode(["the dog sat"])[0])
        'the dog sat'
    """

    padding, unknown, bos, eos = 0, 1, 2, 3

    def __init__(self, model: bytes) -> None:
        self.model = model
        self._processor = require("sentencepiece").SentencePieceProcessor(model_proto=model)

    @classmethod
    def learn(
        cls,
        texts: Sequence[str],
        size: int,
        *,
        normalisation: Literal["nmt_nfkc", "identity"] = "nmt_nfkc",
    ) -> Vocabulary:
        """Learn a vocabulary from texts, or take it from the cache.

        Args:
            texts: the training texts.
            size: number of tokens with the four special ones; fewer where the texts give no more.
            normalisation: SentencePiece's rule; with "identity" decoding gives the text back
                exactly, but for runs of spaces.
        """
        key = cache_key("vocabulary", text_digest(texts), size, normalisation)
        return cls(cached_bytes(key, lambda: _learn(texts, size, normalisation)))

    def __len__(self) -> int:
        return int(self._processor.get_piece_size())

    def __reduce__(self) -> tuple[type[Vocabulary], tuple[bytes]]:
        return Vocabulary, (self.model,)

    @property
    def digest(self) -> str:
        """sha256 of the model."""
        return hashlib.sha256(self.model).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without bos and eos."""
        ids: list[list[int]] = self._processor.encode(list(texts))
        return ids

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        """Return the text of token ids, up to the first eos; padding and bos do not show."""
        kept: list[int] = []
        for token in ids.tolist() if isinstance(ids, Tensor) else ids:
            if token == self.eos:
                break
            if token not in (self.padding, self.bos):
                kept.append(token)
        text: str = self._processor.decode(kept)
        return text


@dataclass(frozen=True)
class Ragged:
    """Sequences of different lengths, one after the other.

    Args:
        tokens: ``(all tokens,)``, int32.
        starts: ``(sequences + 1,)``, int64; sequence i is ``tokens[starts[i] : starts[i + 1]]``.
    """

    tokens: Tensor
    starts: Tensor

    @classmethod
    def of_lengths(cls, tokens: Tensor, lengths: Tensor) -> Ragged:
        """Return sequences of these lengths, ``(sequences,)``."""
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        starts[1:] = lengths.cumsum(0)
        return cls(tokens, starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def take(self, rows: Tensor, lengths: Tensor) -> Ragged:
        """Return some sequences, and of each as many tokens, the first ones, as `lengths` says."""
        taken = Ragged.of_lengths(self.tokens, lengths)
        offset = torch.repeat_interleave(self.starts[rows] - taken.starts[:-1], lengths)
        return Ragged(self.tokens[torch.arange(len(offset)) + offset], taken.starts)

    @cached_property
    def lengths(self) -> Tensor:
        """(sequences,), int64."""
        return self.starts.diff()

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[int(self.starts[index]) : int(self.starts[index + 1])]

    def padded(self, rows: Tensor, width: int) -> Tensor:
        """(rows, width), int64: sequences cut or filled with 0."""
        column = torch.arange(width)
        index = (self.starts[rows][:, None] + column).clamp(max=max(0, len(self.tokens) - 1))
        outside = column >= self.lengths[rows][:, None]
        return self.tokens[index].long().masked_fill(outside, Vocabulary.padding)


def encode(vocabulary: Vocabulary, texts: Sequence[str], limit: int) -> Ragged:
    """Token ids of many texts, at most `limit` of each, kept in the cache.

    A text without any token becomes one unknown token: nothing to attend to is not a text.
    """
    key = cache_key("tokens", vocabulary.digest, text_digest(texts), limit)
    content = cached_bytes(key, lambda: _encode(vocabulary, texts, limit))
    numbers = torch.from_numpy(np.frombuffer(content, "<i4").astype(np.int32))
    return Ragged.of_lengths(numbers[len(texts) :], numbers[: len(texts)])


def _encode(vocabulary: Vocabulary, texts: Sequence[str], limit: int) -> bytes:
    """Return all lengths, then all tokens, as little-endian int32."""
    lengths, tokens = [], []
    for first in range(0, len(texts), CHUNK):
        for ids in vocabulary.encode(texts[first : first + CHUNK]):
            cut = ids[:limit] or [Vocabulary.unknown]
            lengths.append(len(cut))
            tokens.append(np.asarray(cut, "<i4"))
    return b"".join([np.asarray(lengths, "<i4").tobytes(), *(part.tobytes() for part in tokens)])


def _learn(texts: Sequence[str], size: int, normalisation: str) -> bytes:
    model = io.BytesIO()
    try:
        require("sentencepiece").SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=size,
            # A small corpus has fewer pairs than asked for: take what there is.
            hard_vocab_limit=False,
            character_coverage=1.0,
            normalization_rule_name=normalisation,
            # Longer texts would be left out without a word.
            max_sentence_length=10_000_000,
            num_threads=1,
            pad_id=Vocabulary.padding,
            unk_id=Vocabulary.unknown,
            bos_id=Vocabulary.bos,
            eos_id=Vocabulary.eos,
            pad_piece="[PAD]",
            unk_piece="[UNK]",
            bos_piece="[BOS]",
            eos_piece="[EOS]",
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(
            f"no vocabulary of {size} tokens can be learnt from {len(texts):,} texts ({error}): "
            "try another vocabulary_size"
        ) from error
    return model.getvalue()


def text_digest(texts: Sequence[str]) -> str:
    """Return a checksum of texts and of where each ends."""
    digest = hashlib.sha256()
    for text in texts:
        content = text.encode()
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()
