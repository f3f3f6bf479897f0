"""Examples that nobody else runs: of docs/plug-and-play.md with timm, and in docstrings."""

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "plug-and-play.md"


def sections() -> dict[str, str]:
    """Heading of each section of the page, and all its Python."""
    parts = re.split(r"^#+ (.+)$", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    found = {}
    for heading, text in zip(parts[1::2], parts[2::2], strict=True):
        blocks = re.findall(r"^```(?:python|py)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        if blocks:
            found[heading] = "\n".join(blocks)
    return found


def test_the_example_with_timm():
    """It stands in a block of its own kind, since timm may be missing."""
    example = sections()["timm"]
    pytest.importorskip("timm", reason="timm is not installed")
    exec(compile(example, str(PAGE), "exec"), {})


@pytest.mark.parametrize("heading", sections())
def test_a_section_needs_nothing_from_the_others(heading):
    """All of the page is run by tests/test_docs.py, one block after the other."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "-"]
    checked = subprocess.run(command, input=sections()[heading], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_every_family_has_its_section():
    headings = " ".join(sections())
    for family in (
        "Transformer encoders", "Transformer decoders", "MultiheadAttention", "BERT", "RoBERTa",
        "DistilBERT", "ViT", "DeiT", "BART", "Marian", "DETR", "CLIP", "timm",
    ):  # fmt: skip
        assert family in headings
    for heading, source in sections().items():
        assert len(source.splitlines()) <= 30, heading


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("calibration", "torch"),
        ("convert", "torch"),
        pytest.param("onnx", "onnxscript", marks=pytest.mark.slow),
        ("pretrained", "transformers"),
        ("report", "torch"),
        ("settings", "torch"),
    ],
)
def test_examples_in_docstrings(name, needs):
    pytest.importorskip(needs)
    module = importlib.import_module(f"espformer.integrations.{name}")
    results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0
    assert results.failed == 0
