"""What must not matter, and what must: orders, translations, scale, costs of slices."""

import pytest
import torch

from espformer import esp_attention, esp_plan
from tests.compare import BACKENDS, VARIANTS, assert_agree, differentiate, some, tokens


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS)
def options(request):
    return {"inverse_temperature": 0.7, **request.param}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("n", "m"), [(37, 37), (37, 20)], ids=["N37-M37", "N37-M20"])
def test_permuting_tokens_permutes_everything(options, backend, n, m):
    query, key, value = tokens(2, 3, n=n, m=m)
    upstream = torch.randn(2, 3, n, 3, dtype=torch.float64)
    rows, columns = torch.randperm(n), torch.randperm(m)
    options = {"backend": backend, **options}

    def everything(query, key, value, upstream):
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        out = esp_attention(*leaves, **options)
        return out.detach(), *torch.autograd.grad(out, leaves, upstream)

    plain = everything(query, key, value, upstream)
    permuted = everything(
        query[:, :, rows], key[:, :, columns], value[:, :, columns], upstream[:, :, rows]
    )
    for found, expected, order in zip(permuted, plain, (rows, rows, columns, columns), strict=True):
        torch.testing.assert_close(found, expected[:, :, order])
    torch.testing.assert_close(
        esp_plan(query[:, :, rows], key[:, :, columns], **options),
        esp_plan(query, key, **options)[:, :, rows][..., columns],
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_order_of_slices_does_not_matter(options, backend):
    query, key, value = tokens(2, n=37)
    slices, order = torch.randn(6, 4, dtype=torch.float64), torch.randperm(6)
    options = {"backend": backend, **options}
    one = differentiate(query, key, value, slices=slices, **options)
    other = differentiate(query, key, value, slices=slices[order], **options)
    one["slices"] = one["slices"][order]
    assert_agree(other, one, output=1e-12, gradients=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_and_heads_know_nothing_of_each_other(options, backend):
    query, key, value = tokens(3, 2, n=21)
    mask = some(3, 21)
    options = {"backend": backend, "slices": torch.randn(2, 5, 4).double(), **options}
    together = esp_attention(query, key, value, mask=mask, **options)
    order = torch.tensor([2, 0, 1])
    moved = esp_attention(query[order], key[order], value[order], mask=mask[order], **options)
    torch.testing.assert_close(moved, together[order])
    options["slices"] = options["slices"].flip(0)
    flipped = esp_attention(query.flip(1), key.flip(1), value.flip(1), mask=mask, **options)
    torch.testing.assert_close(flipped, together.flip(1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shift", [1.0, -50.0])
def test_moving_queries_and_keys_together(options, backend, shift):
    query, key, value = tokens(2, n=37)
    offset = shift * torch.randn(4, dtype=torch.float64)
    options = {"backend": backend, "slices": torch.randn(6, 4).double(), **options}
    plain = esp_attention(query, key, value, **options)
    moved = esp_attention(query + offset, key + offset, value, **options)
    torch.testing.assert_close(moved, plain, atol=1e-9, rtol=0)


def test_moving_a_float32_cloud_far_away_keeps_its_costs():
    """Squared norms would cancel: ‖q‖² + ‖k‖² - 2q·k of clouds a hundred radii from the origin."""
    query, key, value = (x.float() for x in tokens(2, n=64))
    query, key = (query * 64).round() / 64, (key * 64).round() / 64  # exact after the shift
    options = {"hard": True, "inverse_temperature": 5.0, "scale": 1.0, "backend": "linear"}
    plain = esp_attention(query, key, value, **options)
    moved = esp_attention(query + 128, key + 128, value, **options)
    torch.testing.assert_close(moved, plain, atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_multiplies_queries_and_keys(options, backend):
    query, key, value = tokens(2, n=37)
    options = {"backend": backend, **options}
    default = esp_attention(query, key, value, **options)
    torch.testing.assert_close(esp_attention(query, key, value, scale=0.5, **options), default)
    torch.testing.assert_close(
        esp_attention(0.5 * query, 0.5 * key, value, scale=1.0, **options), default
    )
    other = esp_attention(query, key, value, scale=2.0, **options)
    assert float((other - default).abs().max()) > 1e-3


def test_scale_and_temperature_trade():
    query, key, value = tokens(2, n=37)
    for metric, power in (("absolute", 1), ("squared", 2)):
        options = {"metric": metric, "temperature_unit": "absolute"}
        torch.testing.assert_close(
            esp_attention(query, key, value, scale=3.0, sort_temperature=0.3 * 3**power, **options),
            esp_attention(query, key, value, scale=1.0, sort_temperature=0.3, **options),
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
def test_a_large_inverse_temperature_picks_the_cheapest_slice(backend, hard):
    query, _, value = tokens(n=20)
    key = query[torch.randperm(20)] + torch.tensor([0.0, 9.0, 0.0, 0.0])
    key[:, 2:] = torch.randn(20, 2, dtype=torch.float64)
    options = {"hard": hard, "sort_temperature": 1e-3, "backend": backend}
    options["temperature_unit"] = "absolute"
    axes = torch.eye(4, dtype=torch.float64)
    alone = [esp_attention(query, key, value, slices=axes[l : l + 1], **options) for l in range(4)]
    distances = (query[:, None] - key).square().sum(-1)
    costs = [
        float((esp_plan(query, key, slices=axes[l : l + 1], **options) * distances).sum())
        for l in range(4)
    ]
    cheapest = costs.index(min(costs))
    best = esp_attention(query, key, value, inverse_temperature=1e6, **options)
    torch.testing.assert_close(best, alone[cheapest], atol=1e-9, rtol=0)
    mean = esp_attention(query, key, value, inverse_temperature=0.0, **options)
    torch.testing.assert_close(mean, torch.stack(alone).mean(0))


def test_the_output_is_linear_in_the_values(options):
    query, key, value = tokens(2, n=37)
    other = torch.randn_like(value)
    torch.testing.assert_close(
        esp_attention(query, key, 2 * value - 3 * other, **options),
        2 * esp_attention(query, key, value, **options)
        - 3 * esp_attention(query, key, other, **options),
    )


def test_flipping_a_slice_changes_nothing_without_ties(options):
    """θ and -θ define the same plan: both sorts turn around."""
    query, key, value = tokens(2, n=30)
    slices = torch.randn(5, 4, dtype=torch.float64)
    torch.testing.assert_close(
        esp_attention(query, key, value, slices=-slices, **options),
        esp_attention(query, key, value, slices=slices, **options),
    )
