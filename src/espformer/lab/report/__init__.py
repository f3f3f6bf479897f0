"""A page about trained models: one HTML file with curves, attention maps, plans and slices."""

from espformer.lab.report.page import write_page

__all__ = ["write_page"]
