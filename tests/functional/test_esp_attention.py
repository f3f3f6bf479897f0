"""How attention is called: shapes, defaults, backends, memory layouts, torch.compile."""

import inspect
import itertools

import pytest
import torch

import espformer
from espformer import esp_attention, esp_plan
from tests.compare import (
    BACKENDS,
    COUPLINGS,
    LINEAR_TIME,
    VARIANTS,
    assert_agree,
    differentiate,
    some,
    tokens,
)


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS)
def options(request):
    return request.param


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3), (1, 1, 1, 2)], ids=str)
def test_any_leading_dimensions(options, backend, lead):
    query, key, value = tokens(*lead, n=13, m=9, width=5)
    options = {"backend": backend, **options}
    out = esp_attention(query, key, value, **options)
    assert out.shape == (*lead, 13, 5)
    flat = [x.reshape(-1, *x.shape[-2:]) for x in (query, key, value)]
    for one, q, k, v in zip(out.reshape(-1, 13, 5), *flat, strict=True):
        torch.testing.assert_close(one, esp_attention(q, k, v, **options))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((2, 3), (1, 3), (1, 3)),
        ((2, 3), (3,), (3,)),
        ((2, 3), (), ()),
        ((1, 1), (2, 3), (2, 1)),
        ((3,), (2, 1), (2, 3)),
        ((), (), (2, 3)),
    ],
    ids=str,
)
def test_leading_dimensions_broadcast(options, backend, q, k, v):
    query, key, value = (x.clone() for x in tokens(2, 3, n=13, m=9, width=5))
    full = torch.broadcast_shapes(q, k, v)
    query, key, value = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)

    def pick(x, lead):
        return x[: torch.Size(lead).numel()].view(*lead, *x.shape[-2:])

    query, key, value = pick(query, q), pick(key, k), pick(value, v)
    broadcast = differentiate(query, key, value, backend=backend, **options)
    expanded = [x.expand(*full, *x.shape[-2:]).contiguous() for x in (query, key, value)]
    expected = differentiate(*expanded, backend=backend, **options)
    for name, x in (("query", query), ("key", key), ("value", value)):
        expected[name] = expected[name].sum_to_size(x.shape)
    assert_agree(broadcast, expected, output=1e-12, gradients=1e-10)


@pytest.mark.parametrize("shape", [(2, 12), (2, 1, 12), (2, 3, 12)], ids=str)
def test_masks_of_every_accepted_shape(options, shape):
    query, key, value = tokens(2, 3, n=12)
    mask = some(*shape)
    full = mask if mask.ndim == 3 else mask[:, None]
    torch.testing.assert_close(
        esp_attention(query, key, value, mask=mask, **options),
        esp_attention(query, key, value, mask=full.expand(2, 3, 12), **options),
    )


def test_a_mask_without_a_batch(options):
    query, key, value = tokens(n=12)
    mask = some(12)
    torch.testing.assert_close(
        esp_attention(query, key, value, mask=mask, **options)[mask],
        esp_attention(query[mask], key[mask], value[mask], **options),
    )


def test_an_empty_batch(options):
    query, key, value = tokens(0, 3, n=40, m=7)
    for backend in BACKENDS:
        result = differentiate(query, key, value, backend=backend, **options)
        assert result["output"].shape == (0, 3, 40, 3)
        assert esp_plan(query, key, backend=backend, **options).shape == (0, 3, 40, 7)


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "channels-last"])
def test_non_contiguous_inputs(options, layout):
    query, key, value = tokens(2, 3, n=37)
    change = {
        "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "strided": lambda x: torch.stack([x, -x], -1)[..., 0],
        "expanded": lambda x: x[:1].expand(2, -1, -1, -1),
        "channels-last": lambda x: x.mT.contiguous().mT,
    }[layout]
    changed = [change(x) for x in (query, key, value)]
    assert not all(x.is_contiguous() for x in changed)
    expected = esp_attention(*(x.contiguous() for x in changed), **options)
    torch.testing.assert_close(esp_attention(*changed, **options), expected)
    masks = {"mask": some(37, 2).T}
    torch.testing.assert_close(
        esp_attention(*changed, **masks, **options),
        esp_attention(*changed, mask=masks["mask"].contiguous(), **options),
    )


