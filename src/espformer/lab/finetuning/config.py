"""The description of a fine-tuning run, and the experiment that a command line asks for."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espformer.lab.training.config import Grid, TrainingRun
from espformer.lab.training.errors import ConfigError, nearest
from espformer.lab.training.recipe import Recipe
from espformer.lab.training.specs import build_mechanism, mechanism_uses_esp
from espformer.lab.training.strict import Origins, Spec, parse, read_text

__all__ = [
    "TASKS",
    "Experiment",
    "FinetuneRun",
    "make_experiment",
    "read_attentions",
    "run_from_plain",
]

TASKS = ("tweeteval", "imdb")
TASK = "finetuning"
MODEL = "pretrained"
# Tokens kept of a text: no tweet is longer, and two of three reviews are shorter.
MAX_LENGTH = {"tweeteval": 128, "imdb": 256}


@dataclass(frozen=True, kw_only=True)
class FinetuneRun(TrainingRun):
    """One fine-tuning: the model is ``{pretrained: {path, max_length}}``, the data a set of texts.

    The learning rate rises for `warmup` of the steps and then falls to zero, both in a line. ESP's
    sort temperature goes from what the mechanism says to `anneal_to`, by the same factor each step.
    """

    anneal_to: float | None = None
    """Sort temperature at the last step; it stays unless given."""
    warmup: float = 0.1
    """Share of the steps in which the learning rate rises."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anneal_to is not None and not self.anneal_to > 0:
            raise ValueError(f"anneal_to must be > 0, got {self.anneal_to}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must be a share in [0, 1), got {self.warmup}")

    @property
    def path(self) -> str:
        """Directory or name of the pre-trained model."""
        return str(self.model.arguments["path"])

    @property
    def max_length(self) -> int:
        """Tokens kept of a text, the first ones."""
        return int(self.model.arguments["max_length"])

    @property
    def examples(self) -> int | None:
        """Examples of each split, to try something out; all of them if None."""
        return self.data.set.arguments.get("examples")


def run_from_plain(raw: dict[str, Any], file: str) -> FinetuneRun:
    """The run that a `config.yaml` or a checkpoint describes."""
    return parse(FinetuneRun, raw, Origins(file))


def read_attentions(texts: Sequence[str]) -> dict[str, Spec]:
    """Labels and mechanisms from the command line: ``esp``, ``sharp={esp: {...}}``.

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


@dataclass(frozen=True)
class Experiment(Recipe):
    """What a command line compares, as a recipe: for tables of its results."""

    made: dict[tuple[str, str], FinetuneRun] = dataclasses.field(default_factory=dict)
    """A run for each attention and learning rate."""

    def run(
        self,
        mechanism: str | None = None,
        setting: str | None = None,
        seed: int | None = None,
        overrides: Sequence[str] = (),
    ) -> FinetuneRun:
        """One run of the experiment; the arguments are those of a recipe."""
        label = self.default_mechanism if mechanism is None else mechanism
        setting = next(iter(self.grid.settings)) if setting is None else setting
        seed = self.grid.seeds[0] if seed is None else seed
        return dataclasses.replace(self.made[label, setting], seed=seed)


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
) -> Experiment:
    """Every attention with every learning rate and every seed, equal in all else."""
    if task not in TASKS:
        raise ConfigError(f"--task {task}: {nearest(task, TASKS)}")
    name = Path(model.rstrip("/")).name
    recipe = f"finetune-{name}-{task}"
    origins = Origins("the command line")
    common = {
        "recipe": recipe,
        "task": TASK,
        "seed": seeds[0],
        "data": {
            "set": {task: {} if examples is None else {"examples": examples}},
            "batch_size": batch_size,
            "eval_batch_size": 256,
            "directory": data_dir,
        },
        "model": {
            MODEL: {
                "path": model,
                "max_length": MAX_LENGTH[task] if max_length is None else max_length,
            }
        },
        "trainer": {"epochs": epochs, "precision": precision, "attention_statistics": False},
    }
    made = {}
    for rate in rates:
        optimizer = {"name": "adamw", "learning_rate": rate, "weight_decay": 0.01, "clip_norm": 1.0}
        for label, spec in attentions.items():
            esp = mechanism_uses_esp(spec)
            own = {
                "mechanism": spec.plain(),
                "label": label,
                "setting": _setting(rate),
                "optimizer": optimizer,
                "harden": esp,
                "anneal_to": anneal_to if esp and not _straight_through(spec) else None,
            }
            made[label, _setting(rate)] = parse(FinetuneRun, common | own, origins)
    return Experiment(
        name=recipe,
        title=f"Fine-tuning {name} on {task}: other attentions in a model trained with softmax",
        task="classification",
        paper=None,
        default_mechanism=next(iter(attentions)),
        mechanisms=attentions,
        grid=Grid(seeds=list(seeds), settings={_setting(rate): {} for rate in rates}),
        sections={},
        origins=origins,
        made=made,
    )


def _setting(rate: float) -> str:
    return f"lr {rate:g}"


def _straight_through(spec: Spec) -> bool:
    """A hard forward needs no falling temperature: two ways to one end."""
    base = spec.arguments.get("base")
    if spec.name == "differential" and base is not None:
        return _straight_through(parse(Spec, base, Origins()))
    return bool(spec.arguments.get("straight_through", False))
