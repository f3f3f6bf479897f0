"""Swap the attention of existing models: torch.nn, timm, transformers; export to ONNX.

Importing this package requires torch only; the other libraries are imported when they are needed.
"""

import importlib
from typing import TYPE_CHECKING

from espformer.integrations.calibration import Calibration, calibrate
from espformer.integrations.convert import convert, revert
from espformer.integrations.report import ConversionReport, ConversionRow, conversion_report

if TYPE_CHECKING:
    from espformer.integrations.onnx import export_onnx, export_program, onnx_difference
    from espformer.integrations.pretrained import load_pretrained

__all__ = [
    "Calibration",
    "ConversionReport",
    "ConversionRow",
    "calibrate",
    "conversion_report",
    "convert",
    "export_onnx",
    "export_program",
    "load_pretrained",
    "onnx_difference",
    "revert",
]

_LATER = {
    "export_onnx": "onnx",
    "export_program": "onnx",
    "load_pretrained": "pretrained",
    "onnx_difference": "onnx",
}


def __getattr__(name: str) -> object:
    """Import exports and loading on first use: the latter requires transformers."""
    if name in _LATER:
        return getattr(importlib.import_module(f"espformer.integrations.{_LATER[name]}"), name)
    raise AttributeError(f"module 'espformer.integrations' has no attribute {name!r}")


def __dir__() -> list[str]:
    """All public names, including those that are not imported yet."""
    return sorted(__all__)
