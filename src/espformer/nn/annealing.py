"""The way from a soft to a hard sort: sort temperatures, hard sorting, straight-through.

Each function acts on every :class:`espformer.nn.ESP` inside a model, also inside ``Differential``,
and returns the names of the modules it changed. The settings are saved in the model's state dict.
An average of weights does not follow them by itself, see :func:`copy_sort_settings`.

The paper's procedure: train soft, fine-tune while the temperature is multiplied by a factor each
epoch, then sort exactly. Fine-tune at a learning rate far below that of training: on Cats and Dogs
annealing cost 4 points of accuracy at the rate of training, 5e-4, and nothing at 3e-5.

    >>> from espformer.nn import Attention, exponential_schedule, get_sort_temperatures, harden
    >>> from espformer.nn import set_sort_temperature
    >>> model = Attention(32, heads=4)
    >>> start = get_sort_temperatures(model)["mechanism"]
    >>> schedule = exponential_schedule(start, factor=0.8, epochs=40)
    >>> for temperature in schedule:
    ...     changed = set_sort_temperature(model, temperature)  # then train for an epoch
    >>> f"from {start} to {schedule[0]:.2f}, {schedule[1]:.3f}, ..., {schedule[-1]:.1g}"
    'from 0.3 to 0.24, 0.192, ..., 4e-05'
    >>> harden(model)
    ['mechanism']
"""

import math
from dataclasses import replace

from torch import Tensor, nn

from espformer.functional.arguments import check_module
from espformer.nn.esp import ESP
from espformer.ops.esp.options import SAVED_OPTIONS

__all__ = [
    "anneal",
    "copy_sort_settings",
    "exponential_schedule",
    "get_sort_temperatures",
    "harden",
    "set_sort_temperature",
    "set_straight_through",
    "soften",
]


def set_sort_temperature(model: nn.Module, temperature: float) -> list[str]:
    """Set the sort temperature of every ESP mechanism; learnable ones continue from there.

    Example:
        >>> from espformer.nn import Attention
        >>> set_sort_temperature(Attention(32, heads=4), 1e-5)
        ['mechanism']
    """
    changed = []
    for name, mechanism in _mechanisms("set_sort_temperature", model):
        mechanism.sort_temperature = temperature
        changed.append(name)
    return changed


def get_sort_temperatures(model: nn.Module) -> dict[str, float | list[float]]:
    """Sort temperature of every ESP mechanism, by name; one per head if it is learnt.

    Example:
        >>> from espformer.nn import ESP, Attention
        >>> get_sort_temperatures(Attention(32, heads=4, mechanism=ESP(sort_temperature=0.5)))
        {'mechanism': 0.5}
    """
    temperatures: dict[str, float | list[float]] = {}
    for name, mechanism in _mechanisms("get_sort_temperatures", model):
        temperature = mechanism.sort_temperature
        temperatures[name] = (
            temperature.tolist() if isinstance(temperature, Tensor) else temperature
        )
    return temperatures


def anneal(model: nn.Module, factor: float) -> list[str]:
    """Multiply the sort temperatures of all ESP mechanisms, for each head, by `factor`.

    Temperatures do not fall below 1e-18 (1e-24 for the squared metric), where the sort is hard.

    Example:
        >>> from espformer.nn import ESP, Attention
        >>> model = Attention(32, heads=4, mechanism=ESP(sort_temperature=0.5))
        >>> _ = anneal(model, 0.5)
        >>> get_sort_temperatures(model)
        {'mechanism': 0.25}
    """
    if not 0 < factor < math.inf:
        raise ValueError(
            f"anneal: factor must be > 0 and finite, got {factor} (for hard sorting call "
            "harden(model))"
        )
    changed = []
    for name, mechanism in _mechanisms("anneal", model):
        mechanism.scale_sort_temperature(factor)
        changed.append(name)
    return changed


def harden(model: nn.Module, *, ties: str | None = None) -> list[str]:
    """Sort exactly from now on: attention is doubly stochastic, up to rounding.

    Args:
        model: any module with ESP mechanisms inside.
        ties: "stable" or "average", how to treat equal numbers; unchanged by default.

    Returns:
        The names of the mechanisms that were changed.

    Example:
        >>> import torch
        >>> from espformer.nn import Attention
        >>> layer = Attention(32, heads=4)
        >>> harden(layer)
        ['mechanism']
        >>> _, matrix = layer(torch.randn(2, 10, 32), return_matrix=True)
        >>> matrix.sum(-2).allclose(torch.ones(2, 4, 10), atol=1e-5)
        True
    """
    changed = []
    for name, mechanism in _mechanisms("harden", model):
        if ties is not None:
            mechanism.change(ties=ties)
        mechanism.change(hard=True)
        changed.append(name)
    return changed


