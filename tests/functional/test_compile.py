"""torch.compile: the same numbers, and one graph."""

import pytest
import torch

from espformer import esp_attention
from tests.compare import assert_agree, differentiate, some, tokens

CASES = {
    "linear": {"backend": "linear"},
    "linear-squared-masked": {"backend": "linear", "metric": "squared", "masked": True},
    "linear-hard": {"backend": "linear", "hard": True, "ties": "average", "masked": True},
    "dense": {"backend": "dense"},
}


@pytest.fixture(autouse=True)
def _poisoned_buffers():
    """Takes the place of the fixture that wraps ``torch.empty``: a wrapped one is not traced."""


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_compiled_is_eager(case, monkeypatch):
    options = {"inverse_temperature": 0.7, **case}
    options["key_mask"] = some(2, 40) if options.pop("masked", False) else None
    inputs = tokens(2, 2, n=40)
    expected = differentiate(*inputs, **options)
    compiled = torch.compile(esp_attention, backend="eager", fullgraph=True)
    monkeypatch.setattr("tests.compare.esp_attention", compiled)
    assert_agree(differentiate(*inputs, **options), expected, output=1e-12, gradients=1e-10)


def test_breaks_in_the_graph_do_no_harm(monkeypatch):
    inputs = tokens(2, 2, n=20)
    temperature = torch.tensor([0.1, 0.3], dtype=torch.float64)
    options = {"straight_through": 0.5, "sort_temperature": temperature, "slice_dropout": 0.5}
    torch.manual_seed(5)
    expected = differentiate(*inputs, **options)
    monkeypatch.setattr(
        "tests.compare.esp_attention", torch.compile(esp_attention, backend="eager")
    )
    torch.manual_seed(5)
    assert_agree(differentiate(*inputs, **options), expected, output=1e-12, gradients=1e-10)
