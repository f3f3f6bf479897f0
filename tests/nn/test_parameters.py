"""What mechanisms learn has a learning rate of its own."""

import pytest
import torch

from espformer.nn import ESP, Attention, Differential, Softmax, parameter_groups


def test_every_parameter_is_in_one_group():
    mechanism = Differential(ESP(learn_temperature=True, learn_slice_weights=True))
    model = torch.nn.Sequential(Attention(16, 2, mechanism), Attention(16, 2, Softmax()))
    others, own = parameter_groups(model, lr=0.1, weight_decay=0.2, rate=5)
    base = model[0].mechanism.base
    assert {id(p) for p in own["params"]} == {id(base.log_sort_temperature), id(base.slice_logits)}
    assert len(own["params"]) + len(others["params"]) == len(list(model.parameters()))
    assert (others["lr"], others["weight_decay"]) == (0.1, 0.2)
    assert (own["lr"], own["weight_decay"]) == (0.5, 0.0)
    assert len(parameter_groups(model[1], lr=0.1)) == 1


@pytest.mark.parametrize("start", [0.01, 3.0])
def test_a_temperature_that_starts_wrong_gets_there(start):
    """Within a hundred steps of Adam at 1e-3, whose weights hardly move."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 4, 2, 30, 6, dtype=torch.float64).unbind()
    target = ESP(sort_temperature=0.2)(query, key, value)
    mechanism = ESP(sort_temperature=start, learn_temperature=True).bind(2, 6).double()
    steps = torch.optim.Adam(parameter_groups(mechanism, lr=1e-3))
    for _ in range(150):
        steps.zero_grad()
        (mechanism(query, key, value) - target).square().mean().backward()
        steps.step()
    assert (mechanism.sort_temperature.log() - torch.tensor(0.2).log()).abs().max() < 0.5
