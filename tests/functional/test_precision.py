"""Half, single and double precision; autocast."""

import pytest
import torch

from espformer import esp_attention, esp_plan
from tests.compare import BACKENDS, BALANCES, METRICS, VARIANTS, differentiate, some, tokens

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS)
def options(request):
    return {"inverse_temperature": 0.7, **request.param}


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("t", [1e-6, 1e-3, 0.1, 1.0])
@pytest.mark.parametrize("n", [7, 64, 257])
def test_float32_against_float64(metric, balance, t, n):
    """The same rounded inputs in both: what differs is arithmetic."""
    query, key, value = (x.float() for x in tokens(1, 2, n=n))
    options = {"metric": metric, "balance": balance, "sort_temperature": t, "scale": 0.5}
    options["temperature_unit"] = "absolute"  # in which differences are not rounded
    single = esp_attention(query, key, value, backend="linear", **options)
    double = esp_attention(query.double(), key.double(), value.double(), backend="dense", **options)
    # Halving is exact, so all that is lost is what float32 loses on differences; for |x|/t at
    # t = 1e-6 that is 6e-8 · |x| / 1e-6 of every pair nearer than t.
    bound = 1e-4 if metric == "absolute" and t == 1e-6 else 1e-5
    assert single.dtype == torch.float32
    assert float((single - double).norm() / double.norm()) < bound


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("t", [1e-6, 1e-3, 0.1])
def test_gradients_in_float32(metric, balance, t):
    inputs = [x.float() for x in tokens(1, 2, n=150)]
    options = {"metric": metric, "balance": balance, "scale": 0.5}
    options["temperature_unit"] = "absolute"
    single = differentiate(*inputs, sort_temperature=torch.tensor(t), backend="linear", **options)
    double = differentiate(
        *(x.double() for x in inputs), sort_temperature=torch.tensor(t).double(), backend="dense",
        **options,
    )  # fmt: skip
    for name, expected in double.items():
        error = (single[name] - expected).norm() / expected.norm().clamp(min=1e-6)
        assert float(error) < 2e-4, name


@HALF
def test_half_precision_is_float32_of_the_rounded_inputs(options, dtype):
    """Only the output is rounded: bit for bit."""
    inputs = [x.to(dtype) for x in tokens(3, 2, n=40)]
    mask = some(3, 40)
    out = esp_attention(*inputs, mask=mask, **options)
    expected = esp_attention(*(x.float() for x in inputs), mask=mask, **options)
    assert out.dtype == dtype
    assert torch.equal(out, expected.to(dtype))


@HALF
def test_gradients_in_half_precision(options, dtype):
    inputs = [x.to(dtype) for x in tokens(3, 2, n=40)]
    half = differentiate(*inputs, **options)
    single = differentiate(*(x.float() for x in inputs), **options)
    for name, expected in single.items():
        assert half[name].dtype == dtype
        torch.testing.assert_close(
            half[name].float(), expected, atol=1e-2 * float(expected.abs().max()), rtol=1e-2
        )


@HALF
def test_temperatures_and_slices_keep_their_own_dtype(dtype):
    inputs = [x.to(dtype) for x in tokens(2, 3, n=20)]
    leaves = {"slices": torch.randn(5, 4), "sort_temperature": torch.tensor([0.1, 0.2, 0.3])}
    result = differentiate(*inputs, **leaves)
    assert result["slices"].dtype == result["sort_temperature"].dtype == torch.float32
    expected = differentiate(*(x.float() for x in inputs), **leaves)
    assert torch.equal(result["output"], expected["output"].to(dtype))


def test_autocast_changes_nothing_inside(options):
    """A matrix product in bf16 would be off by a hundredth. (Backward runs outside, as usual.)"""
    leaves = [x.float().requires_grad_() for x in (*tokens(2, 3, n=40), torch.randn(5, 4))]

    def attend(query, key, value, slices):
        out = esp_attention(query, key, value, slices=slices, **options)
        return out, esp_plan(query, key, slices=slices, **options)

    plain = attend(*leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = attend(*leaves)
    for found, expected in zip(cast, plain, strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)
    grads, expected = (
        torch.autograd.grad(out.square().sum(), leaves[:3]) for out in (cast[0], plain[0])
    )
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_autocast_takes_what_its_layers_return():
    """Under autocast a projection returns bf16 beside float32 tokens."""
    query, key, value = (x.float() for x in tokens(2, 3, n=40))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = esp_attention(query, key.bfloat16(), value.bfloat16())
    assert out.dtype == torch.bfloat16
    expected = esp_attention(query, key.bfloat16().float(), value.bfloat16().float())
    assert torch.equal(out, expected.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_output_dtype_is_that_of_the_values(dtype):
    inputs = [x.to(dtype) for x in tokens(2, 3, n=5)]
    for backend in ("auto", "linear", "dense"):
        assert esp_attention(*inputs, backend=backend).dtype == dtype


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("t", [1e-17, 1e-19, 1e-30, 1e-39, 1e-46, 1e-300])
def test_the_sharpest_temperatures_are_hard(metric, balance, backend, t):
    """One over the width, and its derivative, would overflow float32."""
    inputs = [x.float() for x in tokens(1, 2, n=40)]
    options = {"metric": metric, "balance": balance, "backend": backend}
    hard = esp_attention(*inputs, hard=True, backend=backend)
    torch.testing.assert_close(esp_attention(*inputs, sort_temperature=t, **options), hard)
    learnt = torch.tensor(max(t, 1e-45))
    found = differentiate(*inputs, sort_temperature=learnt, **options)
    wanted = differentiate(*inputs, hard=True, backend=backend)
    wanted["sort_temperature"] = torch.zeros(())
    for name, want in wanted.items():  # no gradient through a sort that is hard
        torch.testing.assert_close(found[name], want, msg=name)


@pytest.mark.parametrize("tokens_", [20, 200])
@pytest.mark.parametrize("metric", METRICS)
def test_a_backward_under_autocast_is_that_without(tokens_, metric):
    """Several chunks or one: the operator's own products are in float32."""
    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        leaves = [x.requires_grad_() for x in torch.randn(3, 1, 2, tokens_, 4).unbind()]
        out = esp_attention(*leaves, metric=metric, backend="linear")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
    torch.testing.assert_close(*found)
