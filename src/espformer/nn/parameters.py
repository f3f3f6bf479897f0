"""Parameter groups: a separate learning rate for the parameters of mechanisms."""

from typing import Any

from torch import nn

from espformer.nn.esp import ESP

__all__ = ["MECHANISM_RATE", "parameter_groups"]

# The logarithm of a temperature may have to move by three within some hundred steps, and Adam moves
# it by about the learning rate per step.
MECHANISM_RATE = 30.0


def parameter_groups(
    model: nn.Module, *, lr: float, weight_decay: float = 0.0, rate: float = MECHANISM_RATE
) -> list[dict[str, Any]]:
    """Parameter groups for an optimiser, with a separate one for ESP mechanisms.

    Logarithms of sort temperatures and of slice weights are of the order of one, other weights of
    the order of a hundredth. With the same learning rate, a temperature that starts at a poor value
    does not converge in a short training. These parameters get `rate` times the learning rate and
    no weight decay, which would pull a temperature towards one.

    Args:
        model: any module.
        lr: learning rate of the other parameters.
        weight_decay: weight decay of the other parameters.
        rate: ratio of the mechanisms' learning rate to that of the others.

    Returns:
        One group, or two if a mechanism learns a temperature or slice weights.

    Example:
        >>> import torch
        >>> from espformer.nn import ESP, Attention
        >>> model = Attention(32, heads=4, mechanism=ESP(learn_temperature=True))
        >>> optimiser = torch.optim.AdamW(parameter_groups(model, lr=1e-3, weight_decay=0.1))
        >>> [(len(g["params"]), g["lr"], g["weight_decay"]) for g in optimiser.param_groups]
        [(4, 0.001, 0.1), (1, 0.03, 0.0)]
    """
    own: dict[int, nn.Parameter] = {}
    for mechanism in model.modules():
        if isinstance(mechanism, ESP):
            for parameter in (mechanism.log_sort_temperature, mechanism.slice_logits):
                if parameter is not None:
                    own[id(parameter)] = parameter
    others = [parameter for parameter in model.parameters() if id(parameter) not in own]
    groups: list[dict[str, Any]] = [{"params": others, "lr": lr, "weight_decay": weight_decay}]
    if own:
        groups.append({"params": list(own.values()), "lr": rate * lr, "weight_decay": 0.0})
    return groups
