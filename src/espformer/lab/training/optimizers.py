"""Optimisers and learning rates, as a recipe names them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from espformer.lab.recipes.schema import Optimizer, Schedule
from espformer.nn import parameter_groups


def make_optimizer(
    model: nn.Module, config: Optimizer, *, allow_fused: bool = True
) -> torch.optim.Optimizer:
    """Return the optimiser, with a group of its own for what mechanisms learn.

    See :func:`espformer.nn.parameter_groups`.

    Args:
        model: its parameters are optimised, where they are now.
        config: the optimiser.
        allow_fused: update all parameters in one kernel, on CUDA devices.
    """
    groups = parameter_groups(
        model, lr=config.learning_rate, weight_decay=config.weight_decay,
        rate=config.temperature_multiplier,
    )  # fmt: skip
    for group in groups:
        group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
    groups = [group for group in groups if group["params"]]
    fused = allow_fused and all(p.device.type == "cuda" for g in groups for p in g["params"])
    options: dict[str, Any] = {"lr": config.learning_rate, "fused": fused or None}
    if config.name == "sgd":
        return torch.optim.SGD(groups, momentum=config.momentum, **options)
    kind = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    return kind(groups, betas=(config.betas[0], config.betas[1]), **options)


def learning_rate_factor(
    config: Schedule, learning_rate: float
) -> tuple[str, Callable[[int], float]]:
    """Return the factor of the learning rate as a function of the `epoch` or of the `step`.

    Example:
        >>> unit, factor = learning_rate_factor(Schedule(name="milestones", milestones=[250]), 1.0)
        >>> unit, factor(249), factor(250)
        ('epoch', 1.0, 0.1)
    """
    if config.name == "inverse_sqrt":
        warmup, start = config.warmup_steps, config.warmup_from / learning_rate

        def factor(step: int) -> float:
            step = step + config.first_step
            if step < warmup:
                return start + (1 - start) * step / warmup
            return float((warmup / step) ** 0.5)

        return "step", factor

    def stepwise(epoch: int) -> float:
        passed = sum(milestone <= epoch for milestone in config.milestones)
        return float(config.factor**passed)

    return "epoch", stepwise


def make_schedule(
    optimizer: torch.optim.Optimizer, config: Schedule, learning_rate: float
) -> dict[str, Any]:
    """Return the schedule in the form that Lightning takes."""
    unit, factor = learning_rate_factor(config, learning_rate)
    return {"scheduler": LambdaLR(optimizer, factor), "interval": unit}
