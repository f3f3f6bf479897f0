"""Hard ESP attention as an ONNX file, beside torch and softmax: ``python -m benchmarks.onnx``.

An encoder of the shape of all-MiniLM-L6-v2 (6 layers, width 384, 12 heads), one sequence at a time.
The same file serves all lengths.

A hard sort is discontinuous where two tokens are nearly tied. With thousands of pairs per layer
some always are, and different rounding, in float64 or in another runtime, orders them differently.
So the file must meet two criteria. Attention by itself gives the same numbers for the same queries
and keys. The whole model differs from torch by no more than torch in float32 differs from float64.
"""

from __future__ import annotations

import copy
import csv
import logging
import sys
import tempfile
from dataclasses import astuple, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import espformer
from benchmarks.arguments import make_parser
from benchmarks.measure import RESULTS, Company, conditions
from espformer.integrations.onnx import export_onnx, onnx_difference
from espformer.lab.clock import interleaved_seconds
from espformer.nn import ESP, Softmax

TOLERANCE = 1e-4
LENGTHS = (128, 512, 2048)


@dataclass(frozen=True)
class Row:
    """One attention at one length."""

    attention: str
    tokens: int
    torch_ms: float
    onnx_ms: float
    torch_over_onnx: float
    over_softmax_onnx: float
    operator: float
    model: float
    rounding: float

    @property
    def right(self) -> bool:
        return self.operator <= TOLERANCE and self.model <= 2 * self.rounding + TOLERANCE

    def cells(self) -> list[str]:
        return [
            self.attention, str(self.tokens), f"{self.torch_ms:.1f}", f"{self.onnx_ms:.1f}",
            f"{self.torch_over_onnx:.2f}×", f"{self.over_softmax_onnx:.2f}×",
            f"{self.operator:.0e}", f"{self.model:.0e}", f"{self.rounding:.0e}",
            "ok" if self.right else "FAILED",
        ]  # fmt: skip


HEADER = [
    "attention", "tokens", "torch, ms", "ONNX, ms", "torch / ONNX", "ONNX / softmax ONNX",
    "attention alone, off", "model off", "float32 off float64", "verdict",
]  # fmt: skip


def make_model(attention: str) -> nn.Module:
    """A BERT of MiniLM's shape with random weights, which do not change the time."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536,
        max_position_embeddings=max(LENGTHS), vocab_size=1000,
    )  # fmt: skip
    model = BertModel(config, add_pooling_layer=False).eval()
    return espformer.convert(model, ESP(hard=True)) if attention == "hard ESP" else model


def inputs(batch: int, tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, (batch, tokens), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Alone(nn.Module):
    """An attention by itself."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        self.mechanism = ESP(hard=True) if attention == "hard ESP" else Softmax()

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output: Tensor = self.mechanism(query, key, value)
        return output


def heads(batch: int, tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    names = ("query", "key", "value")
    return {name: torch.randn(batch, 12, tokens, 32, generator=generator) for name in names}


def off(found: Tensor, wanted: Tensor) -> float:
    """Root mean square of the difference, relative to that of the expected values."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def session_of(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def measure(folder: Path, repeats: int) -> list[Row]:
    names = ("softmax", "hard ESP")
    models = {name: make_model(name) for name in names}
    alone = {name: Alone(name) for name in names}
    files = {name: folder / f"{name.replace(' ', '-')}.onnx" for name in names}
    parts = {name: folder / f"{name.replace(' ', '-')}-alone.onnx" for name in names}
    varies = torch.export.Dim.DYNAMIC
    shapes = {name: {0: varies, 2: varies} for name in ("query", "key", "value")}
    for name in names:
        print(f"exporting {name}", file=sys.stderr)
        export_onnx(models[name], inputs(2, 16), files[name], tolerance=None)
        export_onnx(alone[name], heads(2, 16), parts[name], dynamic_shapes=shapes)
    rows = []
    for tokens in LENGTHS:
        given = inputs(1, tokens)
        feeds = {name: x.numpy() for name, x in given.items()}
        sessions = {name: session_of(path) for name, path in files.items()}
        errors = {}
        with torch.inference_mode():
            for name in names:
                states = models[name](**given)[0]
                exact = copy.deepcopy(models[name]).double()(**given)[0]
                found = torch.from_numpy(sessions[name].run(None, feeds)[0])
                operator = onnx_difference(alone[name], heads(1, tokens), parts[name])
                errors[name] = (operator, off(found, states), off(states, exact))
            runs = [partial(models[name], **given) for name in names]
            runs += [partial(sessions[name].run, None, feeds) for name in names]
            times = interleaved_seconds(runs, repeats, warm_up=2)
        in_torch, in_onnx = (dict(zip(names, part, strict=True)) for part in (times[:2], times[2:]))
        for name in names:
            rows.append(
                Row(
                    name, tokens, 1e3 * in_torch[name], 1e3 * in_onnx[name],
                    in_torch[name] / in_onnx[name], in_onnx[name] / in_onnx["softmax"],
                    *errors[name],
                )
            )  # fmt: skip
            print("  ".join(rows[-1].cells()), file=sys.stderr)
    return rows


def write(rows: list[Row], stated: dict[str, str]) -> list[Path]:
    RESULTS.mkdir(exist_ok=True)
    lines = ["# Hard ESP attention as an ONNX file", ""]
    lines += [f"- {key}: {value}" for key, value in stated.items()]
    lines += ["", f"| {' | '.join(HEADER)} |", f"|{'---|' * len(HEADER)}"]
    lines += [f"| {' | '.join(row.cells())} |" for row in rows]
    markdown, table = RESULTS / "onnx.md", RESULTS / "onnx.csv"
    markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*(field.name for field in fields(Row)), *stated])
        writer.writerows([*astuple(row), *stated.values()] for row in rows)
    return [markdown, table]


def main() -> int:
    import onnxruntime

    parser = make_parser("onnx", __doc__)
    parser.add_argument("--repeats", type=int, default=11, help="times are medians of this many")
    parser.add_argument("--no-save", action="store_true", help="print, and write no results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    company = Company()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), options.repeats)
    stated = conditions(
        "benchmarks.onnx",
        onnxruntime=onnxruntime.__version__,
        dtype="float32",
        shapes="batch 1, N tokens, 6 layers, width 384, 12 heads of width 32, 32 axis slices",
        seeds="0",
        company=company,
        repeats=f"medians of {options.repeats}, the four in turn, after two that do not count",
        errors="attention alone: largest difference of the file from torch, for the same queries "
        "and keys; model and float32: relative root mean square difference of hidden states",
    )
    for line in [HEADER, *(row.cells() for row in rows)]:
        print("  ".join(cell.ljust(20) for cell in line))
    if not options.no_save:
        for path in write(rows, stated):
            print(f"written: {path}")
    return 1 if not all(row.right for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
