"""The commit that this package runs from, and the command that it runs for."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

__all__ = ["command", "remember_command", "revision"]

_COMMAND = "ESPFORMER_COMMAND"


def remember_command(arguments: Sequence[str]) -> None:
    """Keep what the user typed, for the results of this process and of those that it starts."""
    os.environ.setdefault(_COMMAND, shlex.join(["espformer", *arguments]))


def command() -> str | None:
    """What the user typed; None where Python called without a command."""
    return os.environ.get(_COMMAND)


def revision() -> str | None:
    """The commit of the checkout that this package runs from, `+` if files differ from it.

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
