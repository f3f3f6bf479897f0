"""A tiny encoder with a tokenizer of its own, and tiny texts, for fine-tuning in a second."""

import json
from pathlib import Path

import pytest

from tools.tiny_encoder import make_tiny_encoder

pytest.importorskip("lightning")


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> Path:
    from espformer.lab.data.make_tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="session")
def encoder(tmp_path_factory) -> Path:
    """The directory of a BERT whose words are the syllables of the tiny texts."""
    pytest.importorskip("transformers")
    directory = make_tiny_encoder(tmp_path_factory.mktemp("models") / "tiny-bert")
    assert json.loads((directory / "config.json").read_text("utf-8"))["dtype"] == "float16"
    return directory
