"""Recipes, checkpoints, arrays and models from strangers run no code (see SECURITY.md)."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from espformer.lab.data.files import DataError
from espformer.lab.data.reading import read_npz
from espformer.lab.errors import RunError
from espformer.lab.recipes.build import build_mechanism
from espformer.lab.recipes.recipe import load_recipe, run_from_plain
from espformer.lab.recipes.yaml_schema import ConfigError, plain, read_text
from espformer.lab.training.checkpoints import read_checkpoint
from espformer.lab.training.run_directory import check_same

TAGS = [
    "!!python/object/apply:os.system ['touch was-run']",
    "!!python/object/new:subprocess.Popen [['touch', 'was-run']]",
    "!!python/name:os.system",
    "!!python/module:antigravity",
]


class Code:
    """What a pickle can do: write a file while it is being loaded."""

    def __reduce__(self):
        return os.system, ("touch was-run",)


@pytest.fixture(autouse=True)
def _nothing_was_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not Path("was-run").exists()


@pytest.mark.parametrize("tag", TAGS)
def test_a_recipe_cannot_build_objects(tag, tiny):
    text = tiny.read_text()
    for hostile in (f"title: {tag}\n" + text.split("\n", 1)[1], text + f"\nextra: {tag}\n", tag):
        tiny.write_text(hostile)
        with pytest.raises(ConfigError):
            load_recipe(tiny)
    with pytest.raises(ConfigError):
        read_text(tag)  # a value of the command line


@pytest.mark.parametrize(
    ("true", "hostile"),
    [
        ("transformer: softmax", "transformer: {os.system: {}}"),
        ("  vit: {patch_size: 4", "  os.system: {patch_size: 4"),
        ("set: digits", "set: os.system"),
    ],
    ids=["mechanism", "model", "data"],
)
def test_names_of_a_recipe_are_looked_up_in_lists(true, hostile, tiny):
    text = tiny.read_text()
    assert true in text
    tiny.write_text(text.replace(true, hostile))
    with pytest.raises(ConfigError, match=r"os\.system"):
        load_recipe(tiny).run("transformer")


@pytest.mark.parametrize("tag", TAGS)
def test_a_configuration_of_a_run_cannot_build_objects(tag, recipe, tmp_path):
    (tmp_path / "last.ckpt").touch()
    (tmp_path / "config.yaml").write_text(f"label: {tag}\n")
    with pytest.raises(RunError, match="cannot be read"):
        check_same(recipe.run("transformer"), tmp_path)


def test_a_checkpoint_cannot_hold_code(tmp_path):
    torch.save({"espformer": Code()}, tmp_path / "last.ckpt")
    with pytest.raises(RunError, match="refused"):
        read_checkpoint(tmp_path / "last.ckpt")


def test_a_mechanism_in_a_checkpoint_is_looked_up_too(recipe):
    described = plain(recipe.run("transformer"))
    described["mechanism"] = {"os.system": {"command": "touch was-run"}}
    with pytest.raises(ConfigError, match=r"os\.system"):
        build_mechanism(run_from_plain(described, "last.ckpt").mechanism)


def test_arrays_cannot_hold_code(tmp_path):
    np.savez(tmp_path / "mnist.npz", x_train=np.array([Code()], dtype=object))
    with pytest.raises(DataError, match=r"mnist\.npz"):
        read_npz(tmp_path / "mnist.npz", {"x_train": (-1,)})


def test_a_converted_model_names_mechanisms_from_a_list(tmp_path):
    transformers = pytest.importorskip("transformers")
    import espformer
    from espformer.integrations.pretrained import load_pretrained

    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        vocab_size=30,
    )  # fmt: skip
    model = espformer.convert(transformers.BertModel(config), espformer.nn.ESP())
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(file.read_text().replace('"ESP"', '"os.system"'))
    assert "os.system" in json.dumps(json.loads(file.read_text()))
    with pytest.raises(ValueError, match="name must be one of"):
        load_pretrained(transformers.AutoModel, str(tmp_path / "model"))
