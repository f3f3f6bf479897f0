"""Errors that the user can fix; the command line prints them without a traceback."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake or an obstacle outside the code: the command line prints it without a traceback."""


class ConfigError(UserError):
    """A recipe or an override that does not say what it should."""


class RunError(UserError):
    """A run that cannot start or go on: a directory, a disk, a checkpoint."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """`did you mean 'epochs'?` where one is close, else the list to choose from.

    A key is also close to its last part and to its initials.

    Example:
        >>> nearest("epoch", ["data.batch_size", "trainer.epochs"])
        "did you mean 'trainer.epochs'?"
        >>> nearest("lr", ["name", "learning_rate"])
        "did you mean 'learning_rate'?"
    """
    known = sorted(set(choices))
    ends = {key.rpartition(".")[2]: key for key in reversed(known)}
    initials = {
        "".join(part[0] for part in end.split("_")): ends[end] for end in ends if "_" in end
    }
    names = initials | ends | {key: key for key in known}
    close = [word] if word in initials else difflib.get_close_matches(word, names, 1, 0.6)
    if close:
        return f"did you mean '{names[close[0]]}'?"
    return f"choose from {', '.join(known)}" if known else "nothing is expected here"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__


def in_one_line(error: Exception) -> str:
    """Return an error's message without its line breaks, cut where it is long."""
    return " ".join(str(error).split())[:300]
