"""Mistakes that no score shows: what is validated on, what vocabularies know, how a rate falls.

A model that is validated on its test set, whose vocabulary has seen the test set, or whose learning
rate never falls trains as well as any other. Only its numbers are not what they are said to be.
"""

from collections import Counter

import pytest
import torch

from espformer.lab.data import load
from espformer.lab.data.translation import SOURCE, TARGET
from espformer.lab.data.vocabulary import Vocabulary
from espformer.lab.training import finetuning, trainer
from espformer.lab.training.assemble import TaskData, load_task
from espformer.lab.training.learner import Classifier
from espformer.lab.training.pretrained import load_texts
from espformer.lab.training.run_directory import run_directory


def content(split) -> Counter[bytes]:
    """The examples of a set of tensors, whatever their order."""
    return Counter(x.numpy().tobytes() for x in split.inputs)


def drawn(loader) -> Counter[bytes]:
    return Counter(x.numpy().tobytes() for batch in loader for x in batch["inputs"])


@pytest.mark.parametrize("name", ["digits", "mnist", "cats_dogs", "modelnet40"])
def test_what_is_held_out_is_not_trained_on(name, texts):
    whole = load(name, data_dir=texts)
    parts = load(name, data_dir=texts, validation=0.25)
    assert whole.valid is None
    assert parts.valid is not None
    assert content(parts.train) + content(parts.valid) == content(whole.train)
    assert content(parts.test) == content(whole.test)
    assert len(parts.valid) == pytest.approx(0.25 * len(whole.train), rel=0.2)
    assert parts.info["sizes"]["valid"] == len(parts.valid)


def test_training_validation_and_test_each_see_their_own_examples(recipe):
    run = recipe.run("transformer", overrides=["data.set={digits: {validation: 0.25}}"])
    task = load_task(run)
    data = TaskData(run, task)
    assert drawn(data.train_dataloader()) == content(task.train)
    assert drawn(data.val_dataloader()) == content(task.valid)
    assert drawn(data.test_dataloader()) == content(task.test)
    assert content(task.valid) != content(task.test)


def test_scores_while_training_are_of_the_validation_split(recipe, tmp_path, monkeypatch):
    """The epoch that is best is not chosen by the test set."""
    run = recipe.run("transformer", overrides=["data.set={digits: {validation: 0.25}}"])
    seen: dict[str, Counter[bytes]] = {"validation": Counter(), "test": Counter()}
    for kind in seen:
        step = getattr(Classifier, f"{kind}_step")

        def noted(self, batch, index, kind=kind, step=step):
            seen[kind].update(x.numpy().tobytes() for x in batch["inputs"])
            return step(self, batch, index)

        monkeypatch.setattr(Classifier, f"{kind}_step", noted)
    trainer.execute(run, tmp_path / "run", output=tmp_path, progress=False)
    task = load_task(run)
    assert seen["validation"]
    assert seen["validation"].keys() <= content(task.valid).keys()
    assert seen["test"].keys() <= content(task.test).keys()


def test_fine_tuning_does_not_train_on_what_it_validates_on(encoder, texts):
    experiment = make(encoder, texts, task="imdb")
    task = load_texts(experiment.run("softmax"))
    published = load("imdb", data_dir=texts)
    assert len(task.train) + len(task.valid) == len(published.train)
    assert len(task.test) == len(published.test)
    assert not content(task.train) & content(task.valid)


@pytest.mark.parametrize("name", ["iwslt14", "multi30k"])
def test_a_vocabulary_of_translation_knows_the_training_pairs_of_both_languages_alone(name, texts):
    task = load(name, data_dir=texts, vocabulary_size=60)
    pairs = {
        split: (list(part.source_texts), list(part.target_texts))
        for split, part in (("train", task.train), ("valid", task.valid), ("test", task.test))
    }
    source, target = pairs["train"]
    assert task.info["left_out_of_training"] == 0, "else the texts of training are not all here"

    def digest(*parts: list[str]) -> str:
        together = [text for part in parts for text in part]
        return Vocabulary.learn(together, 60, normalisation="identity").digest

    assert task.info["vocabulary_sha256"] == digest(source, target)
    assert task.info["vocabulary_sha256"] != digest(source), "both languages"
    assert task.info["vocabulary_sha256"] != digest(*pairs["train"], *pairs["test"]), "not the test"
    assert task.info["languages"] == [SOURCE, TARGET]


def make(encoder, texts, task="tweeteval"):
    return finetuning.make_experiment(
        str(encoder), task, finetuning.read_attentions(["softmax"]), [1e-3], [0], epochs=2,
        batch_size=8, anneal_to=None, precision="32-true", max_length=None, data_dir=str(texts),
        examples=None,
    )  # fmt: skip


def test_the_rate_of_fine_tuning_rises_and_falls_to_zero_step_by_step(
    encoder, texts, tmp_path, monkeypatch
):
    rates: list[float] = []
    step = finetuning.FinetuneLearner.training_step

    def noted(self, batch, batch_idx):
        (optimizer,) = self.trainer.optimizers
        rates.append(optimizer.param_groups[0]["lr"])
        return step(self, batch, batch_idx)

    monkeypatch.setattr(finetuning.FinetuneLearner, "training_step", noted)
    run = make(encoder, texts).run("softmax")
    finetuning.fit_shared_head(run, tmp_path)
    trainer.execute(run, run_directory(tmp_path, run), output=tmp_path, progress=False)

    steps = len(rates)
    assert steps > 10
    rising = max(1, round(run.warmup * steps))
    up = [(i + 1) / rising for i in range(rising)]
    down = [(steps - i) / (steps - rising) for i in range(rising, steps)]
    assert rates == pytest.approx([1e-3 * factor for factor in up + down])
    assert rates[-1] == pytest.approx(1e-3 / (steps - rising)), "the step after would be at zero"
    assert torch.tensor(rates).argmax() in (rising - 1, rising)
