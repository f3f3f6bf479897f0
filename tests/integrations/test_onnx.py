"""Exported graphs compute what the model computes, for sizes that they have not seen."""

import pytest
import torch
from torch import nn

import espformer
from espformer.nn import ESP, Attention
from tests.integrations.families import MASK, make

SIZES = [(1, 7), (2, 12), (5, 3), (3, 40), (1, 1)]


class Model(nn.Module):
    def __init__(self, mechanism):
        super().__init__()
        self.attention = Attention(16, 2, mechanism)

    def forward(self, x, mask=None):
        return self.attention(x, mask=mask)


def tokens(batch, length):
    lengths = torch.randint(1, length + 1, (batch, 1))
    return {"x": torch.randn(batch, length, 16), "mask": torch.arange(length) < lengths}


def words(batch, length):
    mask = tokens(batch, length)["mask"].long()
    return {"input_ids": torch.randint(3, 50, (batch, length)), "attention_mask": mask}


def images(batch, _length):
    return {"pixel_values": torch.randn(batch, 3, 16, 16)}


def vectors(batch, length):
    inputs = tokens(batch, length)
    return {"src": inputs["x"], "src_key_padding_mask": ~inputs["mask"]}


@pytest.mark.parametrize(
    "options",
    [{"hard": True}, {"hard": True, "ties": "average"}, {"metric": "squared"}],
    ids=["hard", "average", "soft"],
)
@torch.no_grad()
def test_program_serves_all_sizes(options):
    from espformer.integrations.onnx import export_program

    model = Model(ESP(**options))
    program = export_program(model, tokens(2, 7)).module()
    assert model.training
    assert model.attention.mechanism.backend == "auto"
    for batch, length in [(1, 7), (5, 3), (3, 70)]:
        inputs = tokens(batch, length)
        torch.testing.assert_close(program(**inputs), model(**inputs), atol=1e-5, rtol=1e-5)


def check_onnx(model, inputs, path, sizes=SIZES):
    from espformer.integrations.onnx import export_onnx

    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(export_onnx(model, inputs(2, 7), path / "model.onnx"))
    for batch, length in sizes:
        feeds = inputs(batch, length)
        found = session.run(None, {name: x.numpy() for name, x in feeds.items()})[0]
        with torch.no_grad():
            output = model(**feeds)
        expected = output if isinstance(output, torch.Tensor) else output[0]
        assert (torch.from_numpy(found) - expected).abs().max() < 1e-4, (batch, length)


def test_hardened_bert(tmp_path):
    model = espformer.convert(make("bert"), ESP())
    espformer.harden(model)
    check_onnx(model, words, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "inputs"), [("torch", vectors), ("vit", images), ("distilbert", words)]
)
def test_hardened_families(family, inputs, tmp_path):
    check_onnx(espformer.convert(make(family), ESP(hard=True)), inputs, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"hard": True, "ties": "average"},
        {"hard": True, "slicer": "frozen", "slices": 5},
        {},
        {"metric": "squared", "balance": "both"},
    ],
    ids=["average", "frozen", "soft", "soft-balanced"],
)
def test_kinds_of_esp(options, tmp_path):
    check_onnx(Model(ESP(**options)).eval(), tokens, tmp_path)


@pytest.mark.slow
def test_equal_numbers_keep_their_order(tmp_path):
    """Tokens out of a few words, hundreds of them: almost all numbers that are sorted are tied."""
    vocabulary = torch.randn(4, 16)

    def repeated(batch, length):
        inputs = tokens(batch, length)
        return inputs | {"x": vocabulary[torch.randint(4, (batch, length))]}

    check_onnx(Model(ESP(hard=True)).eval(), repeated, tmp_path, [*SIZES, (2, 300)])


def test_examples_that_are_too_small():
    from espformer.integrations.onnx import export_program

    with pytest.raises(ValueError, match="at least 2"):
        export_program(Model(ESP(hard=True)), tokens(1, 7))


def test_a_file_that_differs_is_an_error(tmp_path, monkeypatch):
    from espformer.integrations import onnx

    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    torch_model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    program = onnx.export_program(other, torch.randn(2, 4), dynamic_length=False)
    monkeypatch.setattr(onnx, "export_program", lambda *_args, **_options: program)
    with pytest.raises(ValueError, match="away from the model's"):
        onnx.export_onnx(torch_model, torch.randn(2, 4), tmp_path / "model.onnx")


@torch.no_grad()
def test_outputs_have_the_names_of_the_model(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    export_onnx = pytest.importorskip("espformer.integrations.onnx").export_onnx
    model = espformer.convert(make("bert"), ESP(hard=True))
    inputs = {"input_ids": torch.randint(3, 50, (2, 7)), "attention_mask": MASK[:2].long()}
    names = {}
    for return_dict in (True, False):
        model.config.return_dict = return_dict
        path = export_onnx(model, inputs, tmp_path / f"{return_dict}.onnx")
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names[return_dict] = [output.name for output in session.get_outputs()]
    assert names[True] == names[False] == ["last_hidden_state", "pooler_output"]
    path = export_onnx(Model(ESP(hard=True)), tokens(2, 7), tmp_path / "own.onnx")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == ["output"]
