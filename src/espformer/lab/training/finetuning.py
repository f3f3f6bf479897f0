"""Fine-tuning: pre-trained encoders with another attention, scored at once, trained, scored again.

What `espformer finetune` does for each attention and each seed:

1. A linear head is fitted on the mean of the encoder's last hidden states, once, with the original
   attention and the published weights. All attentions begin with this head.
2. *Plug and play*: the attention is replaced, nothing else, and the model is scored. If asked for,
   it is calibrated before: fitted to what the original gives on some training texts, without their
   labels, by the same number of steps whatever the attention.
3. The whole model is fine-tuned, for the same number of steps with the same batches whatever the
   attention; the sort temperature of ESP falls geometrically on the way.
4. It is scored as it was trained and, for ESP, with an exact sort.

Why a fitted head: with a random one the score before training says nothing about the attention. A
head that is trained together with the encoder would give softmax more training than the others.
A logistic regression is convex: it has one solution, no seed, and leaves the encoder alone.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from safetensors.torch import load, save
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from espformer.integrations import calibrate
from espformer.lab.data import Task
from espformer.lab.errors import ConfigError, RunError, nearest
from espformer.lab.files import new_directory, write_atomically
from espformer.lab.machine import pick_device
from espformer.lab.recipes.build import build_mechanism
from espformer.lab.recipes.recipe import Recipe
from espformer.lab.recipes.schema import FinetuneRun, Grid
from espformer.lab.recipes.yaml_schema import Origins, Spec, parse, read_text
from espformer.lab.training.annealing import AnnealByStep
from espformer.lab.training.events import Lines
from espformer.lab.training.learner import MARK, Classifier
from espformer.lab.training.pretrained import (
    head_for,
    load_texts,
    make_classifier,
    weights_info,
)

# Tasks, and the tokens kept of a text: no tweet is longer, and two of three reviews are shorter.
MAX_LENGTH = {"tweeteval": 128, "imdb": 256}
# Enough that a calibration does not learn them by heart in some hundred steps.
CALIBRATION_TEXTS = 1024


def read_attentions(texts: Sequence[str]) -> dict[str, Spec]:
    """Read labels and mechanisms from the command line: ``esp``, ``sharp={esp: {...}}``.

    Example:
        >>> read_attentions(["softmax", "sharp={esp: {sort_temperature: 0.01}}"])["sharp"].name
        'esp'
    """
    attentions: dict[str, Spec] = {}
    for text in texts:
        label, equals, value = text.partition("=")
        origins = Origins("--attention")
        named = read_text(value) if equals else label
        build_mechanism(named, origins, (label,))
        spec = parse(Spec, named, origins, (label,))
        if label in attentions:
            raise ConfigError(f"--attention {label}: is given twice; labels must differ")
        attentions[label] = spec
    return attentions


def make_experiment(
    model: str,
    task: str,
    attentions: dict[str, Spec],
    rates: Sequence[float],
    seeds: Sequence[int],
    *,
    epochs: int,
    batch_size: int,
    anneal_to: float | None,
    precision: str,
    max_length: int | None,
    data_dir: str | None,
    examples: int | None,
    calibration_steps: int | None = None,
) -> Recipe:
    """Every attention with every learning rate and every seed, equal in all else, as a recipe."""
    if task not in MAX_LENGTH:
        raise ConfigError(f"--task {task}: {nearest(task, MAX_LENGTH)}")
    name = Path(model.rstrip("/")).name
    calibrated = calibration_steps is not None
    experiment = Recipe(
        name=f"finetune-{name}-{task}{'-calibrated' if calibrated else ''}",
        title=f"Fine-tuning {name} on {task}: other attentions in a model trained with softmax"
        + (", calibrated first" if calibrated else ""),
        task="finetuning",
        default_mechanism=next(iter(attentions)),
        mechanisms=attentions,
        grid=Grid(
            seeds=list(seeds),
            settings={f"lr {rate:g}": {"optimizer.learning_rate": rate} for rate in rates},
            adjust={label: _sharpening(spec, anneal_to) for label, spec in attentions.items()},
        ),
        sections={
            "data": {
                "set": {task: {} if examples is None else {"examples": examples}},
                "batch_size": batch_size,
                "eval_batch_size": 256,
                "directory": data_dir,
            },
            "model": {
                "pretrained": {
                    "path": model,
                    "max_length": MAX_LENGTH[task] if max_length is None else max_length,
                }
            },
            "optimizer": {"name": "adamw", "weight_decay": 0.01, "clip_norm": 1.0},
            "trainer": {"epochs": epochs, "precision": precision, "attention_statistics": False},
            "calibration_steps": calibration_steps,
        },
        origins=Origins("the command line"),
    )
    experiment.runs(seeds=seeds[:1])  # mistakes are told before work is done
    return experiment


def _sharpening(spec: Spec, anneal_to: float | None) -> dict[str, Any]:
    """Return what runs of an attention that sorts do beside the others."""
    mechanism = build_mechanism(spec)
    if not mechanism.has_sort_temperature:
        return {}
    # A hard forward needs no falling temperature: two ways to one end.
    hard = any(getattr(module, "straight_through", 0) for module in mechanism.modules())
    return {"harden": True, "anneal_to": None if hard else anneal_to}


def head_file(output: Path, run: FinetuneRun) -> Path:
    """The file of the head that all runs of an experiment begin with."""
    return output / run.recipe / "head.safetensors"


def fit_shared_head(run: FinetuneRun, output: Path) -> Path:
    """Fit the head of an experiment with the original attention, unless it is there."""
    path = head_file(output, run)
    # What the head depends on; the files of the model may lie elsewhere tomorrow.
    said = {"data": run.data.set.plain(), "max_length": run.max_length, **weights_info(run.path)}
    said.pop("path", None)
    note = path.with_suffix(".json")
    if path.exists() and note.exists():
        if json.loads(note.read_text(encoding="utf-8")) != said:
            raise RunError(
                f"{path}: was fitted with another model, other data or another max_length; choose "
                "another --output, or move the directory away"
            )
        return path
    with new_directory(path.parent):
        head = head_for(run, load_texts(run), pick_device())
    write_atomically(path, save({name: x.contiguous() for name, x in head.items()}))
    write_atomically(note, json.dumps(said, indent=1) + "\n")
    return path


def warm_up_and_decay(step: int, steps: int, warmup: float) -> float:
    """Factor of the learning rate: up in a line over `warmup` of the steps, then down to zero.

    Example:
        >>> [round(warm_up_and_decay(step, 10, 0.2), 3) for step in (0, 1, 2, 6, 10)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    return max(0.0, (steps - step) / max(1, steps - rising))


class FinetuneLearner(Classifier):
    """A :class:`Classifier` whose learning rate falls to zero; tests also give the macro recall.

    Macro recall is what TweetEval is scored by: a model that always says the largest class has a
    decent accuracy, and the macro recall of a coin.
    """

    keeps_best = False

    def __init__(self, run: FinetuneRun, task: Task) -> None:
        torch.manual_seed(run.seed)
        assert task.classes is not None
        super().__init__(run, make_classifier(run, task.classes))
        self.finetune = run
        self.calibration: dict[str, Any] | None = None
        """The result of calibrating, if it was asked for."""
        self.confusion: Tensor | None = None
        """Counts of the test so far, ``(classes, classes)``: rows are true, columns are found."""

    def begin(self, output: Path, task: Task, *, fresh: bool) -> None:
        """Begin with the head that was fitted with the original attention; calibrate if asked."""
        path = head_file(output, self.finetune)
        if not path.is_file():
            raise RunError(f"{path}: the head is not there; espformer finetune fits it first")
        head: Any = self.model.head
        head.load_state_dict(load(path.read_bytes()))
        if fresh and self.finetune.calibration_steps is not None:
            self.calibration = self._calibrate(task, self.finetune.calibration_steps)

    def _calibrate(self, task: Task, steps: int) -> dict[str, Any]:
        """Fit the converted encoder to the original, which softmax is and stays."""
        told = {"texts": CALIBRATION_TEXTS, "steps": steps}
        if self.run.mechanism == Spec("softmax"):
            return {**told, "before": 0.0, "after": 0.0, "seconds": 0.0}
        model: Any = self.model
        device = pick_device()
        model.encoder.to(device)
        batches = calibration_batches(task, self.run.data.batch_size, self.run.seed, device)
        print(f"calibrating on {CALIBRATION_TEXTS} training texts, {steps} steps", flush=True)
        lines = Lines()

        def progress(step: int, steps: int, loss: float) -> None:
            lines.break_silence(f"calibration, step {step}/{steps}, loss {loss:.4f}")

        found = calibrate(
            model.encoder, batches, steps=steps, seed=self.run.seed, progress=progress
        )
        model.encoder.cpu()
        print(found, flush=True)
        numbers = {name: getattr(found, name) for name in ("before", "aligned", "after", "seconds")}
        return {**told, **numbers}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint[MARK]["calibration"] = self.calibration

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.calibration = checkpoint[MARK].get("calibration")

    def callbacks(self) -> list[Callback]:
        end = self.finetune.anneal_to
        return [] if end is None else [AnnealByStep(end)]

    def about(self, recalls: dict[str, float]) -> dict[str, Any]:
        about = {"macro_recall": recalls, "weights": weights_info(self.finetune.path)}
        return about if self.calibration is None else {**about, "calibration": self.calibration}

    def schedule(self, optimizer: Optimizer) -> dict[str, Any]:
        steps, warmup = int(self.trainer.estimated_stepping_batches), self.finetune.warmup
        factor = LambdaLR(optimizer, lambda step: warm_up_and_decay(step, steps, warmup))
        return {"scheduler": factor, "interval": "step"}

    def on_test_epoch_start(self) -> None:
        self.confusion = None

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        _, logits = self.measure("test", batch)
        classes = logits.shape[-1]
        pairs = classes * batch["labels"] + logits.argmax(-1)
        counts = torch.bincount(pairs, minlength=classes**2).view(classes, classes)
        self.confusion = counts if self.confusion is None else self.confusion + counts

    def on_test_epoch_end(self) -> None:
        super().on_test_epoch_end()
        if self.confusion is not None:
            recalls = self.confusion.diagonal() / self.confusion.sum(1).clamp(min=1)
            self.log("test/recall", recalls.mean())


def calibration_batches(
    task: Task, batch_size: int, seed: int, device: torch.device
) -> list[dict[str, Tensor]]:
    """Return training texts without labels, those of like length together, as inputs of an encoder.

    Args:
        task: its training split is drawn from.
        batch_size: texts of a batch.
        seed: decides which texts.
        device: where they go.
    """
    texts: Any = task.train
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(texts), generator=generator)[:CALIBRATION_TEXTS]
    rows = rows[torch.argsort(texts.lengths[rows], stable=True)]
    batches = []
    for some in rows.split(batch_size):
        batch = texts.batch(some)
        ids, mask = batch["inputs"].to(device), batch["mask"].to(device)
        batches.append({"input_ids": ids, "attention_mask": mask.long()})
    return batches
