"""Processes for runs: forked from one that has imported everything, or started afresh.

Importing torch and Lightning takes seconds, of each core that does it; a fork takes milliseconds.
The process that is forked has never touched a GPU, nor computed anything.
"""

import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

# What a run imports, sooner or later.
_PRELOAD = (
    "typer",
    "rich.table",
    "espformer.lab.training.trainer",
    "espformer.lab.cli.display",
    "espformer.lab.training.cuda_graphs",
    "espformer.lab.training.translation",
    "espformer.lab.data.reading",
    "torch.utils.tensorboard",
)


@dataclass
class Forked:
    """A forked process, with the methods of :class:`subprocess.Popen` that a board calls."""

    process: BaseProcess

    def poll(self) -> int | None:
        return self.process.exitcode

    def terminate(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        self.process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("run", timeout or 0.0)
        return self.process.exitcode


Process = subprocess.Popen[bytes] | Forked
Launch = Callable[[Sequence[str], Path, dict[str, str]], Process]
"""Starts `espformer` with arguments, a log file and environment variables."""


def by_command(arguments: Sequence[str], log: Path, environment: dict[str, str]) -> Process:
    """Return a new interpreter."""
    command = [sys.executable, "-m", "espformer.lab.cli", *arguments]
    with open(log, "ab") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, **environment}
        )


def suited() -> bool:
    """Say whether this system can fork."""
    return "forkserver" in multiprocessing.get_all_start_methods()


def prepare_fork(environment: dict[str, str]) -> None:
    """Let a process begin to import what runs need; returns at once.

    Args:
        environment: variables that must be there when libraries load, such as numbers of threads.
    """
    # Without it, asking whether there is a GPU would touch it, and no fork could use it.
    environment = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **environment}
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        multiprocessing.get_context("forkserver").set_forkserver_preload(list(_PRELOAD))
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def forked(arguments: Sequence[str], log: Path, environment: dict[str, str]) -> Process:
    """Return a fork of a process that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_work, args=(list(arguments), str(log), environment))
    process.start()
    return Forked(process)


def _work(arguments: list[str], log: str, environment: dict[str, str]) -> None:
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment)
    if _gpu_is_lost():
        print("this fork cannot use the GPU: starting afresh", flush=True)
        command = [sys.executable, "-m", "espformer.lab.cli", *arguments]
        os.execv(sys.executable, command)
    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.argv = ["espformer", *arguments]
    from espformer.lab.cli import main

    main()


def _gpu_is_lost() -> bool:
    """Say whether a library has touched the GPU before the fork, which makes it useless after."""
    if torch.cuda.device_count() == 0:  # asks the driver's management library, which may be asked
        return False
    try:
        torch.cuda.init()
    except RuntimeError:
        return True
    return False


def _end_with_parent() -> None:
    """Stop when the process that started the runs has ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
