"""What must be known to make the numbers again: the machine, the versions, the command."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import espformer
from espformer.lab.revision import revision

__all__ = ["machine", "processor"]


def machine(command: Sequence[str], device: torch.device) -> dict[str, str]:
    """The command, the date, the versions and the processor that computed."""
    stated = {
        "command": shlex.join(command),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "espformer": " at ".join(filter(None, (espformer.__version__, revision()))),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device.type != "cuda":
        return stated | {"cpu": processor(), "threads": str(torch.get_num_threads())}
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


def processor() -> str:
    """The name of the CPU, and how many of its cores this process may use."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"
