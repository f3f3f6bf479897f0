"""ESP attention as a mechanism: its settings, its slices, its temperature and what is saved."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from espformer import functional
from espformer.functional.arguments import inverse_temperature_in_range
from espformer.nn.mechanisms import Mechanism
from espformer.nn.slicers import AxisSlicer, Slicer, make_slicer
from espformer.ops.esp.exponentials import METRICS
from espformer.ops.esp.problem import BALANCES, COUPLINGS, LEAST_TEMPERATURE, TIES

__all__ = ["ESP"]


class ESP(Mechanism):
    r"""Doubly-stochastic attention by Expected Sliced Transport Plans.

    Queries and keys are sorted along each slice, matched rank by rank, and the matchings averaged
    with weights that favour cheap ones, see :func:`espformer.esp_attention`.

    Temperature, hardness, ties and straight-through change over the life of a model (train soft,
    sharpen, harden), so they are part of its state dict: a checkpoint restores them, over what the
    constructor said. They are kept as Python values, which a cast to 16 bits does not round and
    which cost the forward no wait for the device, and saved as one small tensor, ``_extra_state``,
    that any format of weights can hold. A state dict without it (of softmax attention, say) loads,
    and leaves them as they are.

    Args:
        sort_temperature: temperature t > 0 of the soft sort, the width over which ranks mix.
        inverse_temperature: τ >= 0 in the weights of the slices, softmax(-τ D); 0 is the mean.
        metric: "absolute" or "squared" distance in the soft sort.
        balance: "rows" normalises the soft sorts by rows, "both" makes them doubly stochastic.
        hard: sort exactly; the plan is then a mean of permutations, without a gradient to queries
            and keys through their order.
        ties: "stable" or "average", what a hard sort does with equal numbers.
        straight_through: share in [0, 1] of the hard sort in the forward, with the soft sort's
            gradient: ``soft + share * (hard - soft).detach()``. True is 1.
        coupling: "quantile", "interpolate" or "identity", ranks to ranks when N != M.
        slicer: "axis", "frozen" or "learnable" (each head its own directions), or a slicer.
        slices: number of slices of a frozen or learnable slicer; head_dim unless given.
        learn_temperature: train one temperature per head, as its logarithm in the parameter
            ``log_sort_temperature``, from `sort_temperature` on. Give it a higher learning rate
            than the rest, and no weight decay, which would pull t towards one.
        scale: factor on queries and keys; ``head_dim ** -0.5`` unless given.
        slice_dropout: probability of dropping a slice, in training.
        backend: which implementation computes it, see :func:`espformer.esp_attention`.

    Example:
        >>> import torch
        >>> x = torch.randn(2, 4, 5, 8)
        >>> ESP(hard=True).matrix(x, x).sum(-2).allclose(torch.ones(2, 4, 5))
        True

    References:
        Shahbazi et al., ESPFormer: doubly-stochastic attention with expected sliced transport
        plans, ICML 2025. Liu et al., Expected sliced transport plans, ICLR 2025.
    """

    log_sort_temperature: nn.Parameter | None

    def __init__(
        self,
        sort_temperature: float = 0.1,
        inverse_temperature: float = 0.1,
        *,
        metric: str = "absolute",
        balance: str = "rows",
        hard: bool = False,
        ties: str = "stable",
        straight_through: bool | float = False,
        coupling: str = "quantile",
        slicer: str | Slicer = "axis",
        slices: int | None = None,
        learn_temperature: bool = False,
        scale: float | None = None,
        slice_dropout: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        _check_choice("metric", metric, METRICS)
        _check_choice("balance", balance, BALANCES)
        _check_choice("coupling", coupling, COUPLINGS)
        _check_choice("backend", backend, functional.BACKENDS)
        inverse_temperature_in_range("ESP", inverse_temperature)
        if not 0 <= slice_dropout < 1:
            raise ValueError(f"ESP: slice_dropout must be in [0, 1), got {slice_dropout}")
        self.inverse_temperature = inverse_temperature
        self.metric = metric
        self.balance = balance
        self.coupling = coupling
        self.learn_temperature = learn_temperature
        self.scale = scale
        self.slice_dropout = slice_dropout
        self.backend = backend
        self.slices = slices
        self.slicer_kind = slicer if isinstance(slicer, str) else "given"
        # The axes need no size; the other kinds are made when it is known.
        self.slicer: Slicer | None = slicer if isinstance(slicer, Slicer) else None
        if isinstance(slicer, str):
            _check_choice("slicer", slicer, ("axis", "frozen", "learnable"))
            if slicer == "axis":
                self.slicer = AxisSlicer()
        if slices is not None and self.slicer is not None:
            raise ValueError(
                f"ESP: slices={slices} counts the directions that ESP makes itself, for "
                'slicer="frozen" or "learnable"; axis-aligned slices are the coordinates of a '
                "head, and a slicer that is given has its own number"
            )

        self.register_parameter("log_sort_temperature", None)
        self._sort_temperature = 0.0
        self.sort_temperature = sort_temperature
        self.hard = hard
        self.ties = ties
        self.straight_through = straight_through

    @property
    def sort_temperature(self) -> float | Tensor:
        """Temperature of the soft sort: a number, or ``(heads,)`` when it is learnt."""
        if self.log_sort_temperature is None:
            return self._sort_temperature
        # In 16 bits the logarithm of a temperature near zero has only two digits left.
        wide = torch.promote_types(self.log_sort_temperature.dtype, torch.float32)
        return self.log_sort_temperature.to(wide).exp()

    @sort_temperature.setter
    def sort_temperature(self, temperature: float) -> None:
        if isinstance(temperature, Tensor) and temperature.numel() != 1:
            raise ValueError(
                f"ESP: sort_temperature must be one number, got {tuple(temperature.shape)} of them "
                "(learn_temperature=True has one per head, in log_sort_temperature; esp_attention "
                "takes a tensor)"
            )
        if not 0 < temperature < math.inf:
            raise ValueError(
                f"ESP: sort_temperature must be > 0, got {temperature} "
                "(for hard sorting pass hard=True)"
            )
        self._sort_temperature = float(temperature)
        self.reset_parameters()

    def scale_sort_temperature(self, factor: float) -> None:
        """Multiply each head's temperature by `factor`, down to the least that matters."""
        learnt, least = self.log_sort_temperature, LEAST_TEMPERATURE[self.metric]
        if learnt is None:
            self.sort_temperature = max(self._sort_temperature * factor, least)
        else:
            with torch.no_grad():
                learnt.add_(math.log(factor)).clamp_(min=math.log(least))

    @property
    def ties(self) -> str:
        """What a hard sort does with equal numbers."""
        return self._ties

    @ties.setter
    def ties(self, ties: str) -> None:
        _check_choice("ties", ties, TIES)
        self._ties = ties

    @property
    def straight_through(self) -> float:
        """Share of the hard sort in the forward while gradients are the soft sort's."""
        return self._straight_through

    @straight_through.setter
    def straight_through(self, share: float) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"ESP: straight_through must be a share in [0, 1], got {share}")
        self._straight_through = float(share)

    def build(self, heads: int, head_dim: int, value_dim: int, depth: int) -> None:
        if self.learn_temperature:
            self.log_sort_temperature = nn.Parameter(torch.empty(heads))
            self.reset_parameters()
        if self.slicer_kind in ("frozen", "learnable"):
            # Frozen directions come from the global generator, as weights do: layers differ, and
            # torch.manual_seed decides.
            frozen = self.slicer_kind == "frozen"
            seed = int(torch.randint(2**31 - 1, (), device="cpu")) if frozen else 0
            self.slicer = make_slicer(
                self.slicer_kind, head_dim, slices=self.slices, heads=heads, seed=seed
            )
        elif self.slicer_kind == "given" and self.slicer is not None:
            directions = self.slicer()
            if directions is not None and (
                directions.shape[-1] != head_dim or directions.shape[:-2] not in ((), (heads,))
            ):
                raise ValueError(
                    f"ESP: the slicer gives directions of shape {tuple(directions.shape)}, "
                    f"expected (slices, {head_dim}) or ({heads}, slices, {head_dim}) for this layer"
                )

    def reset_parameters(self) -> None:
        """Set the learnt temperatures back to the number they start from."""
        if self.log_sort_temperature is not None:
            nn.init.constant_(self.log_sort_temperature, math.log(self._sort_temperature))

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
            slice_dropout=self.slice_dropout if self.training else 0.0,
            query_mask=query_mask,
            key_mask=key_mask,
            **self._settings(query),
        )

    def matrix(
        self,
        query: Tensor,
        key: Tensor,
        *,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        """The matrix that the forward applies, before slice dropout."""
        return functional.esp_plan(
            query, key, query_mask=query_mask, key_mask=key_mask, **self._settings(query)
        )

    def _settings(self, query: Tensor) -> dict[str, Any]:
        """The arguments that the output and the matrix share."""
        unbuilt = self.learn_temperature and self.log_sort_temperature is None
        if self.heads is not None or self.slicer is None or unbuilt:
            self.require_bound(query)
        return {
            "sort_temperature": self.sort_temperature,
            "inverse_temperature": self.inverse_temperature,
            "metric": self.metric,
            "balance": self.balance,
            "hard": self.hard,
            "ties": self.ties,
            "straight_through": self.straight_through,
            "coupling": self.coupling,
            "slices": None if self.slicer is None else self.slicer(),
            "scale": self.scale,
            "backend": self.backend,
        }

    def get_extra_state(self) -> Tensor:
        """``[sort_temperature, hard, straight_through, ties]``, see the class."""
        state = [
            self._sort_temperature,
            float(self.hard),
            self.straight_through,
            float(TIES.index(self.ties)),
        ]
        return torch.tensor(state, dtype=torch.float64, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        temperature, hard, straight_through, ties = state.tolist()
        self._sort_temperature = temperature
        self.hard = bool(hard)
        self.straight_through = straight_through
        self.ties = TIES[int(ties)]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        state_dict.setdefault(prefix + "_extra_state", self.get_extra_state())
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        temperature = "learnt" if self.learn_temperature else f"{self._sort_temperature:.3g}"
        parts = [
            f"sort_temperature={temperature}",
            f"inverse_temperature={self.inverse_temperature:g}",
            f"metric={self.metric!r}",
            f"balance={self.balance!r}",
        ]
        if self.hard:
            parts.append(f"hard=True, ties={self.ties!r}")
        if self.straight_through:
            parts.append(f"straight_through={self.straight_through:g}")
        if self.slice_dropout:
            parts.append(f"slice_dropout={self.slice_dropout:g}")
        return ", ".join(parts)


def _check_choice(argument: str, choice: str, choices: tuple[str, ...]) -> None:
    if choice not in choices:
        expected = ", ".join(repr(c) for c in choices)
        raise ValueError(f"ESP: {argument} must be one of {expected}, got {choice!r}")
