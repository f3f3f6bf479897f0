"""What a run leaves behind: its directory, its description, its results, and who may write them."""

import contextlib
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
import yaml

import espformer
from espformer.lab.revision import command, revision
from espformer.lab.training.config import Run
from espformer.lab.training.errors import RunError
from espformer.lab.training.strict import plain

__all__ = [
    "alone_in",
    "changes",
    "check_same",
    "conditions",
    "device_name",
    "differences",
    "is_begun",
    "is_first_process",
    "only_one",
    "read_results",
    "run_directory",
]

# Where descriptions hold the arguments that were given, and no others.
_GIVEN = (("mechanism",), ("model",), ("data", "set"))
# Keys that may differ between two attempts at one run: they change who computes, not what.
_WHERE = (
    ("data", "workers"), ("data", "directory"), ("trainer", "accelerator"), ("trainer", "devices"),
    ("trainer", "strategy"), ("trainer", "checkpoint_minutes"), ("trainer", "compile"),
    ("trainer", "attention_statistics"), ("trainer", "cuda_graph"),
    ("trainer", "compare_throughput"),
)  # fmt: skip


def run_directory(output: Path, run: Run) -> Path:
    """Where a run keeps its files: recipe, setting, mechanism, seed."""
    return output / run.recipe / _slug(run.setting) / _slug(run.label) / f"seed-{run.seed}"


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._=%+-" else "-" for c in name)


def read_results(directory: Path) -> dict[str, Any] | None:
    """The results of a finished run, or None."""
    path = directory / "results.json"
    if not path.exists():
        return None
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise RunError(f"{path}: cannot be read ({error}); move it away to run again") from None
    if not isinstance(results, dict) or "scores" not in results:
        raise RunError(f"{path}: these are not the results of a run; move the file away")
    return results


def is_begun(directory: Path) -> bool:
    """Whether there is work of a run in a directory: a checkpoint, or results."""
    return (directory / "results.json").exists() or any(directory.glob("*.ckpt"))


def check_same(run: Run, directory: Path) -> None:
    """Refuse a directory that holds work of a run with other settings."""
    path = directory / "config.yaml"
    if not (path.exists() and is_begun(directory)):
        return
    try:
        there = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError):
        there = None
    if not isinstance(there, dict):
        raise RunError(f"{path}: cannot be read; move the directory away to begin this run again")
    changed = differences(plain(run), there)
    if changed:
        raise RunError(
            f"{directory}: holds a run with other settings: {changed}. Move the directory away, or "
            "choose another --output where the command has it (train, reproduce, finetune)"
        )


def differences(asked: dict[str, Any], there: dict[str, Any]) -> str:
    """What differs between two descriptions, in words; empty if nothing that matters does."""
    changed = [
        f"{key} is {theirs!r} there and {ours!r} here"
        for key, ours, theirs in changes(asked, there)
    ]
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return "; ".join(changed[:3]) + more


def changes(asked: dict[str, Any], there: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Key path, value asked for and value there of all that matters and differs.

    A switch that is off is the same as none, as in runs that are older than it; but not in
    arguments, of which only those are written down that were given.
    """
    ours, theirs = _flat(asked), _flat(there)

    def value(of: dict[tuple[str, ...], Any], key: tuple[str, ...]) -> Any:
        off = of.get(key) is False and not any(key[: len(part)] == part for part in _GIVEN)
        return None if off else of.get(key)

    return [
        (".".join(key), ours.get(key), theirs.get(key))
        for key in sorted({*ours, *theirs})
        if value(ours, key) != value(theirs, key) and key not in _WHERE
    ]


def _flat(value: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if not isinstance(value, dict) or not value:
        return {path: value}
    return {k: v for key, part in value.items() for k, v in _flat(part, (*path, key)).items()}


def is_first_process() -> bool:
    """Whether this process writes files and speaks to the user, of those that train together."""
    return (
        int(os.environ.get("LOCAL_RANK", "0")) == 0 and int(os.environ.get("NODE_RANK", "0")) == 0
    )


def conditions() -> dict[str, Any]:
    """The command and the versions behind a result."""
    return {
        "command": command(),
        "versions": {
            "espformer": espformer.__version__,
            "revision": revision(),
            "torch": torch.__version__,
            "lightning": lightning.__version__,
            "python": platform.python_version(),
        },
    }


def device_name(device: torch.device) -> str:
    """The processor or the card, as it calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"cpu ({_processor()}, {threads} thread{'' if threads == 1 else 's'})"


def _processor() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line for line in lines if line.startswith("model name"))
        return model.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Wait until no other process is in such a block with this directory, and keep others out."""
    try:
        import fcntl
    except ImportError:  # no such locks here: two processes on one file are the user's to avoid
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Hold a lock file for the length of the block; the system frees it when the process ends."""
    try:
        import fcntl
    except ImportError:  # no such locks here: two processes on one run are the user's to avoid
        yield
        return
    handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise RunError(f"{path.parent}: another process is working on this run") from None
    try:
        yield
    finally:
        os.close(handle)
