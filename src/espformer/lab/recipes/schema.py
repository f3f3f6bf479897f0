"""The schema of recipes: data, model, training, and the grid of runs of an experiment.

A recipe is a YAML file. Its head says which mechanisms, seeds and settings the experiment compares;
the rest describes one run, and is the same for all of them but for the overrides that the grid
names. :meth:`Recipe.run` picks one run out of it.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from espformer.lab.recipes.yaml_schema import Spec
from espformer.nn.parameters import MECHANISM_RATE


class _Mistake(ValueError):
    """Something wrong in a description, and the keys that lead to it."""

    def __init__(self, message: str, *path: str) -> None:
        super().__init__(message)
        self.path = path


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data set, and how it is cut into batches."""

    set: Spec
    """Name of the data set and the options of its loader."""
    batch_size: int = 64
    """Examples of a training step, over all devices."""
    max_tokens: int | None = None
    """Translation: tokens of a training step instead, padding included, over all devices."""
    group_by_length: bool = False
    """Texts of like length share a training step: less padding, and batches that are less mixed."""
    eval_batch_size: int | None = None
    """Examples of an evaluation step; `batch_size` unless given."""
    workers: int = 0
    """Processes that prepare batches; 0 is none beside the training process."""
    directory: str | None = None
    """The directory of the files; by default the data set's own."""

    def __post_init__(self) -> None:
        _positive(batch_size=self.batch_size, eval_batch_size=self.eval_batch_size)
        _positive(max_tokens=self.max_tokens)
        _not_negative(workers=self.workers)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimiser of all parameters, and what is special for sort temperatures."""

    name: Literal["adam", "adamw", "sgd"] = "adam"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Adam and AdamW."""
    momentum: float = 0.9
    """SGD."""
    temperature_multiplier: float = MECHANISM_RATE
    """Learning rate of learnt temperatures and slice weights, as a multiple; no weight decay."""
    clip_norm: float | None = None
    """Largest norm of the gradient; not clipped unless given."""

    def __post_init__(self) -> None:
        _positive(learning_rate=self.learning_rate, clip_norm=self.clip_norm)
        _not_negative(weight_decay=self.weight_decay, momentum=self.momentum)
        _not_negative(temperature_multiplier=self.temperature_multiplier)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The course of the learning rate."""

    name: Literal["constant", "milestones", "inverse_sqrt"] = "constant"
    milestones: list[int] = field(default_factory=list)
    """Epochs after which the rate is multiplied by `factor` (milestones)."""
    factor: float = 0.1
    warmup_steps: int = 4000
    """Steps from `warmup_from` up to the learning rate, then it falls as 1/√step (inverse_sqrt)."""
    warmup_from: float = 1e-7
    first_step: int = 0
    """Step at which the schedule begins (inverse_sqrt)."""
    continues: bool = False
    """Go on with the warm-up and the step of the run that this one starts from (inverse_sqrt)."""

    def __post_init__(self) -> None:
        increasing = sorted(set(self.milestones)) == self.milestones
        if self.name == "milestones" and not (increasing and min(self.milestones, default=1) >= 1):
            raise _Mistake(
                f"milestones must be increasing epochs from 1 on, got {self.milestones}",
                "milestones",
            )
        if self.name != "milestones" and self.milestones:
            raise ValueError(f"milestones belong to the schedule 'milestones', not '{self.name}'")
        if self.continues and self.name != "inverse_sqrt":
            raise ValueError(f"only the schedule 'inverse_sqrt' continues, not '{self.name}'")
        _positive(factor=self.factor, warmup_steps=self.warmup_steps)
        _not_negative(warmup_from=self.warmup_from, first_step=self.first_step)


@dataclass(frozen=True, kw_only=True)
class Annealing:
    """Sort temperatures fall during training: t ← factor·t before each epoch."""

    factor: float = 0.8
    start: float | None = None
    """Temperature before the first epoch; the one that the model has unless given."""

    def __post_init__(self) -> None:
        if not 0 < self.factor <= 1:
            raise ValueError(f"factor must be in (0, 1], got {self.factor}")
        _positive(start=self.start)


@dataclass(frozen=True, kw_only=True)
class StraightThrough:
    """Share of the hard sort in the forward, moved in equal steps from `start` to `end`."""

    start: float = 0.0
    end: float = 1.0
    epochs: int | None = None
    """Epochs that the way takes; all but the last one unless given."""

    def __post_init__(self) -> None:
        if not (0 <= self.start <= 1 and 0 <= self.end <= 1):
            raise ValueError(f"shares must be in [0, 1], got {self.start} and {self.end}")
        _positive(epochs=self.epochs)


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Length, numbers and machines."""

    epochs: int = 1
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"] = "32-true"
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    devices: int = 1
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """The work of several devices: `ddp` copies the model, `fsdp` shares it out (classifiers)."""
    deterministic: bool = False
    """Refuse operators whose result depends on the order of threads."""
    compile: bool = False
    """torch.compile the model."""
    cuda_graph: bool = False
    """Record the training step once and replay it: small models train faster (one CUDA device)."""
    accumulate: int = 1
    """Batches whose gradients are summed before a step."""
    validate_every: int = 1
    """Epochs between validations."""
    checkpoint_minutes: float = 5.0
    """Minutes between checkpoints inside an epoch, 0 for each step; each epoch ends with one."""
    limit_batches: int | None = None
    """Only so many training batches per epoch: to try something out."""
    limit_eval_batches: int | None = None
    """Only so many batches per evaluation: to try something out."""
    attention_statistics: bool = True
    """Log the error of row and column sums and the entropy of the attention after each epoch."""
    compare_throughput: bool = False
    """ESP classifiers: time some steps, also with softmax attention, and print the share."""

    def __post_init__(self) -> None:
        _positive(devices=self.devices, accumulate=self.accumulate)
        _positive(validate_every=self.validate_every, limit_batches=self.limit_batches)
        _positive(limit_eval_batches=self.limit_eval_batches)
        _not_negative(epochs=self.epochs, checkpoint_minutes=self.checkpoint_minutes)
        if self.cuda_graph:
            for reason, met in (
                ("devices=1 and strategy=auto", self.devices == 1 and self.strategy == "auto"),
                ("compile=false", not self.compile),
                ("accumulate=1", self.accumulate == 1),
                ("a precision other than 16-mixed", self.precision != "16-mixed"),
            ):
                if not met:
                    raise _Mistake(f"cuda_graph needs {reason}", "cuda_graph")


