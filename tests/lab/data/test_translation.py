"""Vocabularies and sentence pairs."""

import pickle

import pytest
import torch

from espformer.lab.data import DataError, load
from espformer.lab.data.translation import PairSet, _cut, _with_ends
from espformer.lab.data.vocabulary import Ragged, Vocabulary, encode

TEXTS = [f"the {animal} sat on the {thing} ." for animal in ("cat", "dog") for thing in "abcdef"]


def ragged(*sequences):
    starts = torch.tensor([0, *(len(s) for s in sequences)]).cumsum(0)
    return Ragged(torch.tensor([t for s in sequences for t in s], dtype=torch.int32), starts)


def sequences(ids):
    return [ids[i].tolist() for i in range(len(ids))]


def test_vocabulary_is_reproducible(monkeypatch, tmp_path):
    first = Vocabulary.learn(TEXTS, 50)
    monkeypatch.setenv("ESPFORMER_CACHE", str(tmp_path))
    second = Vocabulary.learn(TEXTS[::-1], 50)
    assert first.model == second.model
    assert Vocabulary.learn(TEXTS[1:], 50).model != first.model
    assert pickle.loads(pickle.dumps(first)).encode(TEXTS) == first.encode(TEXTS)


def test_vocabulary_has_its_special_tokens():
    vocabulary = Vocabulary.learn(TEXTS, 50)
    pieces = map(vocabulary._processor.id_to_piece, range(4))
    assert list(pieces) == [
        "[PAD]",
        "[UNK]",
        "[BOS]",
        "[EOS]",
    ]
    ids = vocabulary.encode(["the cat sat"])[0]
    assert min(ids) > 3
    assert vocabulary.decode([2, *ids, 3, 5, 5]) == "the cat sat"
    assert vocabulary.decode(torch.tensor([*ids, 0, 0])) == "the cat sat"
    assert vocabulary.encode(["漢"])[0][-1] == vocabulary.unknown


def test_identity_gives_texts_back():
    texts = ["wohingegen … mc² ’s ﬁn", "naïve ™ Ω"]
    kept = Vocabulary.learn(texts, 100, normalisation="identity")
    assert [kept.decode(ids) for ids in kept.encode(texts)] == texts
    changed = Vocabulary.learn(texts, 100)
    assert changed.decode(changed.encode(texts)[0]) != texts[0]


def test_impossible_vocabulary_is_explained():
    with pytest.raises(DataError, match="no vocabulary of 5 tokens can be learnt from 12 texts"):
        Vocabulary.learn(TEXTS, 5)


def test_long_texts_are_learnt_from():
    """SentencePiece leaves texts of more than 4,192 bytes out unless told otherwise."""
    long = "xylophone " * 2000
    vocabulary = Vocabulary.learn([long, "cat"], 40)
    assert vocabulary.unknown not in vocabulary.encode(["xylophone"])[0]


def test_encoding_cuts_and_never_gives_nothing():
    vocabulary = Vocabulary.learn(TEXTS, 50)
    ids = encode(vocabulary, [*TEXTS, "", "   "], limit=3)
    assert ids.lengths.tolist() == [3] * 12 + [1, 1]
    assert sequences(ids)[-1] == [vocabulary.unknown]
    assert sequences(ids)[:12] == [row[:3] for row in vocabulary.encode(TEXTS)]


def test_ragged_arithmetic():
    ids = ragged([5, 6], [7], [8, 9, 10])
    assert ids.padded(torch.tensor([2, 1]), 4).tolist() == [[8, 9, 10, 0], [7, 0, 0, 0]]
    assert ids.padded(torch.tensor([2]), 2).tolist() == [[8, 9]]
    assert sequences(_with_ends(ids, bos=True)) == [[2, 5, 6, 3], [2, 7, 3], [2, 8, 9, 10, 3]]
    assert sequences(_with_ends(ids, bos=False)) == [[5, 6, 3], [7, 3], [8, 9, 10, 3]]
    rows = torch.tensor([2, 0])
    assert sequences(ids.take(rows, ids.lengths[rows])) == [[8, 9, 10], [5, 6]]
    assert sequences(ids.take(rows, torch.tensor([1, 2]))) == [[8], [5, 6]]
    assert sequences(_cut(_with_ends(ids, bos=True), 4)) == [[2, 5, 6, 3], [2, 7, 3], [2, 8, 9, 3]]


