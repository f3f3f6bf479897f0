"""`espformer export`: from what is on disk to a graph that gives the same numbers."""

import shutil
import sys

import pytest
import torch

pytest.importorskip("lightning")
pytest.importorskip("typer")

from typer.testing import CliRunner

import espformer
from espformer.lab import cli
from espformer.lab.errors import RunError
from espformer.lab.exporting import Exportable, export_model, open_model
from espformer.nn import ESP
from tests.integrations.families import make

SMALL = [
    "model.vit.patch_size=4", "model.vit.dim=8", "model.vit.head_dim=4", "model.vit.mlp_dim=8",
    "trainer.epochs=1", "trainer.limit_batches=2", "trainer.accelerator=cpu",
    "trainer.attention_statistics=false",
]  # fmt: skip


def call(*arguments) -> str:
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    call("train", "digits", "--no-progress", "--output", out, *SMALL)
    return out / "digits" / "default" / "espformer-default" / "seed-0"


@pytest.fixture
def hugging_face(tmp_path):
    pytest.importorskip("transformers")

    def save(family, mechanism=None):
        model = make(family)
        if mechanism is not None:
            espformer.convert(model, mechanism)
        model.save_pretrained(tmp_path / family)
        return tmp_path / family

    return save


@pytest.mark.slow
def test_a_run_as_a_program(digits, tmp_path):
    """A trained run, hardened, read again from the file and compared here."""
    file = tmp_path / "model.pt2"
    text = call("export", digits, "--format", "torch", "--to", file)
    assert "largest difference from the model" in text
    opened = open_model(digits)
    espformer.harden(opened.model)
    program = torch.export.load(file).module()
    images = torch.randn(5, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(program(inputs=images), opened.model(images))
        espformer.soften(opened.model)
        assert not torch.allclose(program(inputs=images), opened.model(images))


def test_a_run_as_onnx(digits, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    file = tmp_path / "model.onnx"
    call("export", digits / "last.ckpt", "--to", file)
    session = runtime.InferenceSession(file)
    model = open_model(digits).model
    espformer.harden(model)
    images = torch.randn(3, 1, 8, 8)
    (found,) = session.run(None, {"inputs": images.numpy()})
    with torch.no_grad():
        assert (torch.from_numpy(found) - model(images)).abs().max() < 1e-5


@pytest.mark.slow
def test_weights_in_a_file_of_their_own_come_along(digits, tmp_path, monkeypatch):
    """As the exporter writes a model that is too large for one file."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    save = torch.onnx.ONNXProgram.save
    monkeypatch.setattr(
        torch.onnx.ONNXProgram, "save", lambda *arguments: save(*arguments, external_data=True)
    )
    export_model(open_model(digits), tmp_path / "model.onnx", "onnx")
    assert {p.name for p in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data"}
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    assert session.run(None, {"inputs": torch.zeros(3, 1, 8, 8).numpy()})[0].shape == (3, 10)


@pytest.mark.parametrize(
    ("family", "mechanism"),
    [
        pytest.param(
            "bert",
            ESP(sort_temperature=0.3, learn_temperature=True),
            id="bert-esp",
            marks=pytest.mark.slow,
        ),
        pytest.param("vit", ESP(), id="vit-esp", marks=pytest.mark.slow),
        pytest.param("roberta", None, id="roberta-original", marks=pytest.mark.slow),
    ],
)
def test_directories_of_transformers(family, mechanism, hugging_face, tmp_path):
    source = open_model(hugging_face(family, mechanism))
    assert export_model(source, tmp_path / "model.pt2", "torch") < 1e-5


@pytest.mark.slow
def test_soft_models_too(hugging_face, tmp_path):
    source = open_model(hugging_face("bert", ESP(sort_temperature=0.3)))
    assert export_model(source, tmp_path / "model.pt2", "torch", soft=True) < 1e-4
    inputs = source.example(3, 9, seed=4)
    program = torch.export.load(tmp_path / "model.pt2").module()
    with torch.no_grad():
        found, wanted = program(**inputs)[0], source.model(**inputs)[0]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
def test_onnx_from_a_directory(soft, hugging_face, tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    folder = hugging_face("distilbert", ESP(sort_temperature=0.3))
    options = ["--soft"] if soft else []
    text = call("export", folder, "--to", tmp_path / "model.onnx", *options)
    assert float(text.split()[-1]) <= 1e-4


def test_help_teaches_with_examples():
    text = call("export", "--help")
    assert "espformer export runs/digits" in text


def test_places_that_cannot_be_written_are_told(tmp_path):
    source = Exportable(torch.nn.Identity(), {"input": "points"})
    with pytest.raises(RunError, match=r"is a directory; name the file, such as .*model\.onnx"):
        export_model(source, tmp_path, "onnx")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"x\.pt2: cannot write here \(.*choose another place"):
        export_model(source, tmp_path / "file" / "x.pt2", "torch")


@pytest.mark.parametrize("content", ['{"data": {', "[]", '{"data": null}'])
def test_damaged_results_are_told(digits, tmp_path, content):
    shutil.copy(digits / "last.ckpt", tmp_path)
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(RunError, match=r"results\.json: .* move it away, and the data"):
        open_model(tmp_path / "last.ckpt")
    (tmp_path / "results.json").unlink()
    assert open_model(tmp_path / "last.ckpt").image == (1, 8, 8), "as the message says"
    (tmp_path / "config.json").write_text(content[:5])
    with pytest.raises(RunError, match=r"config\.json: .* save the model again"):
        open_model(tmp_path)


def test_mistakes_are_told(digits, hugging_face, tmp_path, monkeypatch, capsys):
    with pytest.raises(RunError, match="expected the directory of a run"):
        open_model(tmp_path)
    with pytest.raises(RunError, match="no such checkpoint"):
        open_model(digits, "hard")
    with pytest.raises(RunError, match="save its encoder"):
        open_model(hugging_face("bart", ESP()))
    source = Exportable(torch.nn.Linear(3, 2), {"input": "points"})
    (tmp_path / "there").mkdir()
    file = tmp_path / "there" / "model.pt2"
    file.write_text("before")
    with pytest.raises(RunError, match=r"away from the model's, more than .* it was not kept"):
        export_model(source, file, "torch", tolerance=-1.0)
    assert [p.name for p in file.parent.iterdir()] == ["model.pt2"]
    assert file.read_text() == "before", "a file that is wrong replaces none"
    monkeypatch.setattr(torch.export, "export", lambda *_, **__: 1 / 0)
    with pytest.raises(RunError, match=r"refused this model: division by zero; .* leave --soft"):
        export_model(source, tmp_path / "model.pt2", "torch", soft=True)
    monkeypatch.setattr(sys, "argv", ["espformer", "export", str(tmp_path / "nothing")])
    with pytest.raises(SystemExit):
        cli.main()
    assert "there is no such checkpoint" in capsys.readouterr().err


def test_an_encoder_without_a_pooler_gets_none(tmp_path):
    """A pooler that was never trained would be made anew, with random weights."""
    transformers = pytest.importorskip("transformers")
    config = make("bert").config
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    espformer.convert(model, ESP(hard=True)).save_pretrained(tmp_path / "encoder")
    source = open_model(tmp_path / "encoder")
    assert source.model.pooler is None
    inputs = source.example(2, 6)
    with torch.no_grad():
        found, wanted = source.model(**inputs), model(**inputs)[0]
    assert len(found) == 1
    torch.testing.assert_close(found[0], wanted)
    model.save_pretrained(tmp_path / "other")
    file = tmp_path / "other" / "config.json"
    text = file.read_text("utf-8").replace("BertModel", "BertForSequenceClassification")
    file.write_text(text, "utf-8")
    with pytest.raises(RunError, match="would be random"):
        open_model(tmp_path / "other")


@pytest.mark.parametrize("family", ["bart", "marian"])
def test_the_encoder_of_a_translator_is_exported(family, tmp_path):
    """As the refusal of the whole advises."""
    pytest.importorskip("transformers")
    model = espformer.convert(make(family), ESP(hard=True))
    model.save_pretrained(tmp_path / "whole")
    with pytest.raises(RunError, match="get_encoder"):
        open_model(tmp_path / "whole")
    model.get_encoder().save_pretrained(tmp_path / "encoder")
    source = open_model(tmp_path / "encoder")
    inputs = source.example(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(
            source.model(**inputs)[0], model.get_encoder()(**inputs)[0], atol=1e-6, rtol=1e-5
        )


def test_the_tower_of_a_composite_model_is_exported(tmp_path):
    """CLIP's classifier of images: what was converted stands in a part of its configuration."""
    pytest.importorskip("transformers")
    from tests.integrations.test_dead_ends import IMAGES, clip_classifier

    model = espformer.convert(clip_classifier().eval(), ESP(hard=True))
    model.save_pretrained(tmp_path)
    source = open_model(tmp_path)
    assert source.image == (3, 16, 16)
    with torch.no_grad():
        assert torch.equal(source.model(IMAGES)[0], model(IMAGES)[0])
