"""Linear time against Algorithm 1 as printed, in float64: outputs and every gradient."""

import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

from tests.compare import (
    BALANCES,
    COUPLINGS,
    KINDS,
    METRICS,
    assert_linear_is_dense,
    cloud,
    some,
    tokens,
)

# The whole range in which t is used: 1e-3 falls to 1e-7 when a model is sharpened.
TEMPERATURES = (1e-6, 1e-3, 0.1, 10.0)
INVERSE_TEMPERATURES = (0.0, 0.1, 10.0)
SHAPES = [
    (2, 2, 1, 1),
    (1, 3, 2, 2),
    (2, 2, 3, 3),
    (1, 2, 31, 31),
    (1, 2, 33, 33),
    (1, 1, 65, 65),
    (1, 1, 257, 257),
    (2, 2, 1, 5),
    (2, 2, 5, 1),
    (1, 2, 63, 40),
    (1, 2, 40, 63),
    (1, 1, 130, 97),
]
SHAPE_IDS = [f"B{b}-H{h}-N{n}-M{m}" for b, h, n, m in SHAPES]


def temperature(number: float) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float64)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize(("batch", "heads", "n", "m"), SHAPES, ids=SHAPE_IDS)
def test_sizes_and_temperatures(batch, heads, n, m, metric, balance):
    query, key, value = tokens(batch, heads, n=n, m=m)
    # Every sort temperature with two of the inverse temperatures, and each of those several times.
    pairs = zip(TEMPERATURES * 2, itertools.cycle(INVERSE_TEMPERATURES))
    for t, tau in pairs if n < 100 else ((t, 0.1) for t in TEMPERATURES):
        assert_linear_is_dense(
            query, key, value, metric=metric, balance=balance,
            sort_temperature=temperature(t), inverse_temperature=tau,
        )  # fmt: skip


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize(
    ("n", "m"),
    [(63, 40), (40, 63), (2, 33), (35, 3)],
    ids=["N63-M40", "N40-M63", "N2-M33", "N35-M3"],
)
def test_couplings(metric, balance, coupling, n, m):
    query, key, value = tokens(2, 2, n=n, m=m)
    for t in (1e-3, 0.3):
        assert_linear_is_dense(
            query, key, value, metric=metric, balance=balance, coupling=coupling,
            sort_temperature=temperature(t), inverse_temperature=0.5,
        )  # fmt: skip


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("masks", ["key", "query", "both", "heads"])
@pytest.mark.parametrize(
    ("n", "m"), [(41, 41), (63, 40), (33, 70)], ids=["N41-M41", "N63-M40", "N33-M70"]
)
def test_masks(metric, balance, masks, n, m):
    query, key, value = tokens(4, 2, n=n, m=m)
    options = {}
    if masks != "query":
        options["key_mask"] = some(4, 2, m) if masks == "heads" else some(4, m)
        options["key_mask"][-1] = False
    if masks != "key":
        options["query_mask"] = some(4, 2, n) if masks == "heads" else some(4, n)
        options["query_mask"][0] = False
    if masks == "key" and n == m:
        options = {"mask": options["key_mask"]}
    for t in (1e-3, 0.3):
        assert_linear_is_dense(
            query, key, value, metric=metric, balance=balance,
            sort_temperature=temperature(t), inverse_temperature=0.5, **options,
        )  # fmt: skip


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("shape", [(1, 4), (9, 4), (3, 5, 4), (2, 3, 2, 4)], ids=str)
def test_slices(metric, balance, shape):
    query, key, value = tokens(2, 3, n=37)
    slices = torch.nn.functional.normalize(torch.randn(shape, dtype=torch.float64), dim=-1)
    for tau in INVERSE_TEMPERATURES:
        assert_linear_is_dense(
            query, key, value, metric=metric, balance=balance, slices=slices,
            inverse_temperature=tau,
        )  # fmt: skip


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1), (2, 3)], ids=str)
def test_temperatures_per_head(metric, balance, shape):
    query, key, value = tokens(2, 3, n=37)
    own = torch.rand(shape, dtype=torch.float64) + 0.05
    assert_linear_is_dense(
        query, key, value, metric=metric, balance=balance, sort_temperature=own,
        slices=torch.randn(5, 4, dtype=torch.float64), inverse_temperature=0.5,
    )  # fmt: skip


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("n", [40, 100])
def test_tied_tokens(metric, balance, n):
    """Half of the tokens are copies, as blank patches of an image are; and rounded coordinates."""
    query, key, value = tokens(2, n=n)
    query[:, ::2], key[:, ::2] = query[:, :1], key[:, :1]
    for q, k in ((query, key), (query.round(), key.round()), (query, query)):
        assert_linear_is_dense(
            q, k, value, metric=metric, balance=balance,
            sort_temperature=temperature(0.1), inverse_temperature=0.5,
        )  # fmt: skip


