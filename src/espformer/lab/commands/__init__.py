"""Commands of the command line, a file each."""

import inspect
import re

__all__ = ["flowing"]


def flowing(text: str) -> str:
    """A docstring as help: a paragraph in one line, for the terminal to break; examples stay.

    Example:
        >>> flowing("Draw it.\\n\\n    From a\\n    file.\\n\\n      like this")
        'Draw it.\\n\\nFrom a file.\\n\\n  like this'
    """
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(re.sub(r"\n(?! )", " ", paragraph) for paragraph in paragraphs)
