"""The options of ESP attention: each with its name, type, default, check and description.

:func:`espformer.esp_attention`, :func:`espformer.esp_plan` and :class:`espformer.nn.ESP` take these
options as keywords. The schema of the compiled operator, the options saved in a checkpoint and the
table in the documentation are made from the same list. To add an option, add a field at its end and
a type in `Options`, and use it. Checkpoints hold options by their position, so none may be inserted
or removed. Tests ask for a value to try (`tests/nn/test_esp.py`) and for the table
(`python tools/options_page.py`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from numbers import Real
from typing import Any, TypedDict, TypeVar, get_type_hints

from torch import Tensor

METRICS = ("absolute", "squared")
BALANCES = ("rows", "both")
UNITS = ("spread", "absolute")
TIES = ("stable", "average")
COUPLINGS = ("quantile", "interpolate", "identity")
MOST_INVERSE_TEMPERATURE = 1e30  # multiplied by a cost, it still fits in float32
MOST_COST_EXPONENT = 4.0

T = TypeVar("T", bound=Callable[..., Any])


def _positive_temperature(t: float | Tensor) -> str | None:
    # Tensors are checked where their device is known: see `functional.arguments`.
    if isinstance(t, Tensor) or t > 0:
        return None
    return f"must be > 0, got {t} (for hard sorting pass hard=True)"


def _in_range(tau: float) -> str | None:
    if 0 <= tau <= MOST_INVERSE_TEMPERATURE:
        return None
    return (
        f"must be in [0, {MOST_INVERSE_TEMPERATURE:g}], got {tau} (0 weights all slices equally, "
        "1e6 selects the cheapest)"
    )


def _exponent(p: float) -> str | None:
    if 0 < p <= MOST_COST_EXPONENT:
        return None
    return f"must be in (0, {MOST_COST_EXPONENT:g}], got {p} (2 is the mean squared distance)"


def _share(share: bool | float) -> str | None:
    if 0 <= share <= 1:
        return None
    return f"must be True, False or the share of the hard output in [0, 1], got {share}"


def _probability(p: float) -> str | None:
    return None if 0 <= p < 1 else f"must be in [0, 1), got {p}"


def _positive_scale(scale: float | None) -> str | None:
    # With zero all tokens would be equal. Tensors, which only the baselines take, are not read.
    if scale is None or isinstance(scale, Tensor) or 0 < scale < math.inf:
        return None
    return f"must be > 0 and finite, got {scale} (leave it out for head_dim ** -0.5)"


def _option(
    default: Any,
    meaning: str,
    *,
    choices: tuple[str, ...] | None = None,
    check: Callable[[Any], str | None] | None = None,
    kernel: bool = False,
    before: Any = None,
) -> Any:
    """One option.

    Args:
        default: the default value.
        meaning: the description for the documentation.
        choices: the strings that are allowed.
        check: returns what is wrong with a value, or None.
        kernel: the operator takes it as a plain value (the others are resolved before the call).
        before: for an option that checkpoints save, because it changes while a model is trained,
            annealed or hardened: its value for checkpoints that do not contain it.
    """
    details = {"meaning": meaning, "choices": choices, "check": check, "kernel": kernel}
    return field(default=default, metadata=details | {"before": before})


class Options(TypedDict, total=False):
    """The keywords of :class:`ESPOptions`, for type checkers; a test keeps both in step."""

    sort_temperature: float | Tensor
    temperature_unit: str
    inverse_temperature: float
    cost_exponent: float
    metric: str
    balance: str
    hard: bool
    straight_through: bool | float
    ties: str
    coupling: str
    scale: float | None
    slice_dropout: float


@dataclass(frozen=True, kw_only=True)
class ESPOptions:
    """The options of ESP attention: all arguments of a call except its tensors."""

    sort_temperature: float | Tensor = _option(
        0.3,
        "t > 0, the softness of the sort: the distance over which tokens mix. A float, or a tensor "
        "that broadcasts to ``(batch, heads)``, such as ``(heads,)``, which then gets a gradient.",
        check=_positive_temperature,
        before=0.1,
    )
    hard: bool = _option(
        False,
        "sort exactly. No gradient flows through the sort. Attention is exactly doubly stochastic "
        "if N = M, and with the quantile coupling.",
        kernel=True,
        before=False,
    )
    straight_through: bool | float = _option(
        False,
        "True: the forward pass is hard and the backward pass is that of the soft sort. A float "
        "in [0, 1] blends soft and hard outputs in that proportion. No effect if `hard`.",
        check=_share,
        before=0.0,
    )
    ties: str = _option(
        "stable",
        'how a hard sort treats ties: ``"stable"`` puts earlier tokens first; ``"average"`` splits '
        "mass equally among tied tokens (the lifted plan).",
        choices=TIES,
        kernel=True,
        before="stable",
    )
    temperature_unit: str = _option(
        "spread",
        '``"spread"``: t is in units of the standard deviation of the projections, computed per '
        "slice over unmasked tokens, separately for queries and keys; scaling queries or keys then "
        'has no effect. ``"absolute"``: t is a distance, as in the paper.',
        choices=UNITS,
        kernel=True,
        before="absolute",
    )
    inverse_temperature: float = _option(
        0.0,
        "τ ≥ 0, how strongly slices of low transport cost are preferred; 0 is the plain mean.",
        check=_in_range,
        kernel=True,
    )
    cost_exponent: float = _option(
        2.0,
        "p of the transport cost of a slice, ``D = (mean squared distance) ** (p / 2)``, that τ "
        "weighs: 2 as in the paper, 1 for a root mean square, which does not grow faster than the "
        "distances.",
        check=_exponent,
        kernel=True,
    )
    metric: str = _option(
        "absolute",
        '``"absolute"``: ``dist = |x - y|``, exact in linear time. ``"squared"``, as in the paper: '
        "the Gaussian is approximated by a sum of a few exponentials, to 2e-7 in float32 and 3e-11 "
        "in float64 per pair. For a token far from nearly all others these errors add up to at "
        "most 3e-8 N in float32, and its attention can be slightly negative. Kernels for 16-bit "
        "inputs use fewer exponentials: 1.5e-5 per pair, at most 2.1e-6 N in total.",
        choices=METRICS,
        kernel=True,
    )
    balance: str = _option(
        "rows",
        '``"rows"``, as in the paper: soft attention is only approximately doubly stochastic. '
        '``"both"``: each soft sort is scaled to be doubly stochastic, and so is the attention, at '
        "every temperature. Row and column sums are off by about 1e-6, at worst 1e-4 (up to 65,536 "
        "tokens).",
        choices=BALANCES,
        kernel=True,
    )
    coupling: str = _option(
        "quantile",
        'how sorted queries and keys are matched if N ≠ M: ``"quantile"`` (exact marginals), '
        '``"interpolate"``, or ``"identity"`` (the paper\'s).',
        choices=COUPLINGS,
        kernel=True,
    )
    scale: float | None = _option(
        None,
        "factor for queries and keys; by default ``m ** -0.5`` for heads of width m.",
        check=_positive_scale,
        kernel=True,
    )
    slice_dropout: float = _option(
        0.0,
        "probability of dropping a slice. The weights of the remaining slices are renormalised; at "
        "least one slice is kept.",
        check=_probability,
    )

    def check(self, name: str) -> None:
        """Raises an error for a wrong value; `name` is the called function, for the message."""
        for option in fields(self):
            check_option(name, option, getattr(self, option.name))


def check_option(name: str, option: Field[Any], value: Any, label: str | None = None) -> None:
    """Raises a TypeError or ValueError if `option`, which callers know as `label`, cannot be it."""
    label = option.name if label is None else label
    choices, check, kind = option.metadata["choices"], option.metadata["check"], str(option.type)
    if isinstance(value, Tensor) and "Tensor" not in kind:
        raise TypeError(f"{name}: {label} must be a number, not a tensor (pass float(x))")
    if choices is None and not _fits(kind, value):
        wanted = "True or False" if kind == "bool" else "a number"
        wanted = "True, False or a number" if kind == "bool | float" else wanted
        raise TypeError(f"{name}: {label} must be {wanted}, got {value!r}")
    if choices is not None and value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name}: {label} must be one of {listed}, got {value!r}")
    wrong = None if check is None else check(value)
    if wrong is not None:
        raise ValueError(f"{name}: {label} {wrong}")


def _fits(kind: str, value: Any) -> bool:
    """Whether a value has the type of an option: a number, True or False, a tensor or None."""
    if kind == "bool":
        return value in (True, False)
    if value is None:
        return "None" in kind
    if isinstance(value, bool):
        return "bool" in kind
    return isinstance(value, Real | Tensor) or hasattr(value, "__float__")


OPTIONS: dict[str, Field[Any]] = {option.name: option for option in fields(ESPOptions)}
KERNEL_OPTIONS = tuple(name for name, option in OPTIONS.items() if option.metadata["kernel"])
SAVED_OPTIONS = tuple(n for n, option in OPTIONS.items() if option.metadata["before"] is not None)
# Checkpoints hold these too, to tell when a model is built with others.
COMPARED_OPTIONS = tuple(name for name in KERNEL_OPTIONS if name not in SAVED_OPTIONS)


def encode(name: str, value: Any) -> float:
    """The value of an option as a number, for a checkpoint; zero stands for None."""
    choices = OPTIONS[name].metadata["choices"]
    return float((value or 0) if choices is None else choices.index(value))


def decode(name: str, number: float) -> Any:
    """The inverse of :func:`encode`."""
    option = OPTIONS[name]
    if option.metadata["choices"] is not None:
        return option.metadata["choices"][int(number)]
    if "None" in str(option.type):
        return number or None
    return bool(number) if option.type == "bool" else number


def describe(indent: int) -> str:
    """The options as lines for the ``Args:`` section of a docstring."""
    pad = " " * indent
    return "\n".join(f"{pad}{name}: {o.metadata['meaning']}" for name, o in OPTIONS.items())


def takes_options(function: T) -> T:
    """Adds the options to the signature of `function`, and to its docstring at ``{options}``.

    The function takes them as ``**options: Unpack[Options]``.
    """
    signature, types = inspect.signature(function), get_type_hints(ESPOptions)
    parameters = [p for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]
    parameters += [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=o.default, annotation=types[name]
        )
        for name, o in OPTIONS.items()
        if name not in signature.parameters
    ]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    document(function)
    return function


def document(item: Any) -> None:
    """Replaces ``{options}`` in the docstring of `item` by the descriptions of the options."""
    if item.__doc__ is not None:  # python -OO removes docstrings
        line = next((x for x in item.__doc__.splitlines() if x.strip() == "{options}"), "")
        item.__doc__ = item.__doc__.replace(line, describe(len(line) - len("{options}")), 1)
