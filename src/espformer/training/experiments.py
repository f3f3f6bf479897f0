"""All runs of an experiment: planned, done several at a time, and never done twice.

Each run is a process of its own, so a crash takes one run down and not the others, and several
share a device. What is finished is kept, what was killed goes on from its last checkpoint.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from espformer.training.config import Run, TrainingRun
from espformer.training.errors import RunError
from espformer.training.recipe import Recipe
from espformer.training.records import read_results, run_directory
from espformer.training.runner import start_run

__all__ = ["Job", "do_all", "plan"]

# Overrides that also hold for the runs that an experiment starts from.
_SHARED = ("data.", "model.", "trainer.")
_POLL_SECONDS = 0.2


@dataclass
class Job:
    """A run, where its files are, how it is called for, and what must be there before it."""

    run: Run
    directory: Path
    command: list[str]
    needs: list[Path] = field(default_factory=list)

    @property
    def state(self) -> Literal["finished", "interrupted", "new"]:
        if read_results(self.directory) is not None:
            return "finished"
        return "interrupted" if (self.directory / "last.ckpt").exists() else "new"

    @property
    def name(self) -> str:
        run = self.run
        return f"{run.recipe} {run.setting} {run.label} seed {run.seed}"


def plan(
    recipe: Recipe,
    source: str,
    output: Path,
    *,
    seeds: Sequence[int] | None = None,
    only: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> list[Job]:
    """The jobs of an experiment, and before them those of other recipes that it starts from.

    Args:
        recipe: the experiment.
        source: its name or path, as the command line takes it.
        output: directory of all runs.
        seeds: instead of those of the recipe.
        only: mechanisms and settings to keep.
        overrides: `key.path=value`, for every run.
    """
    jobs: dict[Path, Job] = {}
    for run in recipe.runs(seeds, overrides, only):
        needs = []
        if isinstance(run, TrainingRun) and run.start is not None and run.start.recipe is not None:
            shared = [text for text in overrides if text.startswith(_SHARED)]
            before = start_run(run)
            job = _job(before, str(run.start.recipe), output, shared)
            jobs.setdefault(job.directory, job)
            needs.append(job.directory)
        job = _job(run, source, output, overrides)
        job.needs = needs
        jobs[job.directory] = job
    return list(jobs.values())


def _job(run: Run, source: str, output: Path, overrides: Sequence[str]) -> Job:
    command = [
        *(sys.executable, "-m", "espformer.cli", "train", source),
        *("--mechanism", run.label, "--setting", run.setting, "--seed", str(run.seed)),
        *("--output", str(output), "--no-progress", *overrides),
    ]
    return Job(run, run_directory(output, run), command)


def do_all(jobs: list[Job], at_once: int, console: Console) -> list[Job]:
    """Do what is left, several at once; returns the jobs that failed."""
    waiting = [job for job in jobs if job.state != "finished"]
    console.print(
        f"{len(jobs)} runs: {len(jobs) - len(waiting)} finished before, {len(waiting)} to do, "
        f"{at_once} at once"
    )
    failed: list[Job] = []
    running: dict[int, tuple[Job, subprocess.Popen[bytes]]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bar = progress.add_task("runs", total=len(jobs), completed=len(jobs) - len(waiting))
        try:
            while waiting or running:
                _start(waiting, running, at_once)
                for slot, (job, process) in list(running.items()):
                    if process.poll() is None:
                        continue
                    del running[slot]
                    progress.advance(bar)
                    if process.returncode == 0:
                        progress.console.print(f"done    {job.name}")
                    else:
                        failed.append(job)
                        progress.console.print(f"[red]failed[/]  {job.name}: {_why(job)}")
                if not running and waiting and not _ready(waiting):
                    for job in waiting:
                        progress.console.print(f"[red]left[/]    {job.name}: what it needs failed")
                    failed.extend(waiting)
                    waiting = []
                names = ", ".join(job.name for job, _ in running.values())
                progress.update(bar, description=names[:60] or "runs")
                time.sleep(_POLL_SECONDS)
        finally:
            for _, process in running.values():
                process.terminate()
            for _, process in running.values():
                _end(process)
    return failed


def _end(process: "subprocess.Popen[bytes]") -> None:
    """A run that was asked to stop does so after its step; a long step is not waited for."""
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _ready(waiting: list[Job]) -> list[Job]:
    return [job for job in waiting if all(read_results(path) is not None for path in job.needs)]


def _start(
    waiting: list[Job],
    running: dict[int, tuple[Job, "subprocess.Popen[bytes]"]],
    at_once: int,
) -> None:
    for job in _ready(waiting):
        free = next((slot for slot in range(at_once) if slot not in running), None)
        if free is None:
            return
        waiting.remove(job)
        try:
            job.directory.mkdir(parents=True, exist_ok=True)
            log = open(job.directory / "log.txt", "ab")  # noqa: SIM115
        except OSError as error:
            raise RunError(f"{job.directory}: cannot write here ({error.strerror})") from None
        with log:
            process = subprocess.Popen(
                job.command, stdout=log, stderr=log, env=_environment(free, at_once)
            )
        running[free] = (job, process)


def _environment(slot: int, at_once: int) -> dict[str, str]:
    """One of the cards for each slot, and the processor's cores shared out."""
    environment = dict(os.environ)
    cards = torch.cuda.device_count()
    if cards > 1 and "CUDA_VISIBLE_DEVICES" not in environment:
        environment["CUDA_VISIBLE_DEVICES"] = str(slot % cards)
    threads = max(1, (os.cpu_count() or 1) // at_once)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    return environment


def _why(job: Job) -> str:
    path = job.directory / "log.txt"
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no message")
    return f"{last} (see {path})"
