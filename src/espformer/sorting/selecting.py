"""Soft quantiles, the soft median, and soft membership among the k largest."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from espformer.functional.arguments import is_integer
from espformer.ops.common.operators import can_read
from espformer.sorting.rows import SortOptions, prepare


def soft_quantile(
    x: Tensor,
    q: float | Tensor,
    *,
    dim: int = -1,
    keepdim: bool = False,
    **options: Unpack[SortOptions],
) -> Tensor:
    """Quantiles of softly sorted numbers, interpolated linearly as in ``torch.quantile``.

    Unlike in ``torch.quantile``, every number near a quantile contributes and gets a gradient.

    Args:
        x: the numbers, of any shape, along `dim`.
        q: a number in [0, 1], or a one-dimensional tensor of K such numbers.
        dim, options: those of :func:`soft_sort`.
        keepdim: keep `dim` with size one.

    Returns:
        The shape of x without `dim`; for a tensor q preceded by K, as in ``torch.quantile``. Fully
        masked rows give zero.

    Example:
        >>> import torch
        >>> from espformer.sorting import soft_quantile
        >>> x = torch.arange(101.0)
        >>> soft_quantile(x, torch.tensor([0.1, 0.9]), temperature=0.001)
        tensor([10., 90.])
    """
    return _quantile("soft_quantile", x, q, dim, keepdim, options)


def soft_median(
    x: Tensor, *, dim: int = -1, keepdim: bool = False, **options: Unpack[SortOptions]
) -> Tensor:
    """The median of softly sorted numbers; for even N the mean of the two middle ones.

    Arguments are those of :func:`soft_quantile`.

    Returns:
        The shape of x without `dim`, or with size one there if `keepdim`.

    Example:
        >>> import torch
        >>> from espformer.sorting import soft_median
        >>> soft_median(torch.tensor([5.0, 1.0, 900.0, 3.0]), hard=True)
        tensor(4.)
    """
    return _quantile("soft_median", x, 0.5, dim, keepdim, options)


def _quantile(
    name: str, x: Tensor, q: float | Tensor, dim: int, keepdim: bool, options: SortOptions
) -> Tensor:
    sort = prepare(name, x, dim, False, **options)
    share = _check_share(name, q, sort.numbers)
    ascending = sort.sort_numbers()
    last = (sort.lengths - 1).clamp(min=0)
    place = share * last  # (batch, K)
    below = place.detach().floor()
    above = torch.minimum(below + 1, last)
    found = torch.lerp(
        ascending.gather(-1, below.long()), ascending.gather(-1, above.long()), place - below
    )
    found = found.to(x.dtype).mT.reshape(found.shape[-1], *sort.lead)
    if keepdim:
        found = found.unsqueeze(sort.dim + 1)
    return found if isinstance(q, Tensor) and q.dim() else found.squeeze(0)


def _check_share(name: str, q: float | Tensor, numbers: Tensor) -> Tensor:
    """The quantiles as one row, (1, K)."""
    if q.dim() > 1 if isinstance(q, Tensor) else not hasattr(q, "__float__"):
        got = tuple(q.shape) if isinstance(q, Tensor) else repr(q)
        raise ValueError(f"{name}: q must be a number or a tensor of one dimension, got {got}")
    given = q if isinstance(q, Tensor) else torch.tensor(q, dtype=torch.float64)
    # Values on a GPU are not checked: reading them would synchronise the device.
    looked_at = given.device.type == "cpu" and can_read(given)
    if looked_at and not bool(((given >= 0) & (given <= 1)).all()):
        raise ValueError(f"{name}: q must be in [0, 1], got {q}")
    return given.to(numbers).reshape(1, -1)


def soft_topk(
    x: Tensor, k: int, *, dim: int = -1, largest: bool = True, **options: Unpack[SortOptions]
) -> Tensor:
    r"""Soft membership among the k largest numbers: weights in [0, 1] that sum to k.

    With A the soft sort of x, largest first,

    .. math::  w_i = \sum_{n \le k} A[n, i],

    so ``(w.unsqueeze(-1) * rows).sum(-2)`` is a soft sum of k rows. The sort is balanced by default
    (``balance="both"``). With ``"rows"`` the weights also sum to k, but single weights may exceed
    one.

    Args:
        x: the numbers, of any shape, along `dim`.
        k: from 1 to N. If fewer than k numbers take part, all get weight one.
        largest: False selects the k smallest.
        dim, options: those of :func:`soft_sort`; ``hard=True`` gives zeros and ones.

    Returns:
        The weights, in the shape and dtype of x; zero for padding.

    Example:
        >>> import torch
        >>> from espformer.sorting import soft_topk
        >>> soft_topk(torch.tensor([0.1, 3.0, 2.0, -1.0]), 2, temperature=0.01)
        tensor([0., 1., 1., 0.])
    """
    balanced: SortOptions = {"balance": "both", **options}
    sort = prepare("soft_topk", x, dim, largest, **balanced)
    if not is_integer(k) or not 1 <= k <= sort.count:
        raise ValueError(
            f"soft_topk: k must be an integer from 1 to {sort.count}, the numbers along dim {dim}, "
            f"got {k!r}"
        )
    chosen = (sort.positions < k).to(sort.numbers.dtype).expand_as(sort.numbers)
    weights = sort.unsort(chosen.unsqueeze(-1))
    return sort.unflatten(weights, torch.Size()).to(x.dtype)
