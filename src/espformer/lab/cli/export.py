"""`espformer export`: write a trained model as an ONNX file or a torch.export program."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from espformer.lab.cli.options import Checkpoint, Which


class Form(StrEnum):
    """The kind of file that is written."""

    onnx = "onnx"
    torch = "torch"


def export(
    source: Annotated[
        Path,
        typer.Argument(
            help="Directory or checkpoint of a run, or directory of a transformers model."
        ),
    ],
    to: Annotated[
        Path | None, typer.Option("--to", help="Output file; by default SOURCE/model.onnx or .pt2.")
    ] = None,
    form: Annotated[
        Form, typer.Option("--format", "-f", help="onnx, or torch for torch.export.")
    ] = Form.onnx,
    soft: Annotated[
        bool,
        typer.Option("--soft", help="Keep the soft sort, in dense form; for short sequences."),
    ] = False,
    tolerance: Annotated[
        float, typer.Option(help="Largest accepted difference from the model's outputs.")
    ] = 1e-4,
    checkpoint: Checkpoint = Which.last,
) -> None:
    """Export a model for any batch size and length, and verify the file.

    By default ESP attention is hardened, which leaves sorts and gathers that every runtime
    supports. The outputs of the file are compared with the model's on random inputs of several
    sizes; too large a difference is an error.

    Examples:

      espformer export runs/digits/default/espformer-default/seed-0

      espformer export runs/finetune-NAME-tweeteval/lr-0.0001/esp/seed-0

      espformer export bert-with-esp --format torch
    """
    from espformer.lab.exporting import export_model, open_model

    if to is None:
        folder = source if source.is_dir() else source.parent
        to = folder / ("model.onnx" if form is Form.onnx else "model.pt2")
    opened = open_model(source, checkpoint.value)
    difference = export_model(opened, to, form.value, soft=soft, tolerance=tolerance)
    inputs = ", ".join(f"{name} {tuple(x.shape)}" for name, x in opened.example(2, 12).items())
    print(f"{to}: {to.stat().st_size / 2**20:.1f} MB; inputs such as {inputs}")
    print(f"largest difference from the model: {difference:.1e}")
