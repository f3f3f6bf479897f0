"""The table of poles of a metric, as kernels take it."""

from __future__ import annotations

from typing import Any

import torch

from espformer.ops.esp.cpu import absolute


def table(metric: str, dtype: torch.dtype) -> Any:
    """Its type says which metric it is."""
    return absolute.Table(1.0)
