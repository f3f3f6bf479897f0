"""Compare operators with dense formulas in float64 on many drawn problems.

    python tools/draw_problems.py --count 2000 --seed 1

The properties are those of the tests, which draw the same few hundred problems each time: any
lengths, padding, ties, metrics, balances, couplings, temperatures and kinds of numbers; outputs and
every gradient. Here each gets its share of `count`, and other problems for every seed. The first
one that fails is made as small as it can be, printed, and ends the search.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Files, and their shares of the count.
PROPERTIES = (
    ("functional/test_linear_is_dense.py", 0.35),
    ("ops/esp/cpu/test_attention.py", 0.35),
    ("sorting/test_against_dense.py", 0.15),
    ("ops/esp/test_sorted_kernel.py", 0.15),
)


def properties(path: Path) -> dict[str, Any]:
    """The tests of a file that draw their problems, by name."""
    import hypothesis

    name = f"drawn_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return {
        name: test
        for name, test in vars(module).items()
        if name.startswith("test_") and hypothesis.is_hypothesis_test(test)
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=2000, help="problems in all (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which problems (%(default)s)")
    options = parser.parse_args()

    import hypothesis
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    settings = hypothesis.settings(
        deadline=None,
        database=None,
        derandomize=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    total = 0
    for file, share in PROPERTIES:
        found = properties(ROOT / "tests" / file)
        if not found:
            raise SystemExit(f"tests/{file}: draws no problems; mend PROPERTIES")
        for name, test in found.items():
            count, began = round(share * options.count / len(found)), time.monotonic()
            # The tests have settings of their own, which the decorator refuses to replace.
            test._hypothesis_internal_use_settings = hypothesis.settings(
                settings, max_examples=count
            )
            hypothesis.seed(options.seed)(test)()
            seconds = time.monotonic() - began
            print(f"{file}::{name}: {count:,} problems, {seconds:.0f} s", flush=True)
            total += count
    print(f"{total:,} problems, seed {options.seed}: all agree")
    return 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    sys.exit(main())
