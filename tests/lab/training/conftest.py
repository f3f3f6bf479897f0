"""A tiny encoder with a tokenizer of its own, and tiny texts, for fine-tuning in a second."""

import json
from pathlib import Path

import pytest

pytest.importorskip("lightning")


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> Path:
    from espformer.lab.data.make_tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="session")
def encoder(tmp_path_factory) -> Path:
    """The directory of a BERT whose words are the syllables of the tiny texts."""
    pytest.importorskip("transformers")
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    from espformer.lab.data.make_tiny import WORDS

    directory = tmp_path_factory.mktemp("models") / "tiny-bert"
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    BertModel(config).half().save_pretrained(directory)
    assert json.loads((directory / "config.json").read_text("utf-8"))["dtype"] == "float16"
    return directory