@pytest.mark.parametrize("ties", ["stable", "average"])
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize(
    ("n", "m"), [(1, 1), (41, 41), (63, 40), (7, 33)], ids=["N1-M1", "N41-M41", "N63-M40", "N7-M33"]
)
@pytest.mark.parametrize("masked", [False, True])
def test_hard(ties, coupling, n, m, masked):
    query, key, value = tokens(3, 2, n=n, m=m)
    masks = {"mask" if n == m else "key_mask": some(3, m)} if masked else {}
    for tau in INVERSE_TEMPERATURES:
        for q, k in ((query, key), (query.round(), key.round())):
            assert_linear_is_dense(
                q, k, value, hard=True, ties=ties, coupling=coupling,
                inverse_temperature=tau, **masks,
            )  # fmt: skip


@settings(max_examples=120)
@given(
    metric=st.sampled_from(METRICS),
    balance=st.sampled_from(BALANCES),
    hard=st.sampled_from((False, False, False, True)),
    ties=st.sampled_from(("stable", "average")),
    coupling=st.sampled_from(COUPLINGS),
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    n=st.integers(1, 80),
    m=st.one_of(st.none(), st.integers(1, 80)),
    head_dim=st.integers(1, 5),
    slices=st.integers(0, 4),
    masked=st.booleans(),
    exponent=st.floats(-6, 1),
    tau=st.sampled_from((0.0, 0.1, 1.0)),
    seed=st.integers(0, 2**20),
)
@example(  # forces that cancel, between numbers around 5 that differ in their last digits
    metric="absolute", balance="both", hard=False, ties="stable", coupling="quantile",
    kinds=("narrow", "normal"), n=3, m=1, head_dim=1, slices=0, masked=False, exponent=0.0,
    tau=0.0, seed=0,
)  # fmt: skip
@example(  # the same numbers through a narrow Gaussian
    metric="squared", balance="rows", hard=False, ties="stable", coupling="quantile",
    kinds=("narrow", "normal"), n=44, m=4, head_dim=3, slices=0, masked=False, exponent=-3.0,
    tau=0.0, seed=69743,
)  # fmt: skip
def test_any_call(
    metric, balance, hard, ties, coupling, kinds, n, m, head_dim, slices, masked, exponent, tau,
    seed,
):  # fmt: skip
    torch.manual_seed(seed)
    m = n if m is None else m
    query, key = cloud(kinds[0], 2, n, head_dim), cloud(kinds[1], 2, m, head_dim)
    value = torch.randn(2, m, 2, dtype=torch.float64)
    # Weights are exp(-τ D): a cost of a million leaves fewer digits than a cost of one.
    spread = float((query.unsqueeze(-2) - key.unsqueeze(-3)).square().sum(-1).max()) / head_dim
    assert_linear_is_dense(
        query, key, value, metric=metric, balance=balance, hard=hard, ties=ties,
        coupling=coupling, sort_temperature=temperature(10.0**exponent), inverse_temperature=tau,
        slices=torch.randn(slices, head_dim, dtype=torch.float64) if slices else None,
        query_mask=some(2, n) if masked else None, key_mask=some(2, m) if masked else None,
        slack=1 + tau * spread,
    )  # fmt: skip
