"""Recipes: found by name, validated, and expanded into runs."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

from espformer.lab.errors import ConfigError, nearest
from espformer.lab.recipes.build import (
    build_mechanism,
    check_data,
    check_model,
    has_sort_temperature,
)
from espformer.lab.recipes.schema import FinetuneRun, Grid, Run, TimingRun, TrainingRun
from espformer.lab.recipes.yaml_schema import Origins, Spec, parse, read_text, read_yaml, set_path

# Tasks that a recipe in a file may have, and the one that `espformer finetune` makes recipes of.
_TASKS = ("classification", "translation", "runtime")
_KINDS: dict[str, type[Run]] = {
    "classification": TrainingRun,
    "translation": TrainingRun,
    "runtime": TimingRun,
    "finetuning": FinetuneRun,
}
# Filled in for each run by the recipe, never written among its sections.
_IDENTITY = ("recipe", "label", "setting", "seed", "mechanism")


@dataclass(frozen=True, kw_only=True)
class Head:
    """The keys of a recipe that are about the experiment, not about one run."""

    title: str
    task: str
    mechanisms: dict[str, Spec]
    paper: str | None = None
    note: str = ""
    """A remark that a reader of the results needs."""
    default_mechanism: str = "espformer"
    grid: Grid = field(default_factory=Grid)


@dataclass(frozen=True, kw_only=True)
class Recipe(Head):
    """An experiment: what it compares, and how one of its runs is made."""

    name: str
    sections: dict[str, Any] = field(default_factory=dict)
    """The keys that are about one run."""
    origins: Origins = field(default_factory=Origins)

    def run(
        self,
        mechanism: str | None = None,
        setting: str | None = None,
        seed: int | None = None,
        overrides: Sequence[str] = (),
    ) -> Run:
        """Return one run of the experiment.

        Args:
            mechanism: label of a mechanism; the recipe's default unless given.
            setting: name of a setting; the first one unless given.
            seed: seed; the first one of the grid unless given.
            overrides: `key.path=value` texts, which win over the recipe. Another `trainer.epochs`
                stretches what the recipe times by epochs, see :func:`_stretch`.
        """
        label = self.default_mechanism if mechanism is None else mechanism
        setting = next(iter(self.grid.settings)) if setting is None else setting
        self._known("mechanism", label, self.mechanisms)
        self._known("setting", setting, self.grid.settings)
        raw = copy.deepcopy(self.sections)
        raw["mechanism"] = self.mechanisms[label].plain()
        origins = Origins(self.origins.file, dict(self.origins.places))
        _move(origins, ("mechanisms", label), ("mechanism",))
        for group, name, values in (
            ("adjust", label, self.grid.adjust.get(label, {})),
            ("settings", setting, self.grid.settings[setting]),
        ):
            for key, value in values.items():
                place = self.origins.of(("grid", group, name, key))
                _override(raw, key, copy.deepcopy(value), origins, place)
        planned = _epochs(raw)
        said = []
        for text in overrides:
            key, equals, value = text.partition("=")
            if not equals or not key:
                raise ConfigError(f"override '{text}': write it as key.path=value")
            _override(raw, key, read_text(value), origins, "the command line")
            said.append(key)
        _stretch(raw, planned, said)
        kind = _KINDS[self.task]
        _check_keys(raw, kind, {"mechanism"}, origins)
        seed = self.grid.seeds[0] if seed is None else seed
        identity = {"recipe": self.name, "label": label, "setting": setting, "seed": seed}
        run = parse(kind, {"task": self.task, **raw, **identity}, origins)
        _check(run, origins)
        return run

    def runs(
        self,
        seeds: Sequence[int] | None = None,
        overrides: Sequence[str] = (),
        only: Sequence[str] = (),
    ) -> list[Run]:
        """Return all runs of the grid; `only` keeps those whose mechanism or setting it names."""
        for name in only:
            self._known("mechanism or setting", name, [*self.mechanisms, *self.grid.settings])
        labels = [label for label in self.mechanisms if label in only] or list(self.mechanisms)
        settings = [name for name in self.grid.settings if name in only] or list(self.grid.settings)
        return [
            self.run(label, setting, seed, overrides)
            for setting in settings
            for label in labels
            for seed in (self.grid.seeds if seeds is None else seeds)
        ]

    def _known(self, what: str, name: str, names: Iterable[str]) -> None:
        if name not in names:
            raise ConfigError(f"recipe {self.name} has no {what} '{name}', {nearest(name, names)}")


def recipe_names() -> list[str]:
    """Return the recipes that come with the package."""
    folder = resources.files("espformer.lab") / "recipes"
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    )


def load_recipe(name: str | Path) -> Recipe:
    """A recipe by its name, or by the path of a YAML file; every run of its grid is checked."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        if str(name) not in recipe_names():
            hint = nearest(str(name), recipe_names())
            raise ConfigError(f"no recipe is called '{name}', {hint} (or give the path of a .yaml)")
        path = Path(str(resources.files("espformer.lab") / "recipes" / f"{name}.yaml"))
    raw, origins = read_yaml(path)
    head_keys = {f.name for f in fields(Head)}
    task = raw.get("task")
    if task not in _TASKS:
        hint = "this key is missing" if task is None else f"got {task!r}"
        raise origins.error(("task",), f"{hint}, {nearest(str(task), _TASKS)}")
    sections = {key: value for key, value in raw.items() if key not in head_keys}
    _check_keys(sections, _KINDS[task], head_keys, origins)
    head = parse(Head, {key: value for key, value in raw.items() if key in head_keys}, origins)
    said = {**vars(head), "note": head.note.strip()}
    recipe = Recipe(name=path.stem, sections=sections, origins=origins, **said)
    for label in head.grid.adjust:
        if label not in head.mechanisms:
            hint = nearest(label, head.mechanisms)
            raise origins.error(("grid", "adjust", label), f"no mechanism '{label}', {hint}")
    if head.default_mechanism not in head.mechanisms:
        hint = nearest(head.default_mechanism, head.mechanisms)
        raise origins.error(
            ("default_mechanism",), f"no mechanism '{head.default_mechanism}', {hint}"
        )
    if recipe.paper not in (None, recipe.name, *recipe_names()):
        hint = nearest(str(recipe.paper), recipe_names())
        raise origins.error(("paper",), f"no table of the paper is called '{recipe.paper}', {hint}")
    recipe.runs(seeds=recipe.grid.seeds[:1])
    return recipe