def test_pairs_make_batches():
    source, target = ragged([5, 3], [6, 7, 3]), ragged([2, 5, 6, 3], [2, 7, 3])
    pairs = PairSet(source, target, ["a", "b"], ["c", "d"])
    batch = pairs.batch([1, 0])
    assert batch["source"].tolist() == [[6, 7, 3], [5, 3, 0]]
    assert batch["source_mask"].tolist() == [[True] * 3, [True, True, False]]
    assert batch["target"].tolist() == [[2, 7, 3, 0], [2, 5, 6, 3]]
    assert batch["target_mask"].sum(1).tolist() == [3, 4]
    assert all(batch[key].dtype == torch.int64 for key in ("source", "target"))


def test_targets_without_their_last_token_are_of_even_width():
    long = ragged([2, *range(5, 40), 3], [2, 5, 6, 7, 3])
    pairs = PairSet(long, long, ["", ""], ["", ""])
    assert pairs.batch([1])["target"].shape == (1, 9)
    assert pairs.batch([1])["source"].shape == (1, 8)
    assert pairs.batch([0])["target"].shape == (1, 37)  # never wider than the set


@pytest.mark.parametrize("name", ["iwslt14", "multi30k"])
def test_sentences_survive(name, tiny):
    task = load(name, data_dir=tiny, vocabulary_size=200)
    for data in task.splits.values():
        batch = data.batch(range(len(data)))
        for row, text in zip(batch["source"], data.source_texts, strict=True):
            assert task.vocabulary.decode(row) == text
        for row, text in zip(batch["target"], data.target_texts, strict=True):
            assert task.vocabulary.decode(row) == text
        assert (batch["target"][:, 0] == task.info["bos"]).all()
        last = batch["target_mask"].sum(1, keepdim=True) - 1
        assert (batch["target"].gather(1, last) == task.info["eos"]).all()
        assert torch.equal(batch["source"] != 0, batch["source_mask"])
        # The German of the made-up pairs is the English turned round.
        for german, english in zip(data.source_texts, data.target_texts, strict=True):
            assert [word[::-1] for word in german.split()] == english.split()


def test_long_pairs_are_left_out_of_training_alone(tiny):
    task = load("multi30k", data_dir=tiny, max_length=12, vocabulary_size=200)
    assert len(task.train) + task.info["left_out_of_training"] == 150
    assert 0 < len(task.train) < 150
    assert len(task.test) == 30
    for data in task.splits.values():
        assert data.source_lengths.max() <= 12
        assert data.target_lengths.max() <= 12
        assert len(data.target_texts) == len(data)
    batch = task.test.batch(range(30))
    assert batch["target"].shape[1] <= 12
    last = batch["target_mask"].sum(1, keepdim=True) - 1
    assert (batch["target"].gather(1, last) == task.info["eos"]).all()


def test_subset_of_iwslt14(tiny):
    strict, everything = (load("iwslt14", data_dir=tiny, subset=s) for s in ("iwslt14", "all"))
    assert (len(strict.train), len(everything.train)) == (150, 200)
    assert set(strict.train.source_texts) < set(everything.train.source_texts)
    assert strict.test.target_texts == everything.test.target_texts
    assert strict.classes is None
    with pytest.raises(ValueError, match="subset must be iwslt14 or all"):
        load("iwslt14", data_dir=tiny, subset="ted")
    with pytest.raises(ValueError, match="max_length must be at least 3"):
        load("iwslt14", data_dir=tiny, max_length=2)
