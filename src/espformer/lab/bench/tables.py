"""Tables for people (markdown), for programs (CSV), and the verdicts on the targets."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from espformer.lab.bench.cases import Measurement
from espformer.lab.bench.targets import NO_TARGET, TARGETS, Verdict, judge

COLUMNS = (
    "operator", "backend", "mode", "tokens", "heads", "width", "slices", "dtype", "milliseconds",
    "graph_milliseconds", "peak_mb", "error", "status",
)  # fmt: skip
VERDICT_COLUMNS = ("target", "measured", "as a CUDA graph", "required", "aim", "error", "verdict")


def cells(row: Measurement) -> list[str]:
    """Return one row of the table; numbers that there are none of are empty."""
    case = row.case
    slices = ""
    if case.operator.startswith("esp"):
        slices = f"{case.slice_count}" + (" learnt" if case.learnt else "")
    width = f"{case.width}" if case.qk_width is None else f"{case.width}, {case.qk_width} to sort"
    return [
        case.operator, case.backend, case.mode, str(case.tokens), str(case.heads), width,
        slices, case.dtype, _number(row.milliseconds, ".4g"),
        _number(row.graph_milliseconds, ".4g"), _number(row.peak_mb, ".1f"),
        _number(row.error, ".1e"), row.status,
    ]  # fmt: skip


def verdicts(rows: Sequence[Measurement]) -> list[Verdict]:
    """Return every target whose rows were measured."""
    found = {row.case: row for row in rows}
    return [
        judge(target, found) for target in TARGETS if all(case in found for case in target.cases)
    ]


def is_failure(rows: Sequence[Measurement]) -> bool:
    """Say whether a result is wrong, a row broke, or a target was missed."""
    broken = any(row.status.startswith(("FAILED", "error")) for row in rows)
    reached = ("met", NO_TARGET)
    return broken or any(not one.verdict.startswith(reached) for one in verdicts(rows))


def verdict_cells(verdict: Verdict) -> list[str]:
    target = verdict.target
    limit = "≥" if target.more_is_better else "≤"

    def amount(value: float, sign: str = "") -> str:
        if math.isnan(value):
            return ""
        if math.isinf(value):
            return "runs" if sign else "never"
        digits = f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:,.4g}"
        return f"{sign}{sign and ' '}{digits} {target.unit}"

    return [
        target.title, amount(verdict.value), amount(verdict.graph_value),
        amount(target.required, limit), amount(target.aim, limit),
        _number(verdict.error, ".1e"), verdict.verdict,
    ]  # fmt: skip


def file_stem(suite: str, device: torch.device) -> str:
    """Return a name such as ``targets-h200``, so that machines do not overwrite each other."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "")).strip("-")
    return f"{suite}-{slug}"


def write(
    stem: Path, title: str, rows: Sequence[Measurement], stated: Mapping[str, str]
) -> list[Path]:
    """Write ``stem.csv`` and ``stem.md``."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    table, markdown = stem.with_name(f"{stem.name}.csv"), stem.with_name(f"{stem.name}.md")
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(cells(row) for row in rows)
    lines = [f"# {title}", "", *(f"- {key}: {value}" for key, value in stated.items()), ""]
    judged = verdicts(rows)
    if judged:
        lines += [*markdown_table(VERDICT_COLUMNS, [verdict_cells(v) for v in judged]), ""]
    lines += markdown_table(COLUMNS, [cells(row) for row in rows])
    markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [table, markdown]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in markdown."""
    table = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(line)} |" for line in table]


def aligned_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table for a terminal, with aligned columns and one line for a row."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    table = (header, ["-" * width for width in widths], *rows)
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]


def _number(x: float, how: str) -> str:
    return "" if math.isnan(x) else format(x, how)
