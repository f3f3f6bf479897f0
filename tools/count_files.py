"""Count the files that a recipe and an operator call pass through, and the lines of each package.

    python tools/count_files.py              # files of three tasks, and lines
    python tools/count_files.py --lines REV  # lines by package in a commit, and now

The files are traced: a small task is performed, and every file of the package in which a function
is called is listed, in the order of the first calls.

- recipe: from the YAML file of `digits` to a line of RESULTS.md. One run is trained for a step and
  written as `espformer reproduce --save` and `espformer results` write it. Files of the laboratory
  are counted; the library's, which compute the model, are listed below them.
- linear: the forward of ESP attention in torch, from `espformer.esp_attention` on.
- triton: the same forward in the kernels, run by Triton's interpreter where there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "espformer"
LIMITS = {"recipe": 25, "linear": 8, "triton": 10}


@contextlib.contextmanager
def traced() -> Iterator[list[Path]]:
    """Yield a list that fills with the package's files as functions in them are called."""
    seen: dict[str, Path | None] = {}
    found: list[Path] = []

    def look(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name not in seen and not _importing(frame):
            path = Path(name)
            inside = path.is_relative_to(PACKAGE)
            seen[name] = path.relative_to(PACKAGE) if inside else None
            if inside:
                found.append(path.relative_to(PACKAGE))

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _importing(frame: FrameType | None) -> bool:
    """Say whether a module is being imported: its own lines, bodies of classes, what they call."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def files_of_a_recipe() -> list[Path]:
    """Train one run of a recipe for a step, keep its results, and write RESULTS.md of them."""
    from espformer.lab.recipes.recipe import load_recipe
    from espformer.lab.results.page import results_page
    from espformer.lab.results.result_files import write_report
    from espformer.lab.training.run_directory import run_directory
    from espformer.lab.training.trainer import execute

    short = ["trainer.epochs=1", "trainer.limit_batches=1", "trainer.accelerator=cpu"]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        runs, kept = Path(folder, "runs"), Path(folder, "results")
        with traced() as found:
            recipe = load_recipe("digits")
            run = recipe.run("espformer", overrides=short)
            execute(run, run_directory(runs, run), output=runs, progress=False)
            write_report(recipe, runs, kept)
            page = results_page(kept)
    assert "| ESP (`espformer`) | 1 |" in page
    return found


def files_of_a_call(backend: str) -> list[Path]:
    """Compute ESP attention of a few tokens once, after a first call that prepares."""
    import torch

    import espformer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(1, 2, 16, 16, device=device) for _ in range(3))
    espformer.esp_attention(q, k, v, backend=backend)
    with traced() as found:
        espformer.esp_attention(q, k, v, backend=backend)
    return found


def lines_by_package(files: Callable[[], Iterator[tuple[str, int]]]) -> Counter[str]:
    """Add up lines of Python by package: `ops/esp`, `nn`, `lab/training` and so on."""
    lines: Counter[str] = Counter()
    for name, count in files():
        parts = Path(name).parts[:-1]
        deep = parts[:1] in (("ops",), ("lab",))
        lines["/".join(parts[: 2 if deep else 1]) or "espformer"] += count
    return lines


def files_now() -> Iterator[tuple[str, int]]:
    for path in PACKAGE.rglob("*.py"):
        yield str(path.relative_to(PACKAGE)), len(path.read_text("utf-8").splitlines())


def files_at(revision: str) -> Iterator[tuple[str, int]]:
    names = _git("ls-tree", "-r", "--name-only", revision, "src/espformer").splitlines()
    for name in names:
        if name.endswith(".py"):
            lines = len(_git("show", f"{revision}:{name}").splitlines())
            yield str(Path(name).relative_to("src/espformer")), lines


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--lines", metavar="REV", help="only lines: of this commit, and now")
    options = parser.parse_args()
    now = lines_by_package(files_now)
    if options.lines:
        then = lines_by_package(lambda: files_at(options.lines))
        for name in sorted({*then, *now}):
            print(f"{name:<20} {then[name]:>7,} → {now[name]:>7,}")
        print(f"{'all':<20} {then.total():>7,} → {now.total():>7,}")
        return 0
    good = True
    tasks = {
        "recipe": files_of_a_recipe,
        **{b: lambda b=b: files_of_a_call(b) for b in ("linear", "triton")},
    }
    for name, task in tasks.items():
        found = task()
        counted = [path for path in found if name != "recipe" or path.parts[0] == "lab"]
        good = good and len(counted) <= LIMITS[name]
        print(f"{name}: {len(counted)} files (at most {LIMITS[name]})")
        print(*(f"  {path}" for path in counted), sep="\n")
        rest = [path for path in found if path not in counted]
        if rest:
            print(f"  and {len(rest)} of the library: {', '.join(map(str, rest))}")
        print()
    print("lines of Python by package")
    for name, count in sorted(now.items()):
        print(f"  {name:<20} {count:>7,}")
    print(f"  {'all':<20} {now.total():>7,}")
    return 0 if good else 1


class _Raw(argparse.RawDescriptionHelpFormatter):
    """The description as it is written above."""


if __name__ == "__main__":
    # Before anything imports Triton: kernels are interpreted or compiled from their definition on.
    os.environ.setdefault("TRITON_INTERPRET", "" if Path("/dev/nvidia0").exists() else "1")
    sys.path.insert(0, str(ROOT / "src"))
    sys.exit(main())
