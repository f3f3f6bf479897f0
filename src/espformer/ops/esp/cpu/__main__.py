"""Compiles the kernels that most calls need, ahead of time: ``python -m espformer.ops.esp.cpu``.

They are compiled at their first call otherwise, for some seconds each, and kept on disk either way.
"""

from __future__ import annotations

import argparse
import time

import torch

from espformer.ops.esp import cpu
from espformer.ops.esp.options import ESPOptions
from espformer.ops.esp.problem import Problem


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m espformer.ops.esp.cpu", description=__doc__)
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    options = parser.parse_args()
    dtype, start = getattr(torch, options.dtype), time.perf_counter()
    for metric in ("absolute", "squared"):
        chosen = ESPOptions(metric=metric, inverse_temperature=0.1, scale=1.0)
        for width in (16, 32):
            tokens = torch.randn(3, 1, 8, width, dtype=dtype, requires_grad=True)
            query, key, value = tokens.unbind()
            cpu.attend(Problem(query, key, chosen), value).sum().backward()
    seconds = time.perf_counter() - start
    print(f"kernels for {options.dtype} on this CPU are ready, after {seconds:.0f} s")


if __name__ == "__main__":
    main()
