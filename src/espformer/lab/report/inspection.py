"""Looks into a trained run: attention and slices of an example, and the effect of t."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from espformer.lab.clock import seconds_per_call
from espformer.lab.data import Task
from espformer.lab.errors import RunError
from espformer.lab.recipes.build import has_sort_temperature
from espformer.lab.recipes.schema import TrainingRun
from espformer.lab.training.annealing import sort_temperatures
from espformer.lab.training.attention import recorded_calls, slice_weights
from espformer.lab.training.learner import Learner
from espformer.lab.training.posttrain import open_checkpoint, restore
from espformer.lab.training.run_directory import read_curves, read_results
from espformer.nn import harden, set_sort_temperature, soften

# Enough examples for a figure of a page; a table of a paper asks for all of them.
SCORED = 512
# A page is not waited for much longer than this: slow models are scored on fewer examples.
PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Example:
    """One example of the test data, as the model is given it, and as a person sees it."""

    inputs: Tensor
    mask: Tensor | None
    label: int
    index: int
    picture: Tensor | None = None
    """``(height, width)`` or ``(height, width, 3)`` in [0, 1], of an image."""
    text: str | None = None

    @property
    def name(self) -> str:
        return f"test example {self.index}, class {self.label}"


@dataclass(frozen=True)
class Frame:
    """A model at one sort temperature (None is hard): its attention and its accuracy."""

    temperature: float | None
    matrices: Tensor
    accuracy: float


@dataclass
class Trained:
    """A finished run: what it was told, what came out, and the model."""

    directory: Path
    run: TrainingRun
    results: dict[str, Any]
    curves: dict[str, dict[int, float]]
    learner: Learner
    task: Task
    annealed: Trained | None = None
    """The annealing that started from this run, where there was one."""

    @property
    def label(self) -> str:
        return self.run.label

    @property
    def sorts(self) -> bool:
        """Whether there is a sort temperature in it."""
        return has_sort_temperature(self.run.mechanism)

    @property
    def temperatures(self) -> list[float]:
        """Sort temperatures of all layers, each head's own where they are learnt."""
        return sort_temperatures(self.learner.model)

    def example(self, index: int) -> Example:
        """Return an example of the test data."""
        test: Any = self.task.test
        if not 0 <= index < len(test):
            raise RunError(f"there is no test example {index}: there are {len(test)}")
        batch = test.batch([index])
        inputs = self.learner.prepare(batch["inputs"], training=False)
        picture = _picture(batch["inputs"][0])
        text = None
        if self.task.vocabulary is not None:
            text = self.task.vocabulary.decode(batch["inputs"][0].tolist())
        return Example(inputs, batch.get("mask"), int(batch["labels"][0]), index, picture, text)

    def matrices(self, example: Example) -> list[Tensor]:
        """Return the attention of every layer, ``(heads, N, M)``; padded tokens are left out."""
        model: Any = self.learner.model
        matrices = model.attention_matrices(example.inputs, example.mask)
        return [_without_padding(matrix[0].float(), example.mask) for matrix in matrices]

    def hardened(self) -> Trained:
        """Return the same run, sorting exactly, beside this one."""
        other = copy.copy(self)
        other.learner = copy.deepcopy(self.learner)
        harden(other.learner.model)
        return other

    @torch.no_grad()
    def accuracy(self, count: int | None = None) -> float:
        """Accuracy in percent on the first test examples, at most :data:`SCORED`."""
        test: Any = self.task.test
        model = self.learner.model.eval()
        count, right = min(len(test), SCORED, count or SCORED), 0
        for start in range(0, count, 128):
            batch = test.batch(range(start, min(start + 128, count)))
            inputs = self.learner.prepare(batch["inputs"], training=False)
            guessed = model(inputs, mask=batch.get("mask")).argmax(-1)
            right += int((guessed == batch["labels"]).sum())
        return 100 * right / count

    def affordable(self, times: int) -> int:
        """Examples on which the accuracy can be found so many times without losing patience."""
        self.accuracy(8)
        each = seconds_per_call(lambda: self.accuracy(8)) / 8
        count = int(PATIENCE_SECONDS / (times * max(each, 1e-9)))
        return max(32, min(count, SCORED, len(self.task.test)))  # type: ignore[arg-type]

    def frames(
        self, example: Example, temperatures: Sequence[float], count: int | None = None
    ) -> list[Frame]:
        """Return the last layer and the accuracy at each temperature, and hard.

        The model is left as it was.
        """
        model, kept = self.learner.model, copy.deepcopy(self.learner.model.state_dict())
        made = []
        for temperature in (*temperatures, None):
            if temperature is None:
                harden(model)
            else:
                set_sort_temperature(model, temperature)
            made.append(Frame(temperature, self.matrices(example)[-1], self.accuracy(count)))
        soften(model)
        model.load_state_dict(kept)
        return made

    def slices(self, example: Example) -> list[tuple[str, Tensor]]:
        """The weights σ of the slices of every ESP mechanism: its name, ``(heads, slices)``."""
        model: Any = self.learner.model
        with torch.no_grad(), recorded_calls(model) as calls:
            model.eval()
            model(example.inputs, mask=example.mask)
        return [(name, slice_weights(mechanism, *call)[0]) for name, mechanism, call in calls]


def open_run(path: Path, data_directory: str | None = None) -> Trained:
    """Return the last checkpoint of a run, with its results, its curves and its annealing."""
    run, file = open_checkpoint(path)
    if run.task != "classification":
        raise RunError(f"{path}: a page is made of classification runs, this is a {run.task}")
    run, task, learner = restore(run, file, data_directory)
    learner.eval()
    directory = file.parent
    results = read_results(directory)
    if results is None:
        raise RunError(f"{directory}: this run is not finished; the same command goes on with it")
    further = directory / "anneal"
    trained = read_results(further) and (further / "last.ckpt").exists()
    annealed = open_run(further, data_directory) if trained else None
    return Trained(directory, run, results, read_curves(directory), learner, task, annealed)


def _without_padding(matrix: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None or matrix.shape[-1] != mask.shape[-1]:
        return matrix
    return matrix[:, mask[0]][:, :, mask[0]]


def _picture(stored: Tensor) -> Tensor | None:
    """Return an image as a person sees it; None for what is no image."""
    if stored.ndim != 3 or stored.shape[0] not in (1, 3):
        return None
    image = stored.float()
    image = (image - image.min()) / (image.max() - image.min()).clamp(min=1e-9)
    return image[0] if len(image) == 1 else image.permute(1, 2, 0)