def run_from_plain(raw: dict[str, Any], file: str) -> Run:
    """Return the run that a `config.yaml` or a checkpoint describes."""
    origins = Origins(file)
    task = raw.get("task")
    if task not in _KINDS:
        raise ConfigError(f"{file}: not the description of a run (its task is {task!r})")
    return parse(_KINDS[task], raw, origins)


def _run_keys(kind: type[Run]) -> set[str]:
    """Keys of a run that a recipe may write."""
    return {f.name for f in fields(kind)} - {*_IDENTITY, "task"}


def _check_keys(raw: dict[str, Any], kind: type[Run], others: set[str], origins: Origins) -> None:
    """Refuse a key that neither a run nor what is written beside it has."""
    known = _run_keys(kind) | others
    for key in raw:
        if key not in known:
            hint = nearest(str(key), known)
            if "did you mean" not in hint:  # perhaps it is a key within a section
                within = nearest(str(key), known | _section_keys(kind))
                hint = within if "did you mean" in within else hint
            raise origins.error((str(key),), f"unknown key '{key}', {hint}")


def _section_keys(kind: type[Run]) -> set[str]:
    """Keys within the sections that every run has: trainer.epochs and the like."""
    types = get_type_hints(kind)
    return {
        f"{section}.{f.name}"
        for section in _run_keys(kind)
        if is_dataclass(types[section])
        for f in fields(types[section])
    }


def _override(raw: dict[str, Any], key: str, value: Any, origins: Origins, place: str) -> None:
    path = tuple(key.split("."))
    if path[0] in ("mechanisms", "grid"):
        raise ConfigError(
            f"{place}: {key}: an override is about one run: write mechanism.…, or choose runs with "
            "the options --mechanism, --setting, --seed and --only"
        )
    set_path(raw, path, value, origins, place)


def _epochs(raw: dict[str, Any]) -> Any:
    trainer = raw.get("trainer")
    return trainer.get("epochs") if isinstance(trainer, dict) else None


def _stretch(raw: dict[str, Any], planned: Any, said: Sequence[str]) -> None:
    """Rescale a schedule to a different number of epochs than the recipe has, unless it is
    overridden.

    Milestones, warm-up and the way of `straight_through` keep their share of the training, and
    annealing its last temperature: ``factor ** epochs`` stays.

    Args:
        raw: the sections of a run, with the number of epochs that was asked for.
        planned: the number that the recipe has.
        said: keys that the overrides give.
    """
    epochs = _epochs(raw)
    if not (_counts(planned) and _counts(epochs)) or epochs == planned:
        return
    share = epochs / planned

    def shorten(section: str, key: str, change: Callable[[Any], Any]) -> None:
        there = raw.get(section)
        free = section not in said and f"{section}.{key}" not in said
        if free and isinstance(there, dict) and there.get(key) is not None:
            there[key] = change(there[key])

    def scaled(number: Any) -> Any:
        return max(1, round(number * share)) if _counts(number) else number

    shorten("schedule", "warmup_steps", scaled)
    shorten("straight_through", "epochs", scaled)
    shorten("annealing", "factor", lambda factor: factor ** (1 / share))
    shorten(
        "schedule",
        "milestones",
        lambda epochs: sorted(set(map(scaled, epochs))) if isinstance(epochs, list) else epochs,
    )


def _counts(number: Any) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and number > 0


def _move(origins: Origins, source: tuple[str, ...], target: tuple[str, ...]) -> None:
    for path, place in list(origins.places.items()):
        if path[: len(source)] == source:
            origins.places[target + path[len(source) :]] = place


def _check(run: Run, origins: Origins) -> None:
    """Raise for values that are wrong although all keys and types are valid."""
    build_mechanism(run.mechanism, origins, ("mechanism",))
    if isinstance(run, TrainingRun) and not isinstance(run, FinetuneRun):
        check_data(run.data.set, origins, ("data", "set"))
        check_model(run.model, origins, ("model",))
        sharpens = run.annealing is not None or run.straight_through is not None or run.harden
        if sharpens and not has_sort_temperature(run.mechanism):
            raise origins.error(
                ("mechanism",),
                f"{run.mechanism} has no sort temperature: annealing, straight_through and harden "
                "are for esp, alone or inside differential",
            )
