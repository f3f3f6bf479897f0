"""All runs of an experiment: planned, run in parallel, and never repeated.

Each run is a process of its own, so a crash takes one run down and not the others, and several
share a device. What is finished is kept, what was killed goes on from its last checkpoint. Data are
read and prepared once, before the runs begin. They go seed by seed, so an interruption leaves whole
comparisons, and the longest of a seed begin first.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from espformer.lab.errors import RunError
from espformer.lab.files import tail
from espformer.lab.machine import cores
from espformer.lab.recipes.build import build_mechanism
from espformer.lab.recipes.recipe import Recipe
from espformer.lab.recipes.schema import Run, TimingRun, TrainingRun
from espformer.lab.training import processes
from espformer.lab.training.assemble import load_task
from espformer.lab.training.events import ENVIRONMENT, last_event
from espformer.lab.training.processes import Launch, Process
from espformer.lab.training.run_directory import check_same, read_results, run_directory
from espformer.lab.training.trainer import start_run

# Overrides that also hold for the runs that an experiment starts from; how long those train is
# another matter, for `start.overrides`.
_SHARED = ("data.", "model.", "trainer.")
_APART = "trainer.epochs="
_POLL_SECONDS = 0.2
# For all runs together to stop: who interrupts waits for the results.
_PATIENCE_SECONDS = 15.0


@dataclass
class Job:
    """A run, where its files are, how it is called for, and what must be there before it."""

    run: Run
    directory: Path
    arguments: list[str]
    """Arguments of the `espformer` command."""
    needs: list[Path] = field(default_factory=list)
    attempts: int = 0

    @property
    def state(self) -> Literal["finished", "interrupted", "new"]:
        if read_results(self.directory) is not None:
            return "finished"
        return "interrupted" if (self.directory / "last.ckpt").exists() else "new"

    @property
    def name(self) -> str:
        run = self.run
        return f"{run.recipe} {run.setting} {run.label} seed {run.seed}"

    @property
    def log(self) -> Path:
        """File of what the run prints."""
        return self.directory / "log.txt"

    @property
    def events(self) -> Path:
        """File of how far the run is."""
        return self.directory / "events.jsonl"


def plan(
    recipe: Recipe,
    source: str,
    output: Path,
    *,
    seeds: Sequence[int] | None = None,
    only: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> list[Job]:
    """Return the jobs of an experiment, and before them those of other recipes that it starts from.

    Refused where a directory holds a run with other settings, which would pass for the one asked.

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
            shared = [
                text
                for text in overrides
                if text.startswith(_SHARED) and not text.startswith(_APART)
            ]
            shared += run.start.overrides or []
            before = start_run(run, shared)
            job = _train_job(before, str(run.start.recipe), output, shared)
            jobs.setdefault(job.directory, job)
            needs.append(job.directory)
        job = _train_job(run, source, output, overrides)
        job.needs = needs
        jobs[job.directory] = job
    return list(jobs.values())


def _train_job(run: Run, source: str, output: Path, overrides: Sequence[str]) -> Job:
    arguments = [
        *("train", source, "--mechanism", run.label, "--setting", run.setting),
        *("--seed", str(run.seed), "--output", str(output), "--no-progress", *overrides),
    ]
    return make_job(run, output, arguments)


def make_job(run: Run, output: Path, arguments: list[str]) -> Job:
    """Return the job of a run, unless its directory holds a run with other settings."""
    directory = run_directory(output, run)
    check_same(run, directory)
    return Job(run, directory, arguments)


def rough_work(run: Run) -> float:
    """Estimate the work of a run, to sort runs by it: tokens seen, times a factor."""
    if not isinstance(run, TrainingRun):
        return 0.0
    model, data = run.model.arguments, run.data.set.arguments
    patch = model.get("patch_size", 1)
    tokens = data.get("max_length", 1) / (patch * patch if isinstance(patch, int) else 1)
    cost = build_mechanism(run.mechanism).relative_cost
    examples = data.get("images", data.get("fraction", 1.0))
    return float(tokens * run.trainer.epochs * examples * cost)


