"""The translator: its loss per token, and BLEU against the texts in the right order."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from espformer.lab.data.base import Task
from espformer.lab.data.translation import PairSet
from espformer.lab.data.vocabulary import Ragged
from espformer.lab.training.assemble import TaskData
from espformer.lab.training.translation import Translator, corpus_bleu

WORDS = ["<pad>", "<unk>", "<bos>", "<eos>", "ein", "kleines", "haus", "am", "see", "dort"]


class Words:
    def decode(self, ids):
        kept = []
        for token in ids:
            if token == 3:
                break
            if token > 3:
                kept.append(WORDS[token])
        return " ".join(kept)


class Copy(nn.Module):
    """Predicts nothing worth having, and translates by copying the source."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Parameter(torch.randn(len(WORDS), len(WORDS)))

    def forward(self, source, target, source_mask=None):
        return self.scores[target]

    def translate(self, source, source_mask=None, *, beam=5):
        return source


def ragged(rows):
    lengths = torch.tensor([len(row) for row in rows])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return Ragged(torch.tensor([token for row in rows for token in row], dtype=torch.int32), starts)


@pytest.fixture
def task():
    sentences = [[4, 5, 6, 7, 8], [6, 7, 8, 9, 4, 5], [9, 8, 7, 6, 5, 4, 4]]
    source = ragged([[*row, 3] for row in sentences])
    target = ragged([[2, *row, 3] for row in sentences])
    texts = [Words().decode(row) for row in sentences]
    pairs = PairSet(source, target, texts, texts)
    return Task("toy", pairs, pairs, pairs, vocabulary=Words())


def translator(task, smoothing=0.0):
    run = SimpleNamespace(label_smoothing=smoothing, beam=2, seed=0, decode_every=None)
    module = Translator(run, Copy(), task)  # type: ignore[arg-type]
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_the_mean_over_tokens_without_padding(task, smoothing):
    module = translator(task, smoothing)
    batch = task.train.batch([0, 1, 2])
    assert not batch["target_mask"].all(), "there is padding"
    loss, tokens = module.measure("train", batch)
    expected, count = 0.0, 0
    for row in range(3):
        wanted = task.train.target[row].long()
        for before, after in pairwise(wanted):
            logs = module.model.scores[before].log_softmax(-1)
            expected = expected - (1 - smoothing) * logs[after] - smoothing * logs.mean()
            count += 1
    assert int(tokens) == count
    torch.testing.assert_close(loss, expected / count)


def test_bleu_compares_each_sentence_with_its_own(task):
    module = translator(task)
    logged = {}
    module.log = lambda name, value, **kwargs: logged.update({name: value})  # type: ignore[method-assign]
    module._trainer = SimpleNamespace(world_size=1)  # type: ignore[assignment]
    loader = SimpleNamespace(batch_sampler=[[2], [0, 1]])
    for indices in loader.batch_sampler:
        batch = task.test.batch(indices)
        tokens = module.model.translate(batch["source"])
        module._hypotheses += [Words().decode(row) for row in tokens.tolist()]
    module._log_bleu("test", task.test, loader)
    assert logged["test/bleu"] == pytest.approx(100.0)
    module._hypotheses.reverse()
    module._log_bleu("test", task.test, loader)
    assert logged["test/bleu"] < 90


def test_corpus_bleu_of_known_texts():
    assert corpus_bleu(["the cat sat on the mat ."], ["the cat sat on the mat ."]) == pytest.approx(
        100.0
    )
    assert corpus_bleu(["a b c d"], ["w x y z"]) < 20


def test_tokenised_texts_are_not_tokenised_again():
    """As Moses writes it, &apos;s is one word; sacrebleu's own tokens would make four of it."""
    moses = ["that &apos;s the man &apos;s house ."]
    wrong = ["this &apos;s a man &apos;s boat ."]
    again, as_it_is = (corpus_bleu(wrong, moses, tokenize) for tokenize in ("13a", "none"))
    assert again > as_it_is + 10, "the pieces of an entity count as words that were found"
    assert corpus_bleu(moses, moses, "none") == pytest.approx(100.0)


@pytest.mark.parametrize(("name", "tokenize"), [("iwslt14", "none"), ("multi30k", "13a")])
def test_data_sets_say_how_words_are_found(tmp_path, name, tokenize):
    import espformer.lab.data
    from espformer.lab.data.make_tiny import make_tiny

    assert (
        espformer.lab.data.load(name, data_dir=make_tiny(tmp_path)).info["bleu_tokenize"]
        == tokenize
    )


@pytest.mark.parametrize(
    ("every", "validations", "expected"),
    [(None, 1, [5, 10, 12]), (2, 1, [2, 4, 6, 8, 10, 12]), (100, 1, [12]), (100, 5, [10])],
)
def test_most_validations_do_not_search_for_translations(task, every, validations, expected):
    """Those of some epochs do, and the last one of a training."""
    module = translator(task)
    module.run.decode_every = every
    searched = []
    for epoch in range(validations, 13, validations):
        module._trainer = SimpleNamespace(  # type: ignore[assignment]
            world_size=1, max_epochs=12, check_val_every_n_epoch=validations,
            current_epoch=epoch - 1,
        )  # fmt: skip
        module.on_validation_epoch_start()
        if module._searches:
            searched.append(epoch)
    assert searched == expected


def test_evaluation_puts_sentences_of_like_length_together(task):
    run = SimpleNamespace(
        task="translation", seed=0,
        data=SimpleNamespace(batch_size=2, eval_batch_size=None, workers=0),
    )  # fmt: skip
    order = [1, 2, 0]
    pairs = PairSet(
        ragged([task.test.source[row].tolist() for row in order]),
        ragged([task.test.target[row].tolist() for row in order]),
        *(["x"] * 3, ["y"] * 3),
    )
    data = TaskData(run, Task("toy", pairs, pairs, pairs, vocabulary=Words()))
    for loader in (data.val_dataloader(), data.test_dataloader()):
        assert list(loader.batch_sampler) == [[2, 0], [1]]