def test_inputs_are_left_alone(options):
    inputs = tokens(2, 3, n=37)
    copies = [x.clone() for x in inputs]
    mask = some(2, 37)
    differentiate(*inputs, mask=mask, slice_dropout=0.3, **options)
    esp_attention(*inputs, mask=mask, **options)
    assert all(torch.equal(x, copy) for x, copy in zip(inputs, copies, strict=True))


def test_inference_mode_and_no_grad(options):
    query, key, value = tokens(2, 3, n=70)
    expected = esp_attention(query, key, value, **options)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(esp_attention(query, key, value, **options), expected)


def test_a_graph_can_be_walked_twice(options):
    query, key, value = tokens(2, n=40)
    value.requires_grad_()
    query.requires_grad_()
    out = esp_attention(query, key, value, **{"inverse_temperature": 0.1} | options)
    one = torch.autograd.grad(out.sum(), (query, value), retain_graph=True)
    two = torch.autograd.grad(out.sum(), (query, value))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_temperature_as_number_and_as_tensor():
    query, key, value = tokens(2, 3, n=20)
    expected = esp_attention(query, key, value, sort_temperature=0.25)
    for t in (torch.tensor(0.25), torch.full((3,), 0.25), torch.full((2, 1), 0.25)):
        torch.testing.assert_close(esp_attention(query, key, value, sort_temperature=t), expected)
    for own in (torch.tensor([0.1, 0.25, 2.0]), torch.rand(2, 3) + 0.05):
        out = esp_attention(query, key, value, sort_temperature=own)
        for b, h in itertools.product(range(2), range(3)):
            alone = [x[b, h] for x in (query, key, value)]
            t = float(own.expand(2, 3)[b, h])
            torch.testing.assert_close(out[b, h], esp_attention(*alone, sort_temperature=t))


def test_slices_per_head():
    query, key, value = tokens(2, 3, n=20)
    slices = torch.randn(3, 5, 4, dtype=torch.float64)
    out = esp_attention(query, key, value, slices=slices)
    for h in range(3):
        torch.testing.assert_close(
            out[:, h], esp_attention(query[:, h], key[:, h], value[:, h], slices=slices[h])
        )


def test_axes_are_the_default_slices(options):
    query, key, value = tokens(2, 3, n=20)
    torch.testing.assert_close(
        esp_attention(query, key, value, slices=torch.eye(4, dtype=torch.float64), **options),
        esp_attention(query, key, value, **options),
    )


def test_couplings_matter_only_for_unequal_lengths(options):
    query, key, value = tokens(2, n=20)
    same = [esp_attention(query, key, value, coupling=c, **options) for c in COUPLINGS]
    assert all(torch.equal(same[0], x) for x in same)
    other = [
        esp_attention(query, key[:, :13], value[:, :13], coupling=c, **options) for c in COUPLINGS
    ]
    assert not torch.allclose(other[0], other[1])
    assert not torch.allclose(other[1], other[2])


def test_auto_is_the_fastest_that_runs_on_a_cpu(options):
    query, key, value = tokens(2, n=40)
    assert torch.equal(
        esp_attention(query, key, value, backend="auto", **options),
        esp_attention(query, key, value, backend=LINEAR_TIME[-1], **options),
    )


def test_both_functions_take_the_same_options():
    attention = dict(inspect.signature(esp_attention).parameters)
    plan = dict(inspect.signature(esp_plan).parameters)
    for name in ("value", "attn_mask"):
        del attention[name]
    assert {name: (p.default, p.kind) for name, p in attention.items()} == {
        name: (p.default, p.kind) for name, p in plan.items()
    }
    assert espformer.esp_attention is esp_attention


def test_defaults_are_the_documented_ones():
    query, key, value = tokens(2, 3, n=20)
    spelled_out = esp_attention(
        query, key, value, sort_temperature=0.3, temperature_unit="spread",
        inverse_temperature=0.0, metric="absolute", balance="rows", hard=False,
        straight_through=False, ties="stable", coupling="quantile", slices=None,
        slice_logits=None, query_mask=None, key_mask=None, scale=0.5, slice_dropout=0.0,
        backend="auto",
    )  # fmt: skip
    assert torch.equal(esp_attention(query, key, value), spelled_out)
