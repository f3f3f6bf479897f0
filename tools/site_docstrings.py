"""Docstrings for the site: roles and formulas of reStructuredText, written as Markdown.

In the sources :func:`name` and ``.. math::`` are what editors and ``help`` show best.
"""

import pydoc
import re
import textwrap
from pathlib import Path
from typing import Any

import griffe

API = Path(__file__).parents[1] / "docs" / "api"
# Everything that the reference shows, by its last name: revert, espformer.integrations.revert.
SHOWN = {
    path.rpartition(".")[2]: path
    for page in sorted(API.glob("*.md"))
    for path in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
}
ROLE = re.compile(r":(?:func|class|meth|mod|data|attr):`~?\.?([^`]+)`")
INLINE = re.compile(r":math:`([^`]+)`")
EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)
# The directive, what follows it on its line, and the indented lines below.
MATH = re.compile(r"^( *)\.\. math::[ \t]*(.*\n(?:(?:\1 +.*)?\n)*)", re.MULTILINE)


def to_markdown(docstring: str) -> str:
    """The same docstring with links for roles and ``$$`` around formulas."""

    def reference(match: re.Match[str]) -> str:
        path = SHOWN.get(match[1].rpartition(".")[2])
        return f"`{match[1]}`" if path is None else f"[`{match[1]}`][{path}]"

    def formula(match: re.Match[str]) -> str:
        indent, body = match[1], " ".join(textwrap.dedent(match[2]).split())
        if "&" in body:
            body = rf"\begin{{align*}} {body} \end{{align*}}"
        return f"{indent}$${body}$$\n\n"

    text = MATH.sub(formula, docstring + "\n").rstrip("\n")
    text = EXAMPLE.sub(r"\1Examples:", text)  # the section that is shown as code
    text = INLINE.sub(r"$\1$", text)
    return ROLE.sub(reference, text)


class Markdown(griffe.Extension):
    """Rewrites every docstring that is collected."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        if "{options}" in obj.docstring.value:
            # Filled in when the module is imported, from the one list of options.
            obj.docstring.value = pydoc.getdoc(pydoc.locate(obj.path))
        obj.docstring.value = to_markdown(obj.docstring.value)
