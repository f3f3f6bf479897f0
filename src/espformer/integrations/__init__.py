"""Swap the attention of existing models: torch.nn, timm, transformers; export to ONNX.

Importing this package requires torch only; the other libraries are imported when they are needed.
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
