"""Build the data, the model and the learner of a run from its description."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import nn
from torch.utils.data import Dataset

from espformer.lab import data
from espformer.lab.data import Task
from espformer.lab.errors import RunError
from espformer.lab.recipes.build import build_mechanism
from espformer.lab.recipes.schema import FinetuneRun, TrainingRun
from espformer.lab.recipes.yaml_schema import Origins
from espformer.lab.training.batches import Loader, SeededBatches, make_loader
from espformer.lab.training.learner import Classifier, Learner
from espformer.models import build_model, model_class


def load_task(run: TrainingRun) -> Task:
    """Load the data of a run; its seed also decides which part of a set is used."""
    if isinstance(run, FinetuneRun):
        from espformer.lab.training.pretrained import load_texts

        return load_texts(run)
    try:
        return data.load(
            run.data.set.name,
            data_dir=run.data.directory,
            seed=run.seed,
            **run.data.set.arguments,
        )
    except (ValueError, TypeError, OSError, ImportError, data.DataError) as error:
        raise RunError(str(error)) from error


def make_model(run: TrainingRun, task: Task | None = None) -> nn.Module:
    """Return the model of a run, with what the data know about it filled in."""
    origins = Origins(f"recipe {run.recipe}")
    path = ("model", run.model.name)
    kind = model_class(run.model.name)
    arguments = {**_from_data(kind, run, task), **run.model.arguments}
    for name, value in arguments.items():
        if name.endswith("_mechanism"):  # of another part of the model, such as a decoder
            arguments[name] = build_mechanism(value, origins, (*path, name))
    mechanism = build_mechanism(run.mechanism, origins)
    try:
        return build_model(run.model.name, mechanism=mechanism, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise origins.error(path, str(error)) from error


def make_learner(run: TrainingRun, task: Task) -> Learner:
    """Make what Lightning trains. The seed of the run decides the first weights."""
    if isinstance(run, FinetuneRun):
        from espformer.lab.training.finetuning import FinetuneLearner

        return FinetuneLearner(run, task)
    torch.manual_seed(run.seed)
    model = make_model(run, task)
    learner: Learner
    if run.task == "translation":
        from espformer.lab.training.translation import Translator

        learner = Translator(run, model, task)
    else:
        kind: type[Classifier] = Classifier
        if run.trainer.cuda_graph:
            from espformer.lab.training.cuda_graphs import GraphedClassifier

            kind = GraphedClassifier
        learner = kind(run, model, task.augment, task.normalise)
    if run.trainer.compile:
        learner.model.compile()
    return learner


def load_weights(model: nn.Module, state: dict[str, Any], source: str) -> list[str]:
    """Load the weights of a checkpoint, also of a model with another mechanism.

    What both have is copied; what only the new mechanism has stays as it was made. Anything else
    that does not fit is an error.

    Args:
        model: the model to fill.
        state: `state_dict` of a checkpoint of a :class:`Learner`.
        source: its name, for messages.

    Returns:
        Names of the parameters of the new mechanism that keep their first values.
    """
    weights = {
        name.removeprefix("model."): value
        for name, value in state.items()
        if name.startswith("model.")
    }
    own = model.state_dict()
    gone = [name for name in weights if name not in own]
    weights = {name: value for name, value in weights.items() if name in own}
    try:
        missing = model.load_state_dict(weights, strict=False).missing_keys
    except RuntimeError as error:
        first = next((line.strip() for line in str(error).splitlines()[1:]), str(error))
        raise RunError(f"{source}: its weights do not fit this model: {first}") from None
    wrong = [name for name in (*gone, *missing) if ".mechanism." not in f".{name}."]
    if wrong:
        raise RunError(
            f"{source}: its weights do not fit this model: it "
            + ("has" if wrong[0] in gone else "lacks")
            + f" {', '.join(wrong[:3])}"
            + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        )
    return [name for name in missing if not name.endswith("_extra_state")]


class TaskData(LightningDataModule):
    """Loaders of a run for the process that asks.

    Args:
        run: the run.
        task: its data.
        resume: (epoch, batch) at which training goes on.
        least: examples that a training batch needs on each device.
    """

    def __init__(
        self, run: TrainingRun, task: Task, resume: tuple[int, int] = (0, 0), least: int = 1
    ) -> None:
        super().__init__()
        self.run, self.task, self.resume, self.least = run, task, resume, least

    def train_dataloader(self) -> Loader:
        data = self.run.data
        alike = data.group_by_length or data.max_tokens is not None
        return self._loader(
            self.task.train,
            batch_size=data.batch_size,
            max_tokens=data.max_tokens,
            lengths=_lengths(self.task.train) if alike else None,
            resume=self.resume,
            least=self.least,
        )

    def val_dataloader(self) -> Loader:
        return self._evaluation_loader(
            self.task.test if self.task.valid is None else self.task.valid
        )

    def test_dataloader(self) -> Loader:
        return self._evaluation_loader(self.task.test)

    def _evaluation_loader(self, split: Dataset[Any]) -> Loader:
        data = self.run.data
        size = data.batch_size if data.eval_batch_size is None else data.eval_batch_size
        # A search for translations is as long as the longest sentence of the batch.
        lengths = _lengths(split)[:1] if self.run.task == "translation" else None
        return self._loader(split, batch_size=size, shuffle=False, lengths=lengths)

    def _loader(self, split: Any, **options: Any) -> Loader:
        trainer = self.trainer
        rank, world = (trainer.global_rank, trainer.world_size) if trainer else (0, 1)
        batches = SeededBatches(len(split), seed=self.run.seed, rank=rank, world=world, **options)
        device = None if trainer is None else trainer.strategy.root_device
        return make_loader(split, batches, self.run.data.workers, device)


def _lengths(split: Any) -> Sequence[Sequence[int]]:
    names = ("source_lengths", "target_lengths", "lengths")
    lengths = [getattr(split, name) for name in names if getattr(split, name, None) is not None]
    if not lengths:
        raise RunError(
            "data.max_tokens and data.group_by_length need a data set of texts, whose examples "
            "differ in length"
        )
    return lengths


def _from_data(kind: type[nn.Module], run: TrainingRun, task: Task | None) -> dict[str, Any]:
    """Arguments of the model that the data decide: classes, vocabulary, image size and so on."""
    if task is None:
        return {}
    known = {"classes": task.classes, "vocabulary": task.info.get("vocabulary_size"), **task.info}
    wanted = ["classes", "vocabulary", "image_size", "channels"]
    if run.task == "classification":
        wanted.append("max_length")  # a translation may be longer than what is trained on
    parameters = inspect.signature(kind.__init__).parameters
    return {
        name: known[name] for name in wanted if name in parameters and known.get(name) is not None
    }
