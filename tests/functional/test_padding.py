"""Masks: every sequence of a padded batch is a measure of its own."""

import pytest
import torch

from espformer import esp_attention, esp_plan
from tests.compare import (
    BACKENDS,
    BALANCES,
    COUPLINGS,
    METRICS,
    VARIANTS,
    assert_agree,
    differentiate,
    some,
    tokens,
)

VARIANTS = {**VARIANTS, "squared-both": {"metric": "squared", "balance": "both"}}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS)
def options(request):
    return {"inverse_temperature": 0.7, **request.param}


def alone(query, key, value, query_mask, key_mask, options):
    """Every sequence by itself, put back at the places of its tokens; all gradients too."""
    parts = []
    for b in range(len(query)):
        rows, columns = query_mask[b], key_mask[b]
        full = {
            "output": torch.zeros(query.shape[1], query.shape[2], value.shape[3]).double(),
            "query": torch.zeros_like(query[b]),
            "key": torch.zeros_like(key[b]),
            "value": torch.zeros_like(value[b]),
        }
        if rows.any() and columns.any():
            leaves = [
                x.clone().requires_grad_()
                for x in (query[b][:, rows], key[b][:, columns], value[b][:, columns])
            ]
            out = esp_attention(*leaves, **options)
            upstream = upstream_like(full["output"], len(query), b)[:, rows]
            grads = torch.autograd.grad(out, leaves, upstream)
            full["output"][:, rows] = out.detach()
            for name, place, grad in zip(
                ("query", "key", "value"), (rows, columns, columns), grads, strict=True
            ):
                full[name][:, place] = grad
        parts.append(full)
    return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


def upstream_like(output, batch, b):
    """What ``differentiate`` sends back to sequence b of the padded batch."""
    whole = torch.sin(torch.arange(batch * output.numel()) + 1.0).double()
    return whole.view(batch, *output.shape)[b]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["suffix", "anywhere"])
def test_self_attention_is_each_sequence_alone(options, backend, where):
    query, key, value = tokens(5, 2, n=41)
    mask = some(5, 41)
    if where == "suffix":
        mask = torch.arange(41) < torch.tensor([41, 1, 40, 2, 33])[:, None]
    mask[4] = False  # nobody
    padded = differentiate(query, key, value, mask=mask, backend=backend, **options)
    expected = alone(query, key, value, mask, mask, {"backend": backend, **options})
    assert_agree(padded, expected, output=1e-10, gradients=1e-8)


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_cross_attention_is_each_sequence_alone(options, coupling, backend):
    query, key, value = tokens(5, 2, n=35, m=50)
    masks = {"query_mask": some(5, 35), "key_mask": some(5, 50)}
    masks["query_mask"][3], masks["key_mask"][4] = False, False
    options = {"coupling": coupling, "backend": backend, **options}
    padded = differentiate(query, key, value, **masks, **options)
    expected = alone(query, key, value, *masks.values(), options)
    assert_agree(padded, expected, output=1e-10, gradients=1e-8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf, 1e300], ids=str)
def test_what_padding_holds_does_not_matter(options, backend, garbage):
    query, key, value = tokens(3, 2, n=35, m=20)
    masks = {"query_mask": some(3, 35), "key_mask": some(3, 20)}
    masks["query_mask"][1] = False
    options = {"backend": backend, **masks, **options}
    clean = differentiate(query, key, value, **options)
    gone_q, gone_k = ~masks["query_mask"][:, None, :, None], ~masks["key_mask"][:, None, :, None]
    dirty = differentiate(
        query.masked_fill(gone_q, garbage),
        key.masked_fill(gone_k, garbage),
        value.masked_fill(gone_k, garbage),
        **options,
    )
    for name, expected in clean.items():
        assert torch.equal(dirty[name], expected), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("side", ["query_mask", "key_mask", "both"])
