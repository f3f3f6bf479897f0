"""A soft sort as one half of ESP attention: checks, units, and the two directions of the operator.

With P the permutation that sorts x and κ the kernel of the sorted numbers, a soft sort is
``A = S P``, ``S = diag(1/z) κ``, and a plan of ESP attention is ``A_qᵀ A_k``. Let the queries be
the ranks 0, 1, 2, … themselves, spaced by 1,024 kernel widths. Then their soft sort is the
identity, since ``exp(-1024)`` is zero in every precision, and attention is ``A_k V``: values softly
sorted by the keys. With the sides swapped it is ``A_qᵀ V``, the unsort. Backends that support
`identity_side` skip the ranks entirely.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypedDict

import torch
from torch import Tensor

from espformer.functional.arguments import (
    check_tensor,
    flat_temperature,
    is_integer,
    one_of,
    refuse_unknown,
)
from espformer.functional.esp import attend, pick_backend, straight_through
from espformer.ops.common.masks import zero_padding
from espformer.ops.common.operators import without_autocast
from espformer.ops.esp.options import OPTIONS, UNITS, ESPOptions, check_option
from espformer.ops.esp.problem import (
    LEAST_TEMPERATURE,
    MOST_TEMPERATURE,
    Problem,
    near_one,
    with_spread,
    without_spread,
)

SPACING = 1024.0  # distance between ranks, in kernel widths


class SortOptions(TypedDict, total=False):
    """The options that all soft sorts share; :func:`soft_sort` explains them."""

    temperature: float | Tensor
    unit: str
    metric: str
    balance: str
    mask: Tensor | None
    hard: bool
    straight_through: bool | float
    backend: str


@dataclass(slots=True)
class SoftSort:
    """Rows of numbers, prepared to sort values by them with A, (batch, N ranks, N tokens)."""

    name: str  # the called function, for error messages
    numbers: Tensor  # (batch, N), in float32 or float64
    mask: Tensor | None  # (batch, N), True = takes part
    lead: torch.Size  # the shape of the rows, without the dimension that is sorted
    dim: int  # the dimension that is sorted, not negative
    options: ESPOptions  # the temperature is a number or (batch,)
    unit: str  # unit of the temperature
    backend: str

    @property
    def count(self) -> int:
        return self.numbers.shape[-1]

    @property
    def lengths(self) -> Tensor:
        """The count of numbers that take part in each row: (batch, 1), in their dtype."""
        self._check_ranks()
        if self.mask is None:
            return self.numbers.new_full((self.numbers.shape[0], 1), self.count)
        return self.mask.sum(-1, keepdim=True, dtype=self.numbers.dtype)

    @property
    def constant(self) -> Tensor | None:
        """Whether the sort takes the numbers of a row for equal, (batch,); None if it never does.

        In units of their spread, numbers without one have no gradient, though their soft ranks
        differ a little.
        """
        options = self.options
        if self.unit != "spread" or options.hard or options.straight_through:
            return None
        mask = None if self.mask is None else self.mask.unsqueeze(1)
        rows, _ = near_one(self.numbers)
        return without_spread(rows.unsqueeze(1), mask).flatten()

    @property
    def positions(self) -> Tensor:
        """0, 1, … N - 1 in the dtype of the numbers."""
        self._check_ranks()
        return torch.arange(self.count, dtype=self.numbers.dtype, device=self.numbers.device)

    def _check_ranks(self) -> None:
        """Raises for more ranks than the dtype can represent: float32 has no 2^24 + 1."""
        most = int(2 / torch.finfo(self.numbers.dtype).eps)
        if self.count > most:
            raise ValueError(
                f"{self.name}: ranks of {self.count:,} numbers cannot be told apart in "
                f"{self.numbers.dtype}, which counts to {most:,}; pass x.double()"
            )

    def sort(self, rows: Tensor) -> Tensor:
        """``A V``: rows of tokens (batch, N, d) to rows of ranks; ranks of padding are zero."""
        return self._mix(rows, back=False)

    def unsort(self, rows: Tensor) -> Tensor:
        """``Aᵀ Y``: rows of ranks (batch, N, d) to rows of tokens; padding is zero."""
        return self._mix(rows, back=True)

    def sort_numbers(self) -> Tensor:
        """``A x``: the numbers themselves, softly sorted, (batch, N)."""
        found = self._mix_numbers(ranks=False)
        return self.sort(self.numbers.unsqueeze(-1)).squeeze(-1) if found is None else found

    def expected_ranks(self) -> Tensor:
        """``Σ_n n A[n, i] / Σ_n A[n, i]``, counted from one, (batch, N); of padding zero."""
        self._check_ranks()
        found = self._mix_numbers(ranks=True)
        if found is not None:
            return found
        lengths = self.lengths
        middle, scale = (lengths + 1) / 2, lengths.clamp(min=1)
        # Of ranks around zero sums do not cancel, and near one they leave no precision unused.
        numbered = (self.positions + 1 - middle) / scale
        columns = torch.stack([numbered, torch.ones_like(numbered)], -1)
        moment, mass = self.with_options(ties="average").unsort(columns).unbind(-1)
        if self.mask is None:
            return middle + scale * moment / mass
        expected = middle + scale * moment / mass.masked_fill(~self.mask, 1)
        return expected.masked_fill(~self.mask, 0)

    def with_options(self, **changes: Any) -> SoftSort:
        """The same numbers with other options."""
        return replace(self, options=replace(self.options, **changes))

    def _taken_ranks(self) -> Tensor | None:
        return None if self.mask is None else self.positions < self.lengths

    def _mix(self, rows: Tensor, *, back: bool) -> Tensor:
        rows = rows.to(self.numbers.dtype)
        with without_autocast(rows.device):
            kernels = pick_backend(self.name, self.backend, self.numbers, rows)
            if not hasattr(kernels, "mix") or not kernels.takes_rows(
                self.numbers, rows, self.options
            ):
                return self._attend(rows, "key" if back else "query")
            return straight_through(
                self.options,
                lambda o: kernels.mix(self.numbers, rows, self.mask, o, self.unit, back=back),
            )

    def _mix_numbers(self, *, ranks: bool) -> Tensor | None:
        """The result of kernels for numbers alone; None if there are none for these options."""
        options = self.options
        if options.straight_through:
            return None
        with without_autocast(self.numbers.device):
            kernels = pick_backend(self.name, self.backend, self.numbers)
            if not hasattr(kernels, "mix_numbers") or not kernels.takes_numbers(
                self.numbers, options
            ):
                return None
            found: Tensor = kernels.mix_numbers(
                self.numbers, self.mask, options, self.unit, ranks=ranks
            )
        return found

    def _attend(self, rows: Tensor, identity_side: str) -> Tensor:
        """The sort as attention between numbers and ranks, for backends without `mix`."""
        numbers, t = self._in_units()
        metric = self.options.metric
        width = t.detach() if metric == "absolute" else t.detach().sqrt()
        tokens = numbers, self.mask
        ranks = self.positions * (SPACING * width).unsqueeze(-1), self._taken_ranks()
        sides = (ranks, tokens) if identity_side == "query" else (tokens, ranks)
        (query, query_mask), (key, key_mask) = sides
        problem = Problem(
            query.unsqueeze(-1),
            key.unsqueeze(-1),
            replace(self.options, sort_temperature=t),
            query_mask=query_mask,
            key_mask=key_mask,
            identity_side=identity_side,
        )
        rows = zero_padding(rows, key_mask)
        return attend(self.name, problem, rows, self.backend)

    def _in_units(self) -> tuple[Tensor, Tensor]:
        """Numbers scaled to be near one, and their temperatures in absolute units, (batch,)."""
        t, metric = self.options.sort_temperature, self.options.metric
        rows, factor = near_one(self.numbers)
        if self.unit == "spread":  # t is a width
            mask = None if self.mask is None else self.mask.unsqueeze(1)
            slices, deviation = with_spread(rows.unsqueeze(1), mask)
            rows, width = slices.squeeze(1), t * deviation.flatten()
            t = width if metric == "absolute" else width.square()
        else:  # multiplied twice, since the square of the factor might overflow
            t = t * factor.squeeze(-1)
            t = t if metric == "absolute" else t * factor.squeeze(-1)
        return rows, t.clamp(LEAST_TEMPERATURE[metric], MOST_TEMPERATURE)

    def flatten(self, label: str, values: Tensor) -> tuple[Tensor, torch.Size]:
        """Values of shape ``x.shape + trailing`` as (batch, N, d), and the trailing shape."""
        shape = torch.Size((*self.lead[: self.dim], self.count, *self.lead[self.dim :]))
        if not isinstance(values, Tensor) or values.shape[: len(shape)] != shape:
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"{self.name}: {label} must have the shape of x, {tuple(shape)}, with or without "
                f"further dimensions at the end, got {got}; each number of x takes its own part of "
                "them along"
            )
        if values.device != self.numbers.device:
            raise ValueError(
                f"{self.name}: x is on {self.numbers.device} but {label} on {values.device}; move "
                "them together"
            )
        if not values.is_floating_point():
            raise ValueError(
                f"{self.name}: {label} must hold floating-point numbers, got {values.dtype}: they "
                f"are averaged; pass {label}.float()"
            )
        trailing = values.shape[len(shape) :]
        rows = _moved(values, self.dim, len(self.lead))
        return rows.reshape(-1, self.count, math.prod(trailing)), trailing

    def unflatten(self, rows: Tensor, trailing: torch.Size) -> Tensor:
        """Undo `flatten`: values in their original shape."""
        shape = (*self.lead, self.count, *trailing)
        rows = rows if rows.shape == shape else rows.reshape(shape)
        return _moved(rows, len(self.lead), self.dim)


def prepare(
    name: str,
    x: Tensor,
    dim: int,
    descending: bool,
    label: str = "x",
    /,
    *,
    temperature: float | Tensor = 0.1,
    unit: str = "spread",
    metric: str = "absolute",
    balance: str = "rows",
    mask: Tensor | None = None,
    hard: bool = False,
    straight_through: bool | float = False,
    backend: str = "auto",
    **unknown: Any,
) -> SoftSort:
    """Check the arguments of a soft sort and bring them to rows: a :class:`SoftSort`.

    `label` is what the caller `name` calls x, for error messages.
    """
    refuse_unknown(name, unknown, SortOptions.__annotations__)
    one_of(name, "unit", unit, UNITS)
    one = 1.0 if isinstance(temperature, Tensor) else temperature
    chosen = name, one, metric, balance, hard, straight_through
    try:  # a compiler traces the function itself, not its cache
        options = (_options if torch.compiler.is_compiling() else _known_options)(*chosen)
    except TypeError:  # a value that cannot be hashed is never valid: raise the usual error
        options = _options(*chosen)
    dim = _check_numbers(name, label, x, dim)
    mask = _check_mask(name, label, x, mask)

    rows = _moved(x, dim, x.dim() - 1)
    lead, dtype = rows.shape[:-1], torch.float64 if x.dtype == torch.float64 else torch.float32
    if isinstance(temperature, Tensor):
        t = flat_temperature(
            name, "temperature", temperature, x.device, dtype, lead,
            "its shape is that of x without the dimension that is sorted",
        )  # fmt: skip
        options = replace(options, sort_temperature=t)
    if rows.dim() != 2:  # autograd would go through a view of the same shape, too
        rows = rows.reshape(-1, x.shape[dim])
    rows = rows.to(dtype)
    if mask is not None:
        mask = _moved(mask, dim, mask.dim() - 1).reshape(rows.shape)
        rows = rows.masked_fill(~mask, 0)
    return SoftSort(name, -rows if descending else rows, mask, lead, dim, options, unit, backend)


def _options(
    name: str, temperature: float, metric: str, balance: str, hard: bool,
    straight_through: bool | float,
) -> ESPOptions:  # fmt: skip
    """Options of a soft sort, checked."""
    check_option(name, OPTIONS["sort_temperature"], temperature, "temperature")
    options = ESPOptions(
        sort_temperature=float(temperature), temperature_unit="absolute", metric=metric,
        balance=balance, hard=hard, scale=1.0, straight_through=straight_through,
        inverse_temperature=0.0, coupling="identity",
    )  # fmt: skip
    options.check(name)
    return options


_known_options = lru_cache(maxsize=256, typed=True)(_options)


def _moved(x: Tensor, source: int, target: int) -> Tensor:
    """``movedim``, or x itself if nothing moves, which saves autograd a view."""
    return x if source == target else x.movedim(source, target)


def check_padded(name: str, label: str, x: Tensor) -> None:
    """Raises for nested tensors and what is no tensor."""
    check_tensor(name, label, x)
    if x.is_nested:
        raise ValueError(
            f"{name}: {label} is a nested tensor; pad it with torch.nested.to_padded_tensor("
            f"{label}, 0.0) and pass a mask"
        )


def _check_numbers(name: str, label: str, x: Tensor, dim: int) -> int:
    """The dimension to sort along, counted from the front."""
    check_padded(name, label, x)
    if not x.is_floating_point():
        raise ValueError(
            f"{name}: {label} must hold floating-point numbers, got {x.dtype}; pass {label}.float()"
        )
    if x.dim() == 0:
        raise ValueError(f"{name}: {label} must have at least one dimension, got a single number")
    if not is_integer(dim) or not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"{name}: dim must be an integer in [{-x.dim()}, {x.dim() - 1}] for {label} of shape "
            f"{tuple(x.shape)}, got {dim!r}"
        )
    if x.shape[dim] == 0:
        raise ValueError(
            f"{name}: {label} of shape {tuple(x.shape)} has no numbers along dim {dim}; at least "
            "one is needed (for an empty row, mask its numbers)"
        )
    return dim % x.dim()


def _check_mask(name: str, label: str, x: Tensor, mask: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    check_tensor(name, "mask", mask)
    if mask.dtype != torch.bool:
        raise ValueError(
            f"{name}: mask must be boolean (True = takes part), got {mask.dtype}; for a mask of 0 "
            "and 1 pass mask.bool()"
        )
    if mask.device != x.device:
        raise ValueError(
            f"{name}: mask is on {mask.device} but {label} on {x.device}; use one device"
        )
    try:
        return mask.expand(x.shape)
    except RuntimeError:
        raise ValueError(
            f"{name}: mask of shape {tuple(mask.shape)} does not broadcast to {label} of "
            f"shape {tuple(x.shape)}"
        ) from None