def do_all(
    jobs: list[Job], at_once: int, console: Console, launcher: Launch | None = None
) -> list[Job]:
    """Do what is left, several at once; returns the jobs that failed.

    Args:
        jobs: from :func:`plan`.
        at_once: how many.
        console: where progress is shown.
        launcher: starts a run; a fork where that can be, unless given.
    """
    waiting = [job for job in jobs if job.state != "finished"]
    trained = [job.run for job in waiting if isinstance(job.run, TrainingRun)]
    alone = at_once > 1 and any(isinstance(job.run, TimingRun) for job in waiting)
    at_once = 1 if alone else min(at_once, max(1, len(waiting)))
    console.print(
        f"{len(jobs)} runs: {len(jobs) - len(waiting)} finished before, {len(waiting)} to do, "
        f"{at_once} at once" + (" (what is timed is timed alone)" if alone else "")
    )
    if _share_without_mps(trained, at_once):
        console.print(
            "runs that share a GPU take turns, slowly: call nvidia-cuda-mps-control -d before them",
            soft_wrap=True,
        )
    if launcher is None:
        launcher = _launcher(trained, at_once) if waiting else processes.by_command
        _prepare_data(trained, console)
    return _Board(jobs, seed_by_seed(waiting), at_once, console, launcher).work()


def _share_without_mps(runs: list[TrainingRun], at_once: int) -> bool:
    """Whether processes will take turns on a card, for want of NVIDIA's Multi-Process Service."""
    cards = torch.cuda.device_count()
    on_gpu = any(run.trainer.accelerator != "cpu" for run in runs)
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    return on_gpu and 0 < cards < at_once and not pipes.exists()


def _launcher(runs: list[TrainingRun], at_once: int) -> Launch:
    """Choose how runs are started: for several devices by a command, which Lightning repeats."""
    if any(run.trainer.devices > 1 for run in runs) or not processes.suited():
        return processes.by_command
    processes.prepare_fork(_environment(0, at_once))
    return processes.forked


def _prepare_data(runs: list[TrainingRun], console: Console) -> None:
    """Read each data set once, which fills its cache: sixteen runs would do the same at once."""
    different = {f"{run.data.set}{run.data.directory}{run.seed}": run for run in runs}
    with console.status("preparing the data"):
        for run in different.values():
            load_task(run)


def seed_by_seed(waiting: list[Job]) -> list[Job]:
    """Order jobs seed by seed, then setting by setting, so that interrupted work can be compared.

    What others wait for comes before them. Among the settings of a seed, and among the runs of a
    setting, the longest come first: none of them is left to end alone.
    """
    work = {job.directory: rough_work(job.run) for job in waiting}
    needed = {path for job in waiting for path in job.needs}
    seeds = list(dict.fromkeys(job.run.seed for job in waiting))
    longest: dict[tuple[int, str, str], float] = {}
    for job in waiting:
        longest[_group(job)] = max(longest.get(_group(job), 0.0), work[job.directory])

    def place(job: Job) -> tuple[Any, ...]:
        waited_for = job.directory in needed
        group = _group(job)
        return (
            seeds.index(job.run.seed),
            not waited_for,
            -longest[group],
            group,
            -work[job.directory],
        )

    return sorted(waiting, key=place)


def _group(job: Job) -> tuple[int, str, str]:
    """Return the group of a run, in which runs differ by their mechanism alone."""
    return job.run.seed, job.run.recipe, job.run.setting


