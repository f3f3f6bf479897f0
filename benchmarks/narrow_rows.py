"""Ways to compute many narrow heads, side by side: ``python -m benchmarks.narrow_rows``.

Narrow rows are computed in registers (`short_plan.py`) or in chunks (`soft_plan.py`), and
normalisers of short slices in registers (`short_columns.py`) or by scans.
"""

from __future__ import annotations

from benchmarks.ways import Ways, compare

SIZES = (  # tokens, heads, width
    (197, 4096, 8), (197, 8192, 4), (50, 4096, 8), (197, 512, 8), (197, 128, 8), (256, 2048, 8),
    (197, 1024, 16),
)  # fmt: skip
NEVER = 1 << 60  # more slices than there are


def from_slices(least: int, least_of_columns: int) -> None:
    """The least slices that are computed in registers, and whose columns are."""
    from espformer.ops.esp.triton import short_columns, short_plan

    short_plan.LEAST_PAIRS, short_columns.LEAST_PAIRS = least, least_of_columns


WAYS: Ways = {
    "registers": lambda: from_slices(1, 1),
    "registers, columns by scans": lambda: from_slices(1, NEVER),
    "chunks": lambda: from_slices(NEVER, 1),
    "chunks, columns by scans": lambda: from_slices(NEVER, NEVER),
}

if __name__ == "__main__":
    compare("narrow_rows", __doc__, SIZES, WAYS, "bfloat16")
