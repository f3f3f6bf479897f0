"""The parts of the page as HTML, each with its words and alternative texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from espformer.lab.plots.clouds import esp_plans, example_clouds, sinkhorn_plans, sum_errors
from espformer.lab.report import svg
from espformer.lab.report.inspection import Trained
from espformer.lab.report.summary import COLUMNS, Summary, cells, heading_of, short

_HEADS = [name if "/" in name else name.capitalize() for name in COLUMNS]
_CHARTS = (
    ("loss", "Training loss", "train/loss", 1.0, True),
    ("accuracy", "Validation accuracy, %", "valid/accuracy", 100.0, False),
    ("columns", "Column sums, mean distance from one", "attention/column_error", 1.0, True),
    ("entropy", "Entropy of a row, 1 is uniform", "attention/entropy", 1.0, False),
)
_ANNEALING = (
    ("t", "Annealing: mean sort temperature t", "sort_temperature", 1.0, True),
    ("annealed", "Annealing: validation accuracy, %", "valid/accuracy", 100.0, False),
)


def table(rows: Sequence[Summary]) -> str:
    """Scores, sums, size and speed; the best of each score is marked."""
    best = [
        max((row[i] for row in rows if row[i] is not None), default=None)  # type: ignore[type-var]
        for i in (1, 2, 3)
    ]
    lines = ["<table><thead><tr>"]
    lines += [f'<th scope="col">{name}</th>' for name in _HEADS]
    lines.append("</tr></thead><tbody>")
    for colour, row in enumerate(rows):
        name, *rest = cells(row)
        lines.append(f'<tr><th scope="row"><i class="key c{colour}"></i>{escape(name)}</th>')
        for index, (head, text) in enumerate(zip(_HEADS[1:], rest, strict=True)):
            top = index < 3 and row[index + 1] is not None and row[index + 1] == best[index]
            mark = ' class="best"' if top else ""
            lines.append(f'<td data-head="{head}"{mark}>{escape(text)}</td>')
        lines.append("</tr>")
    return "".join([*lines, "</tbody></table>"])


def legend(runs: Sequence[Trained]) -> str:
    """Return the colours of the runs, to point at."""
    return "".join(
        f'<button type="button" class="chip" data-colour="{colour}" aria-pressed="false">'
        f'<i class="key c{colour}"></i>{escape(heading_of(run.label))}</button>'
        for colour, run in enumerate(runs)
    )


def curves(runs: Sequence[Trained]) -> tuple[str, dict[str, Any]]:
    """Charts of what was logged, and their numbers for the script."""
    every = list(enumerate(runs))
    annealed = [(colour, run.annealed) for colour, run in every if run.annealed]
    charts = [(*chart, every) for chart in _CHARTS]
    charts += [(*chart, annealed) for chart in _ANNEALING]
    figures, numbers = [], {}
    for name, title, key, factor, log, shown in charts:
        lines = [(run, colour, _points(run, key, factor)) for colour, run in shown]
        series = [
            svg.Series(heading_of(run.label), colour, points)
            for run, colour, points in lines
            if points
        ]
        if not series:
            continue
        told = "; ".join(f"{one.name} ends at {one.points[-1][1]:.3g}" for one in series)
        chart = svg.line_chart(name, series, summary=f"{title}, by epoch. {told}.", log=log)
        figures.append(_figure(title, chart))
        numbers[f"chart-{name}"] = [
            {"name": one.name, "colour": one.colour, "points": _rounded(one.points)}
            for one in series
        ]
    return "".join(figures), numbers


def _points(run: Trained, key: str, factor: float) -> list[tuple[float, float]]:
    values = run.curves.get(key, {})
    known = {epoch: value for epoch, value in values.items() if math.isfinite(value)}
    return [(epoch + 1, factor * known[epoch]) for epoch in sorted(known)]


def _rounded(points: Sequence[tuple[float, float]]) -> list[list[float]]:
    return [[x, float(f"{y:.4g}")] for x, y in points]


def _figure(title: str, body: str, note: str = "") -> str:
    told = f"<small>{note}</small>" if note else ""
    return f"<figure><figcaption>{escape(title)}{told}</figcaption>{body}</figure>"


def plans() -> str:
    """Return the paper's figure: Sinkhorn after some steps above, ESP at some τ below."""
    queries, keys = example_clouds()
    panels = [
        _figure(
            "The tokens",
            svg.plan_panel(
                "tokens", queries, keys, None, f"{len(queries)} queries, {len(keys)} keys"
            ),
            f"{len(queries)} queries ●, {len(keys)} keys ■",
        )
    ]
    top, bottom = sinkhorn_plans(queries, keys), esp_plans(queries, keys)
    for number, plan in enumerate((*top, *bottom)):
        errors = sum_errors(plan.matrix)
        note = f"rows ± {short(errors.rows)}, columns ± {short(errors.columns)}"
        alt = f"Transport plan of {plan.name} between two clouds of points: {note}"
        body = svg.plan_panel(str(number), queries, keys, plan.matrix.detach(), alt)
        panels.append(_figure(plan.name, body, note))
    return "".join(panels)


def slices(runs: Sequence[Trained], index: int) -> str:
    """The weights σ of the slices of every run that sorts, for each head of its last layer."""
    figures = []
    for colour, run in enumerate(runs):
        if not run.sorts:
            continue
        weights = run.slices(run.example(index))[-1][1].detach()
        for head, sigma in enumerate(weights[:4]):
            count = len(sigma)
            spread = math.exp(-float((sigma * sigma.clamp(min=1e-30).log()).sum()))
            title = f"{heading_of(run.label)}, head {head + 1}"
            note = f"worth {spread:.1f} of {count} slices"
            told = f"{title}: weights of {count} slices, from {float(sigma.min()):.3f} to " \
                f"{float(sigma.max()):.3f}; {note}"  # fmt: skip
            body = svg.bar_chart(f"{colour}-{head}", sigma.tolist(), colour, told, 1 / count)
            figures.append(_figure(title, body, note))
    return "".join(figures)


def conditions(runs: Sequence[Trained], command: str) -> str:
    """Write the section about the command, the machine, the versions and the data."""
    first = runs[0]
    results, config = first.results, first.run
    versions = results["versions"]
    revision = f" at {versions['revision']}" if versions.get("revision") else ""
    facts = [
        ("Command", f"<code>{escape(command)}</code>"),
        ("Data", escape(f"{first.task.name}; {results['data'].get('source', '')}")),
        ("Licence", escape(str(results["data"].get("licence", "")))),
        (
            "Training",
            f"{config.trainer.epochs} epochs, batches of {config.data.batch_size}, "
            f"{escape(config.optimizer.name)}, learning rate {config.optimizer.learning_rate:g}, "
            f"seed {config.seed}, precision {escape(config.trainer.precision)}",
        ),
        ("Machine", escape(results["device"])),
        ("Versions", escape(f"espformer {versions['espformer']}{revision}, torch "
                            f"{versions['torch']}, Python {versions['python']}")),
        ("Runs", "<br>".join(f"<code>{escape(str(run.directory))}</code>" for run in runs)),
    ]  # fmt: skip
    return "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in facts if text)