def test_nobody_gives_zeros_and_zero_gradients(options, backend, side):
    query, key, value = tokens(2, 2, n=9)
    nobody = torch.ones(2, 9, dtype=torch.bool)
    nobody[1] = False
    masks = {"query_mask": torch.ones_like(nobody), "key_mask": torch.ones_like(nobody)}
    masks |= {name: nobody for name in masks if side in (name, "both")}
    result = differentiate(query, key, value, backend=backend, **masks, **options)
    alone = differentiate(query[:1], key[:1], value[:1], backend=backend, **options)
    for name, numbers in result.items():
        torch.testing.assert_close(numbers[:1], alone[name], msg=name)
        assert not numbers[1].any(), name
    assert result["output"][0].abs().max() > 0.01


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_mask_is_no_mask(options, backend):
    query, key, value = tokens(2, 2, n=33)
    full = torch.ones(2, 33, dtype=torch.bool)
    masked = differentiate(query, key, value, mask=full, backend=backend, **options)
    plain = differentiate(query, key, value, backend=backend, **options)
    assert_agree(masked, plain, output=1e-12, gradients=1e-10)


@pytest.mark.parametrize("balance", BALANCES)
def test_one_mask_masks_queries_and_keys(balance):
    query, key, value = tokens(3, 2, n=12)
    mask = some(3, 12)
    once = esp_attention(query, key, value, mask=mask, balance=balance)
    both = esp_attention(query, key, value, key_mask=mask, query_mask=mask, balance=balance)
    assert torch.equal(once, both)
    assert not once.masked_select(~mask[:, None, :, None]).any()


def test_keys_alone_are_masked_if_the_query_mask_says_so():
    query, key, value = tokens(3, 2, n=12)
    mask, everybody = some(3, 12), torch.ones(3, 12, dtype=torch.bool)
    out = esp_attention(query, key, value, key_mask=mask, query_mask=everybody, hard=True)
    ones = esp_attention(
        query, key, torch.ones_like(value), key_mask=mask, query_mask=everybody, hard=True
    )
    assert out.abs().amin(-1).min() > 0
    torch.testing.assert_close(ones, torch.ones_like(ones))


@pytest.mark.parametrize("metric", METRICS)
def test_the_padding_mask_of_scaled_dot_product_attention(metric):
    query, key, value = tokens(3, 2, n=12)
    mask = some(3, 12)
    torch.testing.assert_close(
        esp_attention(query, key, value, attn_mask=mask[:, None, None], metric=metric),
        esp_attention(query, key, value, mask=mask, metric=metric),
    )
    fewer = query[:, :, :7]
    torch.testing.assert_close(
        esp_attention(fewer, key, value, attn_mask=mask[:, None, None], metric=metric),
        esp_attention(fewer, key, value, key_mask=mask, metric=metric),
    )


def test_plans_have_zero_rows_and_columns_at_padding(options):
    query, key, _ = tokens(3, 2, n=12, m=9)
    query_mask, key_mask = some(3, 12), some(3, 9)
    plan = esp_plan(query, key, query_mask=query_mask, key_mask=key_mask, **options)
    assert not plan.masked_select(~query_mask[:, None, :, None]).any()
    assert not plan.masked_select(~key_mask[:, None, None]).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_costs_do_not_cancel_where_tokens_stand_far_from_the_origin(backend):
    """Clouds are moved to the origin, by the mean of the keys that take part and no others."""
    query, key, value = (torch.randn(1, 2, 160, 8) + 300 for _ in range(3))
    mask = torch.arange(160)[None] < 16
    options = {"inverse_temperature": 10.0, "backend": backend}
    padded = esp_attention(query, key, value - 300, mask=mask, **options)[:, :, :16]
    alone = (x[:, :, :16].double() for x in (query, key, value - 300))
    expected = esp_attention(*alone, inverse_temperature=10.0, backend="dense")
    assert (padded - expected).abs().max() < 1e-3
