"""``python -m espformer.lab.bench``: the command ``espformer bench`` where there is only torch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from espformer.lab.bench.session import run


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m espformer.lab.bench",
        description="Time attentions on this machine; a row whose result is wrong has no time.",
        epilog="Example: python -m espformer.lab.bench targets paper long",
    )
    parser.add_argument("suites", nargs="*", help="quick, defaults, targets, paper, long or peers")
    for name in ("device", "dtype", "tokens", "operators", "backends", "modes"):
        parser.add_argument(f"--{name}", default="auto" if name == "device" else None)
    for name in ("heads", "width"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--shrink", type=int, default=1, help="divide tokens and heads by this")
    parser.add_argument("--row-seconds", type=float, default=3.0)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--no-save", dest="save", action="store_false")
    options = vars(parser.parse_args())
    if not options.pop("save"):
        options["output"] = None
    try:
        good = run(
            options.pop("suites"), **options, program=["python", "-m", "espformer.lab.bench"]
        )
    except ValueError as error:
        parser.error(str(error))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
