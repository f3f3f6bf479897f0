"""Ways to compute float32 rows, side by side: ``python -m benchmarks.float32_rows``.

Recurrences along the ranks (`cuda/recurrences.py`), or chunks (`triton/soft_plan.py`), whose
products take three parts in TF32.
"""

from __future__ import annotations

from benchmarks.ways import Ways, compare

SIZES = (  # tokens, heads, width
    (197, 512, 64), (128, 384, 32), (1024, 64, 64), (2048, 16, 64), (197, 4096, 8),
)  # fmt: skip


def with_warps(most: int) -> None:
    """The most warps of a block of recurrences; without any, chunks are left."""
    from espformer.ops.esp.cuda import recurrences

    recurrences.MOST_WARPS = most


WAYS: Ways = {"recurrences": lambda: with_warps(16), "chunks": lambda: with_warps(0)}

if __name__ == "__main__":
    compare("float32_rows", __doc__, SIZES, WAYS, "float32")
