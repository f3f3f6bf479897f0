"""The conditions behind a number: the command, the commit, the versions, the processor."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import espformer

_COMMAND = "ESPFORMER_COMMAND"


def remember_command(arguments: Sequence[str]) -> None:
    """Keep what the user typed, for the results of this process and of those that it starts."""
    os.environ.setdefault(_COMMAND, shlex.join(["espformer", *arguments]))


def revision() -> str | None:
    """Return the commit of the checkout that this package runs from, `+` if files differ from it.

    A copy without a repository is told by the variable ESPFORMER_REVISION.
    """
    told = os.environ.get("ESPFORMER_REVISION")
    if told:
        return told
    here = Path(__file__).parent
    try:
        # A package in an environment inside some other repository is not part of that one.
        _git(here, "ls-files", "--error-unmatch", "__init__.py")
        changed = _git(here, "status", "--porcelain", "--untracked-files=no")
        return _git(here, "rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


def run_conditions() -> dict[str, Any]:
    """Return the command and the versions behind the result of a run."""
    return {
        "command": os.environ.get(_COMMAND),  # None where Python called without one
        "versions": {
            "espformer": espformer.__version__,
            "revision": revision(),
            "torch": torch.__version__,
            "lightning": version("lightning"),
            "python": platform.python_version(),
        },
    }


def machine(command: Sequence[str], device: torch.device) -> dict[str, str]:
    """Return the command, the date, the versions and the processor behind a benchmark."""
    stated = {
        "command": shlex.join(command),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "espformer": " at ".join(filter(None, (espformer.__version__, revision()))),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device.type != "cuda":
        return stated | {
            "cpu": f"{processor()}, {cores()} cores",
            "threads": str(torch.get_num_threads()),
        }
    properties = torch.cuda.get_device_properties(device)
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "not installed"
    return stated | {
        "triton": triton,
        "gpu": f"{properties.name}, {properties.total_memory / 1e9:.0f} GB",
        "cuda": str(torch.version.cuda),
    }


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pick_device(accelerator: str = "auto") -> torch.device:
    """Return the device that Lightning will choose for an accelerator: auto, gpu or cpu."""
    on_gpu = accelerator != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if on_gpu else "cpu")


def device_name(device: torch.device) -> str:
    """Return the card's name, or the processor's with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"cpu ({processor()}, {threads} thread{'' if threads == 1 else 's'})"


def processor() -> str:
    """Return the name of the CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