class _Board:
    """Runs that wait, run, are done and failed, and a display of them."""

    def __init__(
        self,
        jobs: list[Job],
        waiting: list[Job],
        at_once: int,
        console: Console,
        launcher: Launch,
    ) -> None:
        self.jobs, self.waiting, self.at_once = jobs, waiting, at_once
        self.launcher = launcher
        self.failed: list[Job] = []
        self.running: dict[int, tuple[Job, Process, TaskID]] = {}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self.progress = Progress(*columns, TimeElapsedColumn(), console=console)
        self.say = self.progress.console.print

    def work(self) -> list[Job]:
        done = len(self.jobs) - len(self.waiting)
        with _stopped_by_sigterm(), self.progress:
            whole = self.progress.add_task("[bold]runs", total=len(self.jobs), completed=done)
            try:
                while self.waiting or self.running:
                    self._start()
                    self.progress.advance(whole, self._look())
                    if not self.running and self.waiting and not _ready(self.waiting):
                        self._give_up()
                    time.sleep(_POLL_SECONDS)
            finally:
                for _, process, _ in self.running.values():
                    process.terminate()
                deadline = time.monotonic() + _PATIENCE_SECONDS
                for _, process, _ in self.running.values():
                    _end(process, deadline)
        for job in self.failed:
            self.say(f"[red]failed[/]  {job.name}: see {job.log}", soft_wrap=True)
        return self.failed

    def _start(self) -> None:
        for job in _ready(self.waiting):
            slot = next((n for n in range(self.at_once) if n not in self.running), None)
            if slot is None:
                return
            self.waiting.remove(job)
            job.attempts += 1
            try:
                job.directory.mkdir(parents=True, exist_ok=True)
                environment = _environment(slot, self.at_once) | {ENVIRONMENT: str(job.events)}
                process = self.launcher(job.arguments, job.log, environment)
            except OSError as error:
                raise RunError(f"{job.directory}: cannot write here ({error.strerror})") from None
            epochs = job.run.trainer.epochs if isinstance(job.run, TrainingRun) else 1
            bar = self.progress.add_task(f"  {job.name}", total=epochs)
            self.running[slot] = (job, process, bar)

    def _look(self) -> int:
        """See to the runs that ended, and how far the others are; returns how many ended."""
        ended = 0
        for slot, (job, process, bar) in list(self.running.items()):
            status = process.poll()
            if status is None:
                self.progress.update(bar, completed=last_event(job.events).get("epoch", 0))
                continue
            del self.running[slot]
            self.progress.remove_task(bar)
            if status < 0 and job.attempts == 1:
                self.say(f"killed  {job.name}, by signal {-status}: it goes on", soft_wrap=True)
                self.waiting.append(job)
                continue
            ended += 1
            if status == 0:
                self.say(f"done    {job.name}", soft_wrap=True)
            else:
                self.failed.append(job)
                self.say(f"[red]failed[/]  {job.name}: {_last_line(job)}", soft_wrap=True)
        return ended

    def _give_up(self) -> None:
        for job in self.waiting:
            self.say(f"[red]left[/]    {job.name}: what it needs failed", soft_wrap=True)
        self.failed.extend(self.waiting)
        self.waiting.clear()


@contextlib.contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Within the block, end at a SIGTERM as at any exception: runs are stopped, results written."""

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can handle signals
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(process: Process, deadline: float) -> None:
    """Wait until the deadline for a run that was asked to stop after its step, then kill it."""
    try:
        process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _ready(waiting: list[Job]) -> list[Job]:
    return [job for job in waiting if all(read_results(path) is not None for path in job.needs)]


def _environment(slot: int, at_once: int) -> dict[str, str]:
    """Return variables that give a slot one of the GPUs, and its share of the cores."""
    environment = {}
    cards = torch.cuda.device_count()
    if cards > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        environment["CUDA_VISIBLE_DEVICES"] = str(slot % cards)
    # MKL asks its own variable first: what the user said to OpenMP holds for all.
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // at_once)))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = os.environ.get(name, threads)
    return environment


def _last_line(job: Job) -> str:
    lines = [line.strip() for line in tail(job.log).splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