def soften(model: nn.Module) -> list[str]:
    """Undo :func:`harden`: sort softly again, at the current temperatures.

    Example:
        >>> from espformer.nn import Attention
        >>> layer = Attention(32, heads=4)
        >>> _ = harden(layer)
        >>> soften(layer), layer.mechanism.hard
        (['mechanism'], False)
    """
    changed = []
    for name, mechanism in _mechanisms("soften", model):
        mechanism.change(hard=False)
        changed.append(name)
    return changed


def set_straight_through(model: nn.Module, share: float) -> list[str]:
    """Mix the hard sort into the forward pass; gradients remain those of the soft sort.

    The share is in [0, 1]: 0 is the soft forward pass and 1 the hard one. Increase it during
    training to move from one to the other.

    Example:
        >>> from espformer.nn import Attention
        >>> layer = Attention(32, heads=4)
        >>> for epoch in range(10):
        ...     _ = set_straight_through(layer, epoch / 9)  # then train for an epoch
        >>> layer.mechanism.straight_through
        1.0
    """
    changed = []
    for name, mechanism in _mechanisms("set_straight_through", model):
        mechanism.change(straight_through=share)
        changed.append(name)
    return changed


def copy_sort_settings(source: nn.Module, target: nn.Module) -> list[str]:
    """Give each ESP mechanism of `target` the settings of the same one in `source`.

    They are the temperature and its unit, hard or soft sorting, ties and straight-through; learnt
    temperatures are parameters and stay. torch's ``AveragedModel`` averages parameters and buffers
    only, so call this whenever the settings of the model have changed.

    Args:
        source: the model whose settings are read.
        target: a model of the same kind, such as its average.

    Returns:
        The names of the ESP mechanisms of `target`.

    Example:
        >>> from torch.optim.swa_utils import AveragedModel
        >>> from espformer.nn import ESP, Attention
        >>> model = Attention(32, heads=4, mechanism=ESP(sort_temperature=0.5))
        >>> average = AveragedModel(model)
        >>> _ = anneal(model, 0.5)
        >>> average.update_parameters(model)
        >>> copy_sort_settings(model, average)
        ['module.mechanism']
        >>> get_sort_temperatures(average)
        {'module.mechanism': 0.25}
    """
    given = _mechanisms("copy_sort_settings", source)
    taking = _mechanisms("copy_sort_settings", target)
    if len(given) != len(taking):
        raise ValueError(
            f"copy_sort_settings: this {type(source).__name__} has {len(given)} ESP mechanisms and "
            f"this {type(target).__name__} {len(taking)}; pass two models of the same kind"
        )
    for (name, mechanism), (_, other) in zip(given, taking, strict=True):
        if mechanism.learn_temperature != other.learn_temperature:
            raise ValueError(
                f"copy_sort_settings: the temperature of {name} is learnt in one model and not in "
                "the other; pass two models of the same kind"
            )
    for (_, mechanism), (_, other) in zip(given, taking, strict=True):
        settings = {option: getattr(mechanism.options, option) for option in SAVED_OPTIONS}
        other.options = replace(other.options, **settings)
    return [name for name, _ in taking]


def exponential_schedule(start: float, factor: float, epochs: int) -> list[float]:
    """Temperatures of the paper's annealing, one per epoch: start·factor, start·factor², ...

    `start` is the temperature of the trained model, so the first epoch already uses a lower one,
    and the last epoch trains at ``start * factor ** epochs``.

    Example:
        The paper's models have t = 1e-3, absolute and squared:

        >>> schedule = exponential_schedule(1e-3, factor=0.8, epochs=40)
        >>> len(schedule), f"{schedule[0]:.1e}", f"{schedule[-1]:.1e}"
        (40, '8.0e-04', '1.3e-07')
    """
    if not (start > 0 and factor > 0 and epochs >= 0):
        raise ValueError(
            "exponential_schedule: start and factor must be > 0 and epochs >= 0, got "
            f"start={start}, factor={factor}, epochs={epochs}"
        )
    return [start * factor**epoch for epoch in range(1, epochs + 1)]


def _mechanisms(function: str, model: nn.Module) -> list[tuple[str, ESP]]:
    check_module(function, model)
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, ESP)]
    if not found:
        raise ValueError(
            f"{function}: no ESP mechanism inside this {type(model).__name__} (build its attention "
            "with espformer.nn.ESP, or convert it first)"
        )
    return found
