"""One file of HTML that needs nothing else: assembled from template, style, script and runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from espformer.lab.errors import RunError
from espformer.lab.files import refuse_directory, write_atomically
from espformer.lab.report import sections, svg
from espformer.lab.report.content import attention_content, softness_content
from espformer.lab.report.inspection import Trained
from espformer.lab.report.summary import NOTE, Summary, summarise

# Colours that can be told apart.
MOST_RUNS = 8
_COUNTS = ("", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight")

_SOFTNESS = """\
<section id="softness">
<h2>From soft to hard</h2>
<p>Train soft, then let the sort temperature t fall: move the slider. The weights stay as they \
are, only t changes, and the accuracy is that of the whole model on {count:,} test examples.\
{dashed}</p>
<div class="picker" id="soft-runs" role="radiogroup" aria-label="Model"></div>
<div class="soft">
<div class="control">
<div class="slider"><label for="slider">Sort temperature</label>
<input type="range" id="slider" min="0" max="1" step="1" value="0">
<div class="ends"><span>soft</span><span>hard</span></div></div>
<dl class="reading"><div><dt>t</dt><dd id="reading-t"></dd></div>\
<div><dt>accuracy</dt><dd id="reading-accuracy"></dd></div>\
<div><dt>rows ±</dt><dd id="reading-rows"></dd></div>\
<div><dt>columns ±</dt><dd id="reading-columns"></dd></div></dl>
</div>
<div id="soft-maps"></div>
<figure><figcaption>Test accuracy, %</figcaption>\
<svg id="soft-chart" class="chart" role="img"></svg></figure>
</div>
</section>"""

_SLICES = """\
<section id="slices">
<h2>Slice weights σ</h2>
<p>Each slice sorts queries and keys along one direction; σ = softmax(−τD) favours the slices \
whose plan is cheap. Dashed: all alike. On the first input above.</p>
<div class="slices">{slices}</div>
</section>"""


def write_page(
    runs: Sequence[Trained],
    path: Path,
    *,
    command: str,
    title: str | None = None,
    examples: Sequence[int] | None = None,
) -> Path:
    """Write the page of some runs.

    Args:
        runs: runs on the same data, opened by :func:`espformer.lab.report.inspection.open_run`.
        path: the file to write.
        command: what made it, for its last section.
        title: of the page; made of the data set unless given.
        examples: places in the test data of the inputs to show; by default the first six.
    """
    refuse_directory(path, "report.html")
    page = make_page(runs, command=command, title=title, examples=examples)
    try:
        write_atomically(path, page)
    except OSError as error:
        raise RunError(f"{path}: the page could not be written ({error.strerror})") from None
    return path


def make_page(
    runs: Sequence[Trained],
    *,
    command: str,
    title: str | None = None,
    examples: Sequence[int] | None = None,
) -> str:
    """Return the page as text."""
    if not 1 <= len(runs) <= MOST_RUNS:
        raise RunError(f"a page shows 1 to {MOST_RUNS} runs, got {len(runs)}")
    size = len(runs[0].task.test)  # type: ignore[arg-type]
    shown = range(min(size, 6)) if examples is None else examples
    missing = [str(index) for index in shown if not 0 <= index < size]
    if missing or not shown:
        raise RunError(f"no test example {', '.join(missing)}: they are 0 to {size - 1}")
    summaries = [summarise(run) for run in runs]
    curves, charts = sections.curves(runs)
    attention = attention_content(runs, shown)
    softness, scored = softness_content(runs, shown[0])
    sorts = bool(softness)
    data = {"attention": attention, "softness": softness, "charts": charts, "frame": svg.frame()}
    budgets = {(run.results["steps"], run.run.data.batch_size, str(run.run.model)) for run in runs}
    same = "Every attention had the same model around it and the same number of steps. "
    dashed = " Dashed lines are models that were fine-tuned while t fell."
    dashed = dashed if any(run.annealed for run in runs) else ""
    title = title or f"Attention on {runs[0].task.name}"
    parts = {
        "title": escape(title),
        "lead": escape(_lead(runs, summaries)),
        "nav": _navigation(sorts),
        "table": sections.table(summaries),
        "table_note": NOTE,
        "training": same if len(runs) > 1 and len(budgets) == 1 else "",
        "legend": sections.legend(runs),
        "curves": curves,
        "negative": ", negative weights in the other colour" if attention["negative"] else "",
        "softness": _SOFTNESS.format(count=scored, dashed=dashed) if sorts else "",
        "slices": _SLICES.format(slices=sections.slices(runs, shown[0])) if sorts else "",
        "plans": sections.plans(),
        "conditions": sections.conditions(runs, command),
        "data": _json(data),
        "css": _resource("page.css"),
        "js": _resource("page.js"),
    }
    page = _resource("template.html")
    for name, text in parts.items():
        page = page.replace("{{" + name + "}}", text)
    return page


def _lead(runs: Sequence[Trained], rows: Sequence[Summary]) -> str:
    """Tell what was done and the first thing to see, in two or three sentences."""
    epochs = runs[0].run.trainer.epochs
    count = "One model" if len(rows) == 1 else f"{_COUNTS[len(rows)]} models"
    text = f"{count} on {runs[0].task.name}, {epochs} epochs"
    text += " each" if len(rows) > 1 else ""
    more = {run.annealed.run.trainer.epochs for run in runs if run.annealed is not None}
    text += f", and {max(more)} more while t fell." if more else "."
    worst = max(rows, key=lambda row: row.columns)
    exact = [row for row in rows if row.hard is not None]
    if worst.columns > 0.5:
        text += (
            f" With {worst.name} attention ({worst.soft:.1f} % accurate) one key can receive "
            f"{1 + worst.columns:.1f} times its share."
        )
    if exact:
        best = max(exact, key=lambda row: row.hard or 0.0)
        text += (
            f" {best.name}, sorted exactly ({best.hard:.1f} %), gives every key its share and no "
            "more."
        )
    return text


def _navigation(sorts: bool) -> str:
    links = {"scores": "Scores", "training": "Training", "attention": "Attention"}
    if sorts:
        links |= {"softness": "Soft to hard", "slices": "Slices"}
    links |= {"plans": "Plans", "made": "How it was made"}
    return "".join(f'<a href="#{name}">{text}</a>' for name, text in links.items())


def _json(data: dict[str, Any]) -> str:
    """Write JSON without `</`, which would end the script element that it stands in."""
    return json.dumps(data, separators=(",", ":")).replace("</", "<\\/")


def _resource(name: str) -> str:
    return (resources.files("espformer.lab.report") / name).read_text(encoding="utf-8").strip()
