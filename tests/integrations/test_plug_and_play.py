"""Examples that nobody else runs: of docs/plug-and-play.md with timm, and in docstrings."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "plug-and-play.md"


def test_the_example_with_timm():
    """It stands in a block of its own kind, since timm may be missing."""
    examples = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(examples) == 1
    pytest.importorskip("timm", reason="timm is not installed")
    exec(compile(examples[0], str(PAGE), "exec"), {})


@pytest.mark.parametrize("name", ["convert", "report", "settings"])
def test_examples_in_docstrings(name):
    module = importlib.import_module(f"espformer.integrations.{name}")
    results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0
    assert results.failed == 0
