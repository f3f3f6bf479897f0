"""ESP attention as a mechanism: options, slices, parameters and saved state."""

import math
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from espformer import functional
from espformer.functional.arguments import check_options, is_integer, nearest, one_of
from espformer.nn.mechanisms import Mechanism, own_draws
from espformer.nn.slicers import AxisSlicer, FrozenSlicer, Slicer, make_slicer
from espformer.ops.esp.options import (
    COMPARED_OPTIONS,
    OPTIONS,
    SAVED_OPTIONS,
    Options,
    check_option,
    decode,
    document,
    encode,
    takes_options,
)
from espformer.ops.esp.problem import LEAST_TEMPERATURE

__all__ = ["ESP", "former_settings"]

FEW_SLICES = 8  # of each of several heads
ONE_HEAD_SLICES = 64  # of a single head, beside which no other looks along other directions
END_OF_SAVED = -1.0  # no option has a negative number
OWN_ARGUMENTS = ("slicer", "slices", "learn_temperature", "learn_slice_weights", "backend")
FIXED = ("slices", "learn_temperature", "learn_slice_weights")  # once the parameters exist


class ESP(Mechanism):
    r"""Doubly-stochastic attention by Expected Sliced Transport Plans.

    Queries and keys are sorted along each slice and matched rank by rank, which gives a plan
    :math:`U_l` of cost :math:`D_l`. The plans are averaged with weights that favour low costs:

    .. math:: \mathrm{out} = N \sum_l \mathrm{softmax}(b - \tau D)_l \, U_l V.

    :func:`espformer.esp_attention` has the other formulas. With the default τ = 0 and without
    learnt slice weights b, this is the plain mean.

    The options from `sort_temperature` on are also attributes and can be changed at any time;
    `slices`, `learn_temperature` and `learn_slice_weights` cannot once the mechanism belongs to a
    layer. Attributes whose names are nearly those of options are refused. Temperature, its unit,
    `hard`, `ties` and `straight_through` change while a model is trained, annealed and hardened, so
    they are part of its state dict: a checkpoint restores them and overrides the constructor. They
    are stored as Python values, which a cast to 16 bits does not round and which need no device
    synchronisation. They are saved as one small tensor, ``_extra_state``, which any weight format
    can hold. A state dict without it (for example of softmax attention) can be loaded and leaves
    them unchanged. The other options are those of the constructor: loading a state that was saved
    with others warns.

    Args:
        temperature: short for `sort_temperature`.
        slicer: "axis", "frozen" or "learnable" (separate directions per head), or a slicer.
            "auto", the default, uses frozen directions, or the axes if head_dim does not exceed
            `slices`. The cost is proportional to the number of slices.
        slices: number of slices of a head. For "auto" it is 8 by default, 64 for the only head
            of a layer, and at most head_dim; for the others, head_dim.
        learn_temperature: learn one temperature per head, starting from `sort_temperature`. The
            parameter ``log_sort_temperature`` holds its logarithm. It needs a higher learning rate
            than other parameters and no weight decay, which would pull t towards one;
            :func:`espformer.nn.parameter_groups` takes care of both.
        learn_slice_weights: learn one logit per head and slice, ``slice_logits``, b in
            ``σ = softmax(b - τ D)``, initially zero.
        backend: the implementation, see :func:`espformer.esp_attention`.
        {options}

    Example:
        >>> import torch
        >>> x = torch.randn(2, 4, 5, 8)
        >>> mechanism = ESP(hard=True).bind(heads=4, head_dim=8)
        >>> mechanism.matrix(x, x).sum(-2).allclose(torch.ones(2, 4, 5))
        True

    References:
        Shahbazi et al., ESPFormer: doubly-stochastic attention with expected sliced transport
        plans, ICML 2025. Liu et al., Expected sliced transport plans, ICLR 2025.
    """

    log_sort_temperature: nn.Parameter | None
    slice_logits: nn.Parameter | None
    has_sort_temperature = True

    @takes_options
    def __init__(
        self,
        temperature: float | None = None,
        /,
        *,
        slicer: str | Slicer = "auto",
        slices: int | None = None,
        learn_temperature: bool = False,
        learn_slice_weights: bool = False,
        backend: str = "auto",
        **options: Unpack[Options],
    ) -> None:
        super().__init__()
        one_of("ESP", "backend", backend, functional.BACKENDS)
        if temperature is not None:  # ESP(0.3) is ESP(sort_temperature=0.3)
            if "sort_temperature" in options:
                raise TypeError(
                    f"ESP: got two temperatures, {temperature} and sort_temperature="
                    f"{options['sort_temperature']}; pass one"
                )
            options["sort_temperature"] = temperature
        self.options = check_options("ESP", options, OWN_ARGUMENTS)
        learns = {
            "learn_temperature": learn_temperature,
            "learn_slice_weights": learn_slice_weights,
        }
        for argument, value in learns.items():
            if value not in (True, False):
                raise TypeError(
                    f"ESP: {argument} must be True or False, got {value!r} (a learnt temperature "
                    "starts at sort_temperature, slice weights start equal)"
                )
        if slices is not None and (not is_integer(slices) or slices < 1):
            got = f"a {type(slices).__name__}" if isinstance(slices, Tensor) else repr(slices)
            raise ValueError(
                f"ESP: slices must be an integer of at least 1, the number of directions, got {got}"
            )
        self.learn_temperature = learn_temperature
        self.learn_slice_weights = learn_slice_weights
        self.backend = backend
        self.slices = slices
        self.slicer_kind = slicer if isinstance(slicer, str) else "given"
        # Axes need no head_dim; the other slicers are built when it is known.
        self.slicer: Slicer | None = slicer if isinstance(slicer, Slicer) else None
        if isinstance(slicer, str):
            one_of("ESP", "slicer", slicer, ("auto", "axis", "frozen", "learnable"))
            if slicer == "axis" and slices is None:
                self.slicer = AxisSlicer()
        elif not isinstance(slicer, Slicer):
            raise TypeError(
                'ESP: slicer must be "auto", "axis", "frozen", "learnable" or an '
                f"espformer.nn.Slicer, got {type(slicer).__name__}"
            )
        elif slices is not None:
            raise ValueError(
                f"ESP: slices={slices} is only for slicers that ESP creates itself ("
                'slicer="auto", "axis", "frozen" or "learnable"); a slicer object has its own '
                "number of slices"
            )
        self.register_parameter("log_sort_temperature", None)
        self.register_parameter("slice_logits", None)
        self.sort_temperature = self.options.sort_temperature

    @property
    def relative_cost(self) -> float:
        return 5.0 if self.balance == "both" else 4.0

    @property
    def sort_temperature(self) -> float | Tensor:
        """Temperature of the soft sort: a number, or ``(heads,)`` when it is learnt."""
        if self.log_sort_temperature is None:
            return self.options.sort_temperature
        # In 16 bits the logarithm of a temperature near zero has only two digits left.
        wide = torch.promote_types(self.log_sort_temperature.dtype, torch.float32)
        return self.log_sort_temperature.to(wide).exp()

    @sort_temperature.setter
    def sort_temperature(self, temperature: float | Tensor) -> None:
        if isinstance(temperature, Tensor) and temperature.numel() != 1:
            raise ValueError(
                f"ESP: sort_temperature must be one number, got {tuple(temperature.shape)} of them "
                "(learn_temperature=True has one per head, in log_sort_temperature; esp_attention "
                "takes a tensor)"
            )
        check_option("ESP", OPTIONS["sort_temperature"], temperature)
        if not 0 < temperature < math.inf:
            raise ValueError(
                f"ESP: sort_temperature must be > 0, got {temperature} "
                "(for hard sorting pass hard=True)"
            )
        self.options = replace(self.options, sort_temperature=float(temperature))
        self._start_temperature()

    def change(self, **options: Unpack[Options]) -> None:
        """Change options. A learnt temperature continues from the given one, in all heads."""
        check_options("ESP", options, OWN_ARGUMENTS)
        temperature = options.pop("sort_temperature", None)
        if temperature is not None:
            self.sort_temperature = temperature
        self.options = replace(self.options, **options)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, unless its name is nearly that of an option, which would do nothing.

        Other new names are allowed, since tools for training and quantisation set their own.
        """
        if name in FIXED and getattr(self, "heads", None) is not None:
            raise AttributeError(
                f"ESP: {name} is fixed, since this mechanism already belongs to a layer; build the "
                f"layer with ESP({name}={value!r})"
            )
        known = name.startswith("_") or hasattr(type(self), name) or hasattr(self, name)
        near = None if known else nearest(name, OPTIONS, cutoff=0.85)
        if near is not None:
            raise AttributeError(
                f"ESP: there is no option {name!r}, so setting it would change nothing; did you "
                f"mean {near!r}?"
            )
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter, as torch does for an attribute that is one."""
        if name in OPTIONS:
            raise TypeError(
                f"ESP: {name} must be a number, got a parameter (to learn one temperature per head "
                "pass learn_temperature=True; they start at sort_temperature)"
            )
        super().register_parameter(name, param)

    def scale_sort_temperature(self, factor: float) -> None:
        """Multiply each head's temperature by `factor`, down to the smallest useful value."""
        learnt, least = self.log_sort_temperature, LEAST_TEMPERATURE[self.options.metric]
        if learnt is None:
            self.sort_temperature = max(float(self.options.sort_temperature) * factor, least)
        else:
            with torch.no_grad():
                learnt.add_(math.log(factor)).clamp_(min=math.log(least))

    def build(self, heads: int, head_dim: int, value_dim: int, depth: int) -> None:
        if self.slicer_kind != "given":
            kind, slices = self.slicer_kind, self.slices
            if kind == "auto":
                slices = default_slices(heads, head_dim) if slices is None else slices
                kind = "axis" if slices == head_dim else "frozen"
            with nullcontext(0) if kind == "axis" else own_draws(depth) as seed:
                self.slicer = make_slicer(kind, head_dim, slices=slices, heads=heads, seed=seed)
        assert self.slicer is not None
        directions = self.slicer()
        if directions is not None and (
            directions.shape[-1] != head_dim or directions.shape[:-2] not in ((), (heads,))
        ):
            raise ValueError(
                f"ESP: the slicer gives directions of shape {tuple(directions.shape)}, "
                f"expected (slices, {head_dim}) or ({heads}, slices, {head_dim}) for this layer"
            )
        if self.learn_temperature:
            self.log_sort_temperature = nn.Parameter(torch.empty(heads))
        if self.learn_slice_weights:
            count = head_dim if directions is None else directions.shape[-2]
            self.slice_logits = nn.Parameter(torch.empty(heads, count))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset learnt temperatures to their initial value and slice weights to equal."""
        self._start_temperature()
        if self.slice_logits is not None:
            nn.init.zeros_(self.slice_logits)

    def _start_temperature(self) -> None:
        if self.log_sort_temperature is not None:
            start = float(self.options.sort_temperature)
            nn.init.constant_(self.log_sort_temperature, math.log(start))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        return functional.esp_attention(
            query,
            key,
            value,
            query_mask=query_mask,
            key_mask=key_mask,
            **self.arguments(query, self.training),
        )

    def matrix(
        self,
        query: Tensor,
        key: Tensor,
        *,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        """The attention matrix of the forward pass, without slice dropout."""
        return functional.esp_plan(
            query, key, query_mask=query_mask, key_mask=key_mask, **self.arguments(query, False)
        )

    def arguments(self, query: Tensor, training: bool) -> dict[str, Any]:
        """The keywords of :func:`espformer.esp_attention` for queries of this shape."""
        # Axes need no parameters, so a mechanism that sorts along them need not be bound.
        axes = self.slicer_kind == "auto" and self.slices is None and query.shape[-1] <= FEW_SLICES
        learns = self.learn_temperature or self.learn_slice_weights
        if self.heads is not None or learns or (self.slicer is None and not axes):
            self.require_bound(query)
        options = {name: getattr(self.options, name) for name in OPTIONS}
        return options | {
            "sort_temperature": self.sort_temperature,
            "slice_dropout": self.options.slice_dropout if training else 0.0,
            "slices": None if self.slicer is None else self.slicer(),
            "slice_logits": self.slice_logits,
            "backend": self.backend,
        }

    def get_extra_state(self) -> Tensor:
        """The saved options, as numbers, then `END_OF_SAVED` and those that are compared."""
        saved, compared = (
            [encode(name, getattr(self.options, name)) for name in names]
            for names in (SAVED_OPTIONS, COMPARED_OPTIONS)
        )
        return torch.tensor([*saved, END_OF_SAVED, *compared], dtype=torch.float64, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        numbers = state.tolist()
        end = numbers.index(END_OF_SAVED) if END_OF_SAVED in numbers else len(numbers)
        kept, compared = numbers[:end], numbers[end + 1 :]
        saved = {n: decode(n, x) for n, x in zip(SAVED_OPTIONS, kept, strict=False)}
        for name in SAVED_OPTIONS[len(kept) :]:  # newer than the saved state
            saved[name] = OPTIONS[name].metadata["before"]
        self.options = replace(self.options, **saved)
        others = {n: decode(n, x) for n, x in zip(COMPARED_OPTIONS, compared, strict=False)}
        others = {n: x for n, x in others.items() if x != getattr(self.options, n)}
        if others:
            theirs, ours = (
                ", ".join(f"{name}={options[name]!r}" for name in others)
                for options in (others, vars(self.options))
            )
            warnings.warn(
                f"ESP: these weights were saved with {theirs}, and this mechanism has {ours}, so "
                "its outputs differ; if you do not want that, build it with the same options",
                stacklevel=2,
            )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        name = prefix + "slicer.directions"
        if prefix + "_extra_state" not in state_dict:  # of another mechanism: keep ours
            state_dict[prefix + "_extra_state"] = self.get_extra_state()
            if isinstance(self.slicer, FrozenSlicer):
                state_dict.setdefault(name, self.slicer.directions.detach())
        elif self.slicer_kind == "auto" and self.slices is None and name in state_dict:
            self._keep_number_of(state_dict[name])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _keep_number_of(self, directions: Tensor) -> None:
        """Weights that were saved when the default was another number of slices keep theirs."""
        ours = None if self.slicer is None else self.slicer()
        bound = self.heads is not None and directions.shape[::2] == (self.heads, self.head_dim)
        if bound and (ours is None or ours.shape != directions.shape):
            heads, slices, width = directions.shape
            device = directions.device if ours is None else ours.device
            self.slicer = FrozenSlicer(slices, width, heads).to(device)

    def extra_repr(self) -> str:
        always = ("temperature_unit", "inverse_temperature", "metric", "balance")
        others = [name for name in OPTIONS if name not in (*always, "sort_temperature")]
        learnt, start = self.learn_temperature, self.options.sort_temperature
        parts = ["sort_temperature=" + ("learnt" if learnt else f"{float(start):.3g}")]
        for name in (*always, *others):
            value = getattr(self.options, name)
            if name in always or value != OPTIONS[name].default:
                parts.append(f"{name}={value:g}" if type(value) is float else f"{name}={value!r}")
        return ", ".join(parts)


def default_slices(heads: int, head_dim: int) -> int:
    """The number of slices of a head: few, but many for the only head of a layer.

    Example:
        >>> default_slices(heads=8, head_dim=64), default_slices(heads=1, head_dim=64)
        (8, 64)
    """
    return min(head_dim, ONE_HEAD_SLICES if heads == 1 else FEW_SLICES)


def _attribute(name: str) -> property:
    def get(self: ESP) -> Any:
        return getattr(self.options, name)

    def put(self: ESP, value: Any) -> None:
        self.change(**{name: value})

    return property(get, put, doc=OPTIONS[name].metadata["meaning"])


document(ESP)
for _name in OPTIONS:
    if _name != "sort_temperature":  # it may be learnt, and has a property
        setattr(ESP, _name, _attribute(_name))


def former_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Complete settings of an ESP mechanism that were saved before temperatures had a unit.

    Example:
        >>> former_settings({"inverse_temperature": 0.0})
        {'slicer': 'axis', 'sort_temperature': 0.1, 'inverse_temperature': 0.0,
         'temperature_unit': 'absolute'}
    """
    if "temperature_unit" in settings:
        return settings
    former = {"slicer": "axis", "sort_temperature": 0.1, "inverse_temperature": 0.1}
    return former | {"temperature_unit": "absolute"} | settings
