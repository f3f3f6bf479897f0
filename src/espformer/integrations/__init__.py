"""Mechanisms inside models that were written without them: torch.nn, timm, transformers, ONNX.

Importing this package needs torch alone; a model of another library brings that library with it.
"""

from espformer.integrations.convert import convert, revert
from espformer.integrations.report import ConversionReport, ConversionRow, conversion_report

__all__ = ["ConversionReport", "ConversionRow", "conversion_report", "convert", "revert"]
