"""Compiles the kernels that most calls need, ahead of time: ``python -m espformer.ops.esp.cpu``.

Otherwise each is compiled at its first call, which takes some seconds. Both ways, the result is
cached on disk.
"""

from __future__ import annotations

import argparse
import itertools
import time

import torch

from espformer.ops.esp import cpu
from espformer.ops.esp.cpu.operators import MANY
from espformer.ops.esp.options import ESPOptions
from espformer.ops.esp.problem import Problem

METRICS = ("absolute", "squared")
DTYPES, WIDTHS = ("float32", "float64"), (16, 32)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m espformer.ops.esp.cpu", description=__doc__)
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--metric", nargs="+", choices=METRICS, default=METRICS)
    parser.add_argument(
        "--width", type=int, nargs="+", default=WIDTHS, metavar="COLUMNS",
        help="of queries and values; kernels are made for up to 16 and for more (default: 16 32)",
    )  # fmt: skip
    options = parser.parse_args()
    dtype, start = getattr(torch, options.dtype), time.perf_counter()
    lengths = 8, 1 + MANY  # short sequences have kernels of their own
    for metric, width, length in itertools.product(options.metric, options.width, lengths):
        chosen = ESPOptions(metric=metric, inverse_temperature=0.1, scale=1.0)
        tokens = torch.randn(3, 1, length, width, dtype=dtype, requires_grad=True)
        query, key, value = tokens.unbind()
        cpu.attend(Problem(query, key, chosen), value).sum().backward()
    seconds = time.perf_counter() - start
    print(f"kernels for {options.dtype} on this CPU are ready, after {seconds:.0f} s")


if __name__ == "__main__":
    main()
