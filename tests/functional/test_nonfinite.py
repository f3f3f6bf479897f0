"""NaN and infinity in one head of one sequence stay there, and are seen there."""

import itertools

import pytest
import torch

from espformer import esp_attention, esp_plan
from tests.compare import BACKENDS, VARIANTS, differentiate, some, tokens

NUMBERS = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS)
def options(request):
    return {"inverse_temperature": 0.7, **request.param}


def others(x: torch.Tensor) -> torch.Tensor:
    """All heads of (3, 2, ...) but the hit one, [1, 0]."""
    return torch.cat([x[0], x[1, 1:], x[2]])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tau", [0.0, 0.7])
def test_in_queries_and_keys(options, backend, masked, tau):
    """A sort has a place for NaN: the whole head must show it, hard sorting included.

    Without costs (τ = 0) nothing but the sort has seen it. Rows of padding stay zero.
    """
    query, key, value = tokens(3, 2, n=37)
    options = {**options, "backend": backend, "inverse_temperature": tau}
    options["mask"] = some(3, 37) if masked else None
    if masked:
        options["mask"][1, 5] = True
    rows = options["mask"][1] if masked else torch.ones(37, dtype=torch.bool)
    clean = differentiate(query, key, value, **options)
    clean_plan = esp_plan(query, key, **options)
    for (side, x), (called, number) in itertools.product(
        {"query": query, "key": key}.items(), NUMBERS.items()
    ):
        case = f"{called} in a {side}"
        before = x[1, 0, 5, 2].clone()
        x[1, 0, 5, 2] = number
        hit = differentiate(query, key, value, **options)
        plan = esp_plan(query, key, **options)
        x[1, 0, 5, 2] = before
        assert hit["output"][1, 0, rows].isnan().all(), case
        assert not hit["output"][1, 0, ~rows].any(), case
        for name, expected in clean.items():
            torch.testing.assert_close(
                others(hit[name]), others(expected), msg=lambda m, n=name, c=case: f"{c}, {n}: {m}"
            )
        assert plan[1, 0, rows].isnan().all(), case
        assert not plan[1, 0, ~rows].any(), case
        torch.testing.assert_close(
            others(plan), others(clean_plan), msg=lambda m, c=case: f"{c}, plan: {m}"
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("masked", [False, True])
def test_in_values(options, backend, masked):
    query, key, value = tokens(3, 2, n=37)
    options = {"backend": backend, "mask": some(3, 37) if masked else None, **options}
    if masked:
        options["mask"][1, 5] = True
    clean = differentiate(query, key, value, **options)
    for case, number in NUMBERS.items():
        value[1, 0, 5, 2] = number
        hit = differentiate(query, key, value, **options)
        assert not hit["output"][1, 0, :, 2].isfinite().all(), case
        # Columns of the values do not mix.
        torch.testing.assert_close(hit["output"][1, 0, :, :2], clean["output"][1, 0, :, :2])
        for name, expected in clean.items():
            torch.testing.assert_close(
                others(hit[name]),
                others(expected),
                msg=lambda m, n=name, c=case: f"{c}, {n}: {m}",
            )


def test_in_a_temperature_or_slices_of_one_head(options):
    query, key, value = tokens(2, 3, n=20)
    slices = torch.randn(3, 5, 4, dtype=torch.float64)
    clean = esp_attention(query, key, value, slices=slices, **options)
    slices[1, 2, 3] = torch.nan
    hit = esp_attention(query, key, value, slices=slices, **options)
    assert hit[:, 1].isnan().all()
    torch.testing.assert_close(hit[:, [0, 2]], clean[:, [0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_finite_numbers_are_not_nan(dtype):
    """The check for NaN multiplies by zero; it must not overflow on the way."""
    query, key, value = (x.to(dtype) for x in tokens(2, n=40))
    query[0, 0], key[0, 0] = 6e4, -6e4
    for options in ({"inverse_temperature": 1e-6}, {"hard": True, "inverse_temperature": 0.0}):
        found = esp_attention(query, key, value, **options)
        exact = esp_attention(*(x.double() for x in (query, key, value)), **options)
        torch.testing.assert_close(found, exact.to(dtype))