@dataclass(frozen=True, kw_only=True)
class Start:
    """Begin with the weights of another run: of a recipe (same seed and setting), or of a file."""

    recipe: str | None = None
    mechanism: str | None = None
    """Label of the mechanism in that recipe; the same label unless given."""
    checkpoint: str | None = None
    """A checkpoint file, instead of a recipe."""
    overrides: list[str] | None = None
    """Overrides for the run of that recipe, such as ``trainer.epochs=20``."""

    def __post_init__(self) -> None:
        if (self.recipe is None) == (self.checkpoint is None):
            raise ValueError("give either a recipe or a checkpoint to start from")
        if self.overrides and self.recipe is None:
            raise ValueError("overrides are for the run of a recipe; a checkpoint is what it is")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run: where it comes from, and the mechanism it is about."""

    recipe: str
    task: str
    mechanism: Spec
    label: str
    setting: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class TrainingRun(Run):
    """One training run."""

    data: Data
    model: Spec
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    label_smoothing: float = 0.0
    """Share of the probability that the loss gives to all classes, or all words, alike."""
    trainer: Trainer = field(default_factory=Trainer)
    annealing: Annealing | None = None
    straight_through: StraightThrough | None = None
    harden: bool = False
    """After training, also evaluate with exact sorting."""
    start: Start | None = None
    beam: int = 5
    """Translation: width of the beam."""
    decode_every: int | None = None
    """Translation: epochs between validations that translate, 5 unless given; the last one does."""

    memory_advice: ClassVar[str] = (
        "a smaller data.batch_size (half of it with trainer.accumulate=2 is the same step), or "
        "trainer.precision=bf16-mixed"
    )
    """Advice for a device with too little memory."""

    @property
    def scores_before(self) -> tuple[str, ...]:
        """Names of the scores that are measured before training: none of random weights."""
        if self.start is None:
            return ()
        return ("start", "start_hard") if self.harden else ("start",)

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}")
        _positive(beam=self.beam, decode_every=self.decode_every)
        if self.schedule.continues and self.start is None:
            raise _Mistake("a schedule continues that of the run given as start", "schedule")
        if self.annealing is not None and self.straight_through is not None:
            raise ValueError("annealing and straight_through are two ways to one end: choose one")
        if self.trainer.strategy == "fsdp" and self.task == "translation":
            raise _Mistake(
                "fsdp does not reach into a beam search: trainer.strategy=ddp does",
                "trainer", "strategy",
            )  # fmt: skip
        if self.trainer.cuda_graph and self.task == "translation":
            raise _Mistake(
                "one recorded step serves all batches of a shape, and hardly two batches of a "
                "translation have one: train it without",
                "trainer", "cuda_graph",
            )  # fmt: skip


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
    calibration_steps: int | None = None
    """Steps of calibration on training texts, without their labels, before; none unless given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(anneal_to=self.anneal_to)
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must be a share in [0, 1), got {self.warmup}")
        if self.calibration_steps is not None:
            _not_negative(calibration_steps=self.calibration_steps)

    memory_advice: ClassVar[str] = "a smaller --batch-size, fewer --jobs, or --precision bf16-mixed"

    @property
    def scores_before(self) -> tuple[str, ...]:
        return ("start", "start_hard") if self.harden else ("start",)

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


@dataclass(frozen=True, kw_only=True)
class TimingRun(Run):
    """One attention layer, timed."""

    tokens: int = 100
    batch_size: int = 1
    dim: int = 1024
    heads: int = 16
    repeats: int = 10
    backward: bool = False
    """Time the forward and the backward, not the forward alone."""
    precision: Literal["32-true", "bf16-true"] = "32-true"
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"

    def __post_init__(self) -> None:
        _positive(tokens=self.tokens, batch_size=self.batch_size, repeats=self.repeats)
        _positive(dim=self.dim, heads=self.heads)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The runs of an experiment: every mechanism, in every setting, with every seed."""

    seeds: list[int] = field(default_factory=lambda: [0])
    settings: dict[str, dict[str, Any]] = field(default_factory=lambda: {"default": {}})
    """Name of a setting, and the values it gives to keys of the run: `data.set.x.fraction: 0.1`."""
    adjust: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Label of a mechanism, and the values it needs: `optimizer.learning_rate: 2e-3`."""

    def __post_init__(self) -> None:
        if not self.seeds or not self.settings:
            raise ValueError("a grid has at least one seed and one setting")
        if len(set(self.seeds)) < len(self.seeds):
            raise _Mistake(
                f"seeds must differ, got {self.seeds}; runs with one seed are one run", "seeds"
            )
        if not all(0 <= seed < 2**32 for seed in self.seeds):
            raise _Mistake(f"seeds must be in [0, 2**32), got {self.seeds}", "seeds")


def _not_negative(**numbers: float) -> None:
    for name, number in numbers.items():
        if not number >= 0:
            raise _Mistake(f"{name} cannot be negative, got {number}", name)


def _positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not value > 0:
            raise _Mistake(f"{name} must be > 0, got {value}", name)
