"""Dropout of slices: which stay, and how they are weighed."""

import pytest
import torch

from espformer import esp_attention
from espformer.ops.esp.problem import Problem
from tests.compare import BACKENDS, differentiate, tokens


def slice_shares(out: torch.Tensor, alone: list[torch.Tensor]) -> torch.Tensor:
    """The weights with which the outputs of single slices add up to ``out``: least squares."""
    columns = torch.stack([x.flatten() for x in alone], -1)
    return torch.linalg.lstsq(columns, out.flatten().unsqueeze(-1)).solution.squeeze(-1)


@pytest.fixture
def case():
    query, key, value = tokens(n=30, head_dim=6)
    alone = [
        esp_attention(query, key, value, slices=axis[None])
        for axis in torch.eye(6, dtype=torch.float64)
    ]
    return query, key, value, alone


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tau", [0.0, 1.5])
@pytest.mark.parametrize("probability", [0.3, 0.7, 0.999])
def test_weights_of_the_others_are_renormalised(case, backend, tau, probability):
    query, key, value, alone = case
    options = {"inverse_temperature": tau, "backend": backend}
    full = slice_shares(esp_attention(query, key, value, **options), alone)
    seen = set()
    for seed in range(10):
        torch.manual_seed(seed)
        out = esp_attention(query, key, value, slice_dropout=probability, **options)
        shares = slice_shares(out, alone)
        kept = shares > 1e-6
        assert kept.any()
        expected = torch.where(kept, full, 0) / full[kept].sum()
        torch.testing.assert_close(shares, expected, atol=1e-8, rtol=0)
        seen.add(tuple(kept.tolist()))
    assert len(seen) > 3
    if probability > 0.99:  # one slice always stays
        assert {sum(kept) for kept in seen} == {1}


def test_seeds_decide(case):
    query, key, value, _ = case

    def draw(seed):
        torch.manual_seed(seed)
        return esp_attention(query, key, value, slice_dropout=0.5)

    assert torch.equal(draw(7), draw(7))
    assert any(not torch.equal(draw(7), draw(seed)) for seed in range(5))


def test_heads_and_sequences_drop_their_own_slices():
    query, key, value = tokens(n=20, head_dim=6)
    same = [x.expand(4, 5, *x.shape) for x in (query, key, value)]
    out = esp_attention(*same, slice_dropout=0.5).flatten(0, 1)
    assert len({tuple(x.flatten().tolist()) for x in out.round(decimals=9)}) > 5


def test_zero_changes_nothing_and_draws_nothing(case):
    query, key, value, _ = case
    state = torch.random.get_rng_state()
    plain = esp_attention(query, key, value)
    assert torch.equal(esp_attention(query, key, value, slice_dropout=0.0), plain)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_the_probability_is_that_of_leaving_out(probability, monkeypatch):
    weights = []
    slice_weights = Problem.slice_weights

    def watch(problem, costs):
        weights.append(slice_weights(problem, costs))
        return weights[-1]

    monkeypatch.setattr(Problem, "slice_weights", watch)
    query, key, value = (x.expand(200, *x.shape) for x in tokens(n=3, head_dim=50))
    esp_attention(query, key, value, slice_dropout=probability, backend="linear")
    kept = (weights[0] > 0).double().mean()
    assert float(kept) == pytest.approx(1 - probability, abs=0.02)
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(200, dtype=torch.float64))


def test_gradients_of_dropped_slices_are_zero(case):
    query, key, value, _ = case
    slices = torch.randn(8, 6, dtype=torch.float64)
    torch.manual_seed(0)
    results = differentiate(query, key, value, slices=slices, slice_dropout=0.6)
    dropped = results["slices"].abs().sum(-1) == 0
    assert 0 < int(dropped.sum()) < 8
    assert not results["slices"][dropped].any()
    kept = differentiate(query, key, value, slices=slices[~dropped])
    for name, want in kept.items():
        found = results[name][~dropped] if name == "slices" else results[name]
        torch.testing.assert_close(found, want, msg=name)
