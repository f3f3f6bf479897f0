"""Optimisers and learning rates are those that the recipe names."""

import math

import pytest
import torch
from torch import nn

from espformer.lab.recipes.schema import Optimizer, Schedule
from espformer.lab.training.optimizers import learning_rate_factor, make_optimizer, make_schedule
from espformer.nn import ESP, Attention
from espformer.nn.parameters import MECHANISM_RATE


@pytest.mark.parametrize(
    ("name", "kind"),
    [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)],
)
def test_learnt_temperatures_have_their_own_group(name, kind):
    model = nn.Sequential(Attention(8, 2, ESP(learn_temperature=True)), nn.Linear(8, 2))
    config = Optimizer(name=name, learning_rate=1e-2, weight_decay=0.1)
    optimizer = make_optimizer(model, config)
    assert type(optimizer) is kind
    weights, temperatures = optimizer.param_groups
    assert (weights["lr"], weights["weight_decay"]) == (1e-2, 0.1)
    assert temperatures["lr"] == pytest.approx(1e-2 * MECHANISM_RATE)
    assert temperatures["weight_decay"] == 0
    assert temperatures["params"] == [model[0].mechanism.log_sort_temperature]
    assert len(weights["params"]) + 1 == len(list(model.parameters()))


def test_no_group_for_what_is_not_there():
    assert len(make_optimizer(nn.Linear(2, 2), Optimizer()).param_groups) == 1


def test_milestones_are_epochs_after_which_the_rate_falls():
    unit, factor = learning_rate_factor(Schedule(name="milestones", milestones=[35, 41]), 1e-3)
    assert unit == "epoch"
    assert [factor(e) for e in (0, 34, 35, 40, 41, 44)] == pytest.approx(
        [1, 1, 0.1, 0.1, 0.01, 0.01]
    )
    unit, factor = learning_rate_factor(Schedule(), 1e-3)
    assert factor(1000) == 1


def test_inverse_square_root_as_fairseq_has_it():
    """lr(s) = from + s (lr - from) / w up to step w, then lr √(w / s)."""
    rate, start, warmup = 5e-4, 1e-7, 4000
    config = Schedule(name="inverse_sqrt", warmup_steps=warmup, warmup_from=start)
    unit, factor = learning_rate_factor(config, rate)
    assert unit == "step"
    assert factor(0) * rate == pytest.approx(start)
    assert factor(1000) * rate == pytest.approx(start + 1000 * (rate - start) / warmup)
    assert factor(warmup) == pytest.approx(1)
    assert factor(4 * warmup) == pytest.approx(0.5)
    later = Schedule(name="inverse_sqrt", warmup_steps=warmup, first_step=16000)
    assert learning_rate_factor(later, rate)[1](0) == pytest.approx(0.5)
    assert not math.isnan(factor(10**7))


def test_schedule_moves_all_groups():
    model = Attention(8, 2, ESP(learn_temperature=True))
    optimizer = make_optimizer(model, Optimizer(learning_rate=1e-2))
    scheduler = make_schedule(optimizer, Schedule(name="milestones", milestones=[1]), 1e-2)
    optimizer.step()
    scheduler["scheduler"].step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
        [1e-3, 1e-3 * MECHANISM_RATE]
    )
