"""Beam search against exhaustive search and greedy decoding, on languages made of tables."""

import itertools
import math

import pytest
import torch

from espformer.models import beam_search

PAD, END, START = 0, 1, 2


class Table:
    """A language whose next token depends on the whole prefix, through a fixed random table."""

    def __init__(self, vocabulary, sentences, seed=0):
        self.vocabulary, self.sentences, self.seed = vocabulary, sentences, seed
        self.known = {}
        self.prefixes = None

    def log_probabilities(self, sentence, prefix):
        key = (sentence, *prefix)
        if key not in self.known:
            generator = torch.Generator().manual_seed(hash((self.seed, *key)) % 2**31)
            logits = 2 * torch.randn(self.vocabulary, generator=generator, dtype=torch.float64)
            self.known[key] = logits.log_softmax(-1).float()
        return self.known[key]

    def advance(self, last, parents):
        """What a model with a cache does: it keeps the prefixes, and is told how to reorder."""
        batch, beam = last.shape
        if parents is None:
            self.prefixes = [[() for _ in range(beam)] for _ in range(batch)]
            assert (last == START).all()
        else:
            self.prefixes = [
                [(*rows[parent], token) for parent, token in zip(chosen, tokens, strict=True)]
                for rows, chosen, tokens in zip(
                    self.prefixes, parents.tolist(), last.tolist(), strict=True
                )
            ]
        return torch.stack(
            [
                torch.stack([self.log_probabilities(sentence, prefix) for prefix in rows])
                for sentence, rows in zip(self.sentences, self.prefixes, strict=True)
            ]
        )

    def score(self, sentence, tokens, length_penalty):
        total = sum(
            self.log_probabilities(sentence, tokens[:n])[token].item()
            for n, token in enumerate(tokens)
        )
        return total / len(tokens) ** length_penalty

    def exhaustive(self, sentence, limit, length_penalty):
        words = [token for token in range(self.vocabulary) if token not in (PAD, END)]
        every = [
            (*text, END)
            for length in range(min(1, limit - 1), limit)
            for text in itertools.product(words, repeat=length)
        ]
        return max(every, key=lambda tokens: self.score(sentence, tokens, length_penalty))

    def greedy(self, sentence, limit):
        tokens = ()
        while len(tokens) < limit - 1:
            chances = self.log_probabilities(sentence, tokens).clone()
            chances[PAD] = -math.inf
            if not tokens:
                chances[END] = -math.inf
            tokens = (*tokens, int(chances.argmax()))
            if tokens[-1] == END:
                return tokens
        return (*tokens, END)


def search(table, limits, **options):
    limits = torch.tensor(limits)
    tokens, scores = beam_search(
        table.advance, limits, start_id=START, end_id=END, pad_id=PAD, **options
    )
    texts = [tuple(token for token in row if token != PAD) for row in tokens.tolist()]
    assert tokens.shape[1] == max(len(text) for text in texts)
    return texts, scores.tolist()


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_wide_beam_is_exhaustive(seed, length_penalty):
    table = Table(vocabulary=5, sentences=[0, 1, 2], seed=seed)
    limits = [4, 3, 1]
    # Three words in up to three places: at most 27 prefixes and 81 hypotheses.
    texts, scores = search(table, limits, beam=150, length_penalty=length_penalty)
    for sentence, (limit, text, score) in enumerate(zip(limits, texts, scores, strict=True)):
        assert text == table.exhaustive(sentence, limit, length_penalty)
        assert score == pytest.approx(table.score(sentence, text, length_penalty), abs=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_a_beam_of_one_is_greedy(seed):
    table = Table(vocabulary=8, sentences=[0, 1, 2, 3], seed=seed)
    limits = [12, 5, 2, 1]
    texts, _ = search(table, limits, beam=1)
    expected = [table.greedy(sentence, limit) for sentence, limit in enumerate(limits)]
    assert texts == expected


@pytest.mark.parametrize("beam", [2, 5])
def test_sentences_do_not_depend_on_their_batch(beam):
    table = Table(vocabulary=8, sentences=[0, 1, 2, 3])
    limits = [9, 4, 7, 2]
    together, scores = search(table, limits, beam=beam)
    for sentence, limit in enumerate(limits):
        alone = Table(vocabulary=8, sentences=[sentence])
        texts, score = search(alone, [limit], beam=beam)
        assert texts[0] == together[sentence]
        assert score[0] == pytest.approx(scores[sentence])


def test_the_score_is_that_of_the_sequence():
    table = Table(vocabulary=8, sentences=list(range(10)))
    texts, scores = search(table, [8] * 10, beam=4, length_penalty=0.7)
    for sentence, (text, score) in enumerate(zip(texts, scores, strict=True)):
        assert text[-1] == END
        assert END not in text[:-1]
        assert 2 <= len(text) <= 8
        assert score == pytest.approx(table.score(sentence, text, 0.7), abs=1e-5)


def test_a_larger_length_penalty_gives_longer_sequences():
    table = Table(vocabulary=6, sentences=list(range(30)))
    short, _ = search(table, [8] * 30, beam=8, length_penalty=0.0)
    long, _ = search(table, [8] * 30, beam=8, length_penalty=3.0)
    assert sum(map(len, short)) < sum(map(len, long))


def test_mistakes():
    table = Table(vocabulary=6, sentences=[0])
    with pytest.raises(ValueError, match="beam must be at least 1, got 0"):
        search(table, [4], beam=0)
    with pytest.raises(ValueError, match=r"limits must be at least 1, got \[0\]"):
        search(table, [0])
