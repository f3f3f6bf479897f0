"""Numbers of a page: what its script draws, taken from trained runs and made small."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from espformer.lab.errors import RunError
from espformer.lab.plots.clouds import sum_errors
from espformer.lab.report.inspection import Example, Frame, Trained
from espformer.lab.report.summary import heading_of, short

# Sort temperatures of the slider, softest first; the trained one is put among them.
SWEEP = tuple(10 ** (-half / 2) for half in range(11))
# Larger matrices are shown as means of blocks, and more heads than these are left out.
MOST_CELLS, MOST_HEADS = 96, 4


def attention_content(runs: Sequence[Trained], examples: Sequence[int]) -> dict[str, Any]:
    """Attention of every run on the same examples; runs that sort also hard, where they have been.

    All runs must have learnt from the same data: an example is told by its place in the test set.
    """
    sets = {str(run.run.data.set) for run in runs}
    if len(sets) > 1:
        raise RunError(
            f"the runs learnt from different data ({', '.join(sorted(sets))}): "
            "attention is compared on the same input, so make a page for each"
        )
    states: list[tuple[str, Trained]] = []
    colours: list[int] = []
    for colour, run in enumerate(runs):
        states.append((heading_of(run.label), run))
        last = run.annealed or run
        if "hard" in last.results["scores"]:
            states.append((f"{heading_of(run.label)}, hard", last.hardened()))
        colours += [colour] * (len(states) - len(colours))
    shown = [runs[0].example(index) for index in examples]
    maps = [[_heads(state.matrices(example)[-1]) for _, state in states] for example in shown]
    matrices = [matrix for row in maps for heads in row for matrix in heads]
    negative = any(float(matrix["cells"].min()) < -1e-6 for matrix in matrices)
    peak = _encode(matrices)
    tokens = states[0][1].matrices(shown[0])[-1].shape[-1]
    return {
        "states": [name for name, _ in states],
        "colours": colours,
        "tokens": tokens,
        "side": _side(tokens) if shown[0].picture is not None else None,
        "examples": [_described(example) for example in shown],
        "maps": maps,
        "peak": peak,
        "negative": negative,
    }


def _heads(matrices: Tensor) -> list[dict[str, Any]]:
    """Describe the matrix of each head; equal ones in a row (differential heads) are one."""
    groups: list[list[int]] = []
    for head, matrix in enumerate(matrices):
        if groups and torch.equal(matrices[groups[-1][0]], matrix):
            groups[-1].append(head)
        else:
            groups.append([head])
    return [
        _matrix(matrices[group[0]])
        | {"head": f"head {group[0] + 1}" if len(group) == 1 else
           f"heads {group[0] + 1} and {group[-1] + 1}"}
        for group in groups[:MOST_HEADS]
    ]  # fmt: skip


def softness_content(runs: Sequence[Trained], index: int) -> tuple[list[dict[str, Any]], int]:
    """Runs that sort, and their annealing, at every temperature of the slider, on one example.

    Also the number of test examples that their accuracies are of, the same for all.
    """
    found = []
    states = [
        (colour, heading_of(run.label) + ending, state)
        for colour, run in enumerate(runs)
        for ending, state in (("", run), (", annealed", run.annealed))
        if run.sorts and state is not None
    ]
    sweeps = len(states) * (len(SWEEP) + 2)
    count = min((run.affordable(sweeps) for _, _, run in states), default=0)
    for colour, name, run in states:
        trained_at = math.exp(sum(map(math.log, run.temperatures)) / len(run.temperatures))
        sweep = sorted({*SWEEP, trained_at}, reverse=True)
        frames = [_frame(frame) for frame in run.frames(run.example(index), sweep, count)]
        peak = _encode([matrix for frame in frames for matrix in frame["maps"]])
        found.append(
            {
                "name": name,
                "colour": colour,
                "frames": frames,
                "trained": sweep.index(trained_at),
                "peak": peak,
            }
        )
    return found, count


def _frame(frame: Frame) -> dict[str, Any]:
    rows, columns = sum_errors(frame.matrices)
    return {
        "t": describe_temperature(frame.temperature),
        "accuracy": round(frame.accuracy, 2),
        "rows": short(rows),
        "columns": short(columns),
        "columns_off": columns,
        "maps": _heads(frame.matrices),
    }


def describe_temperature(temperature: float | None) -> str:
    """``t = 0.1``, ``t = 3e-04`` or ``hard``."""
    if temperature is None:
        return "hard"
    return f"t = {temperature:.2g}" if temperature >= 9.5e-4 else f"t = {temperature:.0e}"


def _matrix(matrix: Tensor) -> dict[str, Any]:
    """A head's matrix, its sums, and its peak; the cells are encoded once all peaks are known."""
    rows, columns = sum_errors(matrix)
    return {
        "cells": _blocks(matrix),
        "rows": [round(value, 3) for value in _thin(matrix.sum(-1))],
        "columns": [round(value, 3) for value in _thin(matrix.sum(-2))],
        "off": [short(rows), short(columns)],
        "peak": float(matrix.abs().max()),
    }


def _encode(matrices: Sequence[dict[str, Any]]) -> float:
    """Encode each cell in a byte: the root of its weight, with zero at 128.

    Returns the peak of all of them, to which weights are relative.
    """
    peak = max(matrix.pop("peak") for matrix in matrices)
    for matrix in matrices:
        cells = matrix.pop("cells")
        root = (cells.abs() / max(peak, 1e-12)).clamp(max=1).sqrt() * cells.sign()
        values = (128 + 127 * root).round().to(torch.uint8)
        matrix["shape"] = list(cells.shape)
        matrix["bytes"] = base64.b64encode(bytes(values.flatten().tolist())).decode()
    return float(peak)


def _blocks(matrix: Tensor) -> Tensor:
    """Reduce to at most :data:`MOST_CELLS` rows and columns, by means over blocks."""
    if max(matrix.shape) <= MOST_CELLS:
        return matrix
    height, width = (min(size, MOST_CELLS) for size in matrix.shape)
    return torch.nn.functional.adaptive_avg_pool2d(matrix[None], (height, width))[0]


def _thin(sums: Tensor) -> list[float]:
    if len(sums) <= MOST_CELLS:
        return [float(value) for value in sums]
    pooled = torch.nn.functional.adaptive_avg_pool1d(sums[None], MOST_CELLS)[0]
    return [float(value) for value in pooled]


def _side(tokens: int) -> int | None:
    """Patches along an edge of the image, also when there is a token for the class beside them."""
    sides = (math.isqrt(tokens), math.isqrt(tokens - 1))
    return next((side for side in sides if side**2 in (tokens, tokens - 1)), None)


def _described(example: Example) -> dict[str, Any]:
    described: dict[str, Any] = {"name": example.name}
    if example.picture is not None:
        described["picture"] = _png(example.picture)
    elif example.text is not None:
        described["text"] = example.text[:300]
    return described


def _png(picture: Tensor) -> str:
    grey = (255 * picture).round().to(torch.uint8)
    buffer = io.BytesIO()
    Image.fromarray(grey.numpy()).save(buffer, "png", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
