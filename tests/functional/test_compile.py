"""torch.compile: the same numbers, and one graph."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from espformer import esp_attention
from espformer.ops.esp.options import KERNEL_OPTIONS, ESPOptions
from tests.compare import BACKENDS, assert_agree, differentiate, some, tokens

CASES = {
    "linear": {"backend": "linear"},
    "linear-squared-masked": {"backend": "linear", "metric": "squared", "masked": True},
    "linear-hard": {"backend": "linear", "hard": True, "ties": "average", "masked": True},
    "dense": {"backend": "dense"},
}
if "cpu" in BACKENDS:
    CASES["cpu"] = {"backend": "cpu"}
    CASES["cpu-squared-masked"] = {"backend": "cpu", "metric": "squared", "masked": True}
    CASES["cpu-hard"] = {"backend": "cpu", "hard": True, "ties": "average", "masked": True}


@pytest.fixture(autouse=True)
def _poisoned_buffers():
    """Takes the place of the fixture that wraps ``torch.empty``: a wrapped one is not traced."""


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_is_eager(monkeypatch, compiler, masked=False, **options):
    options |= {"mask": some(2, 40) if masked else None}
    inputs = tokens(2, 2, n=40)
    expected = differentiate(*inputs, **options)
    compiled = torch.compile(esp_attention, backend=compiler, fullgraph=True)
    monkeypatch.setattr("tests.compare.esp_attention", compiled)
    assert_agree(differentiate(*inputs, **options), expected, output=1e-12, gradients=1e-10)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_compiled_is_eager(case, monkeypatch):
    compiled_is_eager(monkeypatch, "eager", **{"inverse_temperature": 0.7, **case})


GROUPED = {
    "soft": {},
    "masked-squared": {"metric": "squared", "masked": True},
    "learnt": {
        "slices": torch.randn(2, 5, 4, dtype=torch.float64),
        "sort_temperature": torch.tensor([0.1, 0.3], dtype=torch.float64),
        "balance": "both",
    },
    "straight-through": {"straight_through": 0.5},
    "hard": {"hard": True},
    "hard-without-costs": {"hard": True, "inverse_temperature": 0.0},
}


@pytest.mark.parametrize("case", GROUPED.values(), ids=GROUPED)
def test_many_groups_of_slices_are_one_operator(case, monkeypatch):
    """A backward that computes groups again cannot be traced: it stays inside."""
    monkeypatch.setattr("espformer.ops.esp.linear.GROUP_ELEMENTS", 400)
    options = {"inverse_temperature": 0.7, "backend": "linear", **case}
    compiled_is_eager(monkeypatch, "aot_eager", **options)


def test_lengths_and_temperatures_share_a_graph():
    count = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(esp_attention, backend=count, fullgraph=True, dynamic=True)
    for n in (20, 33, 40, 150):
        inputs, options = tokens(2, n=n), {"sort_temperature": 1 / n}
        torch.testing.assert_close(compiled(*inputs, **options), esp_attention(*inputs, **options))
    assert count.frame_count <= 2  # a number is fixed until it changes


def test_a_falling_temperature_is_compiled_once_more():
    count = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(esp_attention, backend=count, fullgraph=True)
    inputs = tokens(1, n=5)
    for t in (0.1, 0.08, 0.064, 0.0512):
        options = {"sort_temperature": t, "backend": "linear"}
        torch.testing.assert_close(compiled(*inputs, **options), esp_attention(*inputs, **options))
    assert count.frame_count == 2


def test_the_operator_keeps_the_rules_of_torch():
    query, key, value = (x.requires_grad_() for x in tokens(2, n=7))
    mask = some(2, 7)
    options = ESPOptions(scale=0.5, inverse_temperature=0.7)
    settings = [getattr(options, name) for name in KERNEL_OPTIONS]
    arguments = (
        query, key, value, None, torch.randn(2, 4).double(), torch.tensor([0.1, 0.3]).double(),
        mask, mask, None, True, "", *settings,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.espformer.linear, arguments)
    upstream = torch.ones_like(value).detach()
    arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    needed = [True, False, True, False, True, True]
    torch.library.opcheck(torch.ops.espformer.linear_backward, (upstream, needed, *arguments))


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


def test_gradients_that_are_zero_keep_the_rules_of_torch_too():
    """Nothing goes through a hard sort: zeros, laid out as promised, also for a strided query."""
    query, key, value = tokens(2, n=7)
    options = ESPOptions(scale=0.5, hard=True)
    settings = [getattr(options, name) for name in KERNEL_OPTIONS]
    arguments = (
        query.mT.contiguous().mT, key, value, None, None, torch.tensor([0.1, 0.3]).double(),
        None, None, None, True, "", *settings,
    )  # fmt: skip
    needed = [True, False, False, False, False, False]
    upstream = torch.ones_like(value)
    torch.library.opcheck(torch.ops.espformer.linear_backward, (upstream, needed, *arguments))
