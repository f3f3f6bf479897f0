"""Mechanisms inside models that were written without them: torch.nn, timm, transformers, ONNX.

Importing this package needs torch alone; a model of another library brings that library with it.
"""

from espformer.integrations.calibration import Calibration, calibrate
from espformer.integrations.convert import convert, revert
from espformer.integrations.report import ConversionReport, ConversionRow, conversion_report

__all__ = [
    "Calibration",
    "ConversionReport",
    "ConversionRow",
    "calibrate",
    "conversion_report",
    "convert",
    "revert",
]
