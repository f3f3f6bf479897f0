"""docs/families.md: what it says of a class is what happens, and no class is wrong."""

import importlib
import re
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
families = pytest.importorskip("tools.families")

from espformer.nn import Mechanism  # noqa: E402

pytestmark = pytest.mark.usefixtures("quiet")
PAGE = (Path(__file__).parents[2] / "docs" / "families.md").read_text("utf-8")


@pytest.fixture
def quiet():
    with families.quiet():
        yield


def rows() -> dict[str, tuple[str, str]]:
    """Class: (verdict, detail), of the page's tables."""
    found = {}
    for verdict in ("Wrong", "Supported", "Refused"):
        section = re.search(rf"^## {verdict}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
        for line in section[1].splitlines() if section else ():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) == 3 and cells[0] not in ("family", "---"):
                found[cells[1]] = (verdict.lower(), cells[2])
    return found


def class_named(name: str):
    """Without looking through all classes, which imports every model of transformers."""
    if name == "WhisperEncoder":  # transformers itself does not show it
        return importlib.import_module(
            "transformers.models.whisper.modeling_whisper"
        ).WhisperEncoder
    return getattr(transformers, name)


def test_nothing_is_wrong():
    assert re.search(r"^\| wrong \| 0 \|$", PAGE, re.MULTILINE)
    table = rows()
    assert not [name for name, (verdict, _) in table.items() if verdict == "wrong"]
    supported = sum(verdict == "supported" for verdict, _ in table.values())
    assert re.search(rf"^\| supported \| {supported} \|$", PAGE, re.MULTILINE)
    assert supported > 100


@pytest.mark.parametrize(
    "name",
    [
        "BertModel", "ViTModel", "CLIPModel", "SiglipVisionModel", "WhisperEncoder",
        "ModernBertModel", "DebertaV2Model", "SwinModel", "T5EncoderModel",
    ],
)  # fmt: skip
def test_the_table_is_true_of(name):
    row = families.judge(class_named(name))
    assert (row.verdict, row.detail) == rows()[name]


def test_causal_models_are_not_called_encoders():
    assert families.judge(class_named("LlamaModel")).verdict == "causal"
    assert "LlamaModel" not in rows()


def test_the_script_sees_what_is_wrong(monkeypatch):
    """A softmax inside of a converted module, and padding that is lost."""
    cls = class_named("BertModel")
    original = Mechanism.__call__

    def beside(self, query, key, value, **masks):
        if isinstance(self, families.ESP):
            families.torch.softmax(query, -1)
        return original(self, query, key, value, **masks)

    monkeypatch.setattr(Mechanism, "__call__", beside)
    row = families.judge(cls)
    assert row.verdict == "wrong"
    assert "softmax was called" in row.detail
    monkeypatch.undo()
    monkeypatch.setattr("espformer.integrations.transformers._key_mask", lambda *_: None)
    row = families.judge(cls)
    assert row.verdict == "wrong"
    assert "another output" in row.detail


@pytest.mark.slow
def test_the_whole_table():
    judged = [families.judge(cls) for cls in families.classes()]
    assert families.page(judged) == PAGE
