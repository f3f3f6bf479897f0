"""`espformer plot`: the figures of the paper, of a run and of an experiment."""

from pathlib import Path
from typing import Annotated, Any

import typer

from espformer.lab.cli.options import Output
from espformer.ops.common.optional import how_to_install

SAVED = ("patch-size", "softness")  # drawn from a file of results
FIGURES = ("plans", "runtime", *SAVED, "attention")
FORMATS = ("png", "svg", "pdf")


def plot(
    target: Annotated[
        str,
        typer.Argument(
            help="plans, runtime, patch-size, softness or attention; or the directory of a run, or "
            "the name of an experiment."
        ),
    ],
    source: Annotated[
        list[Path] | None,
        typer.Argument(help="Input of the figure; see the examples.", metavar="[SOURCE]..."),
    ] = None,
    output: Output = Path("runs"),
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", help="Output file; without .png, .svg or .pdf, all three are written."
        ),
    ] = None,
    example: Annotated[int, typer.Option(help="attention: index of the test example.")] = 0,
    layer: Annotated[int, typer.Option(help="attention: index of the layer; -1 is the last.")] = -1,
    data_dir: Annotated[
        str | None, typer.Option("--data-dir", help="attention: data directory.")
    ] = None,
) -> None:
    """Draw a figure of the paper, the curves of a run, or the scores of an experiment.

    Figures: plans shows transport plans between two clouds of tokens; runtime draws times of
    `espformer bench`; patch-size and softness draw saved results; attention shows the attention
    maps of trained runs.

    Examples:

      espformer plot plans --to figures/plans

      espformer plot runtime benchmarks/results/quick-cpu.csv

      espformer plot patch-size results/mnist-patch-size.json --to patches.pdf

      espformer plot softness results/mnist-hypotheses.json

      espformer plot attention runs/digits/default/*/seed-0 --example 3

      espformer plot runs/digits/default/espformer-default/seed-0

      espformer plot digits --to digits.pdf
    """
    from espformer.lab.errors import UserError

    sources = source or []
    try:
        if target in FIGURES and (sources or target == "plans"):
            figure, place = _figure(target, sources, example, layer, data_dir), Path(target)
        else:
            _check_alone(target, sources)
            figure, place = _run_or_experiment(target, output)
    except ModuleNotFoundError as error:
        raise UserError(f"figures need {how_to_install(error.name, 'plots')}") from None
    for path in _save(figure, to or place):
        print(path)


def _check_alone(target: str, sources: list[Path]) -> None:
    """Refuse a figure without its input, and a run or an experiment with one."""
    from espformer.lab.errors import ConfigError

    if target == "attention" or target in SAVED:
        wanted = "directories of runs" if target == "attention" else "a file of results"
        raise ConfigError(f"plot {target}: say what to draw it from, {wanted} (see --help)")
    if sources:
        raise ConfigError(
            f"plot {target}: only {', '.join(FIGURES[1:])} are drawn from something else"
        )


def _figure(
    target: str, sources: list[Path], example: int, layer: int, data_dir: str | None
) -> Any:
    from espformer.lab import plots
    from espformer.lab.errors import ConfigError, UserError

    if target == "plans":
        if sources:
            raise ConfigError("plot plans: it is drawn from points of its own, not from a file")
        queries, keys = plots.example_clouds()
        top, bottom = plots.sinkhorn_plans(queries, keys), plots.esp_plans(queries, keys)
        return plots.plan_comparison(queries, keys, top, bottom)
    if target == "attention":
        return _attention(sources, example, layer, data_dir)
    if len(sources) > 1:
        raise ConfigError(f"plot {target}: one file at a time, got {len(sources)}")
    if target == "runtime":
        try:
            timings = plots.read_timings(sources[0])
            return plots.runtime(timings, f"From {sources[0].name}.")
        except (OSError, ValueError) as error:
            raise UserError(
                f"{sources[0]}: {error}; expected the CSV that `espformer bench` writes"
            ) from None
    from espformer.lab.results.figures import FIGURES as saved

    return saved[target][1](sources[0])


def _attention(runs: list[Path], example: int, layer: int, data_dir: str | None) -> Any:
    from espformer.lab import plots
    from espformer.lab.errors import UserError
    from espformer.lab.report.inspection import open_run

    opened = [open_run(path, data_dir) for path in runs]
    plans, name, count = [], "", 0
    for trained in opened:
        shown = trained.example(example)
        matrices = trained.matrices(shown)
        name, count = shown.name, len(matrices)
        if not -count <= layer < count:
            raise UserError(f"{trained.directory}: no layer {layer}, it has {count}")
        plans.append(plots.NamedPlan(trained.label, matrices[layer]))
    which = layer % count + 1
    title = f"Attention of layer {which} of {count}"
    subtitle = f"{name[0].upper()}{name[1:]}. Bars: row sums at the right, column sums below."
    return plots.attention_maps(plans, title, subtitle)


def _save(figure: Any, to: Path) -> list[Path]:
    from espformer.lab.errors import ConfigError, RunError
    from espformer.lab.plots import save_figure

    suffix = to.suffix.removeprefix(".")
    if suffix and suffix not in FORMATS:
        raise ConfigError(f"--to {to}: figures are written as {', '.join(FORMATS)}")
    stem, formats = (to.with_suffix(""), (suffix,)) if suffix else (to, FORMATS)
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        return save_figure(figure, stem, formats)
    except OSError as error:
        raise RunError(f"{to}: the figure could not be written ({error.strerror})") from None


def _run_or_experiment(target: str, output: Path) -> tuple[Any, Path]:
    """Return the figure and its default path."""
    from espformer.lab.errors import ConfigError, nearest
    from espformer.lab.recipes.recipe import load_recipe, recipe_names
    from espformer.lab.results.figures import plot_experiment, plot_run
    from espformer.lab.results.result_files import collect

    if (Path(target) / "config.yaml").is_file():
        return plot_run(Path(target)), Path(target) / "curves.png"
    if Path(target).suffix not in (".yaml", ".yml") and target not in recipe_names():
        hint = nearest(target, [*FIGURES, *recipe_names()])
        raise ConfigError(f"plot: '{target}' is not a figure, a run or an experiment, {hint}")
    recipe = load_recipe(target)
    figure = plot_experiment(recipe, collect(recipe, output))
    return figure, output / recipe.name / "scores.png"
