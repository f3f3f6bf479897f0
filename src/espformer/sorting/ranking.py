"""Soft ranks, and rank correlation as a statistic and as a loss."""

from __future__ import annotations

import warnings
from typing import Unpack

import torch
from torch import Tensor

from espformer.functional.arguments import is_integer, one_of
from espformer.functional.esp import pass_through
from espformer.sorting.rows import SoftSort, SortOptions, check_padded, prepare

REDUCTIONS = ("mean", "sum", "none")


def soft_rank(
    x: Tensor, *, dim: int = -1, descending: bool = False, **options: Unpack[SortOptions]
) -> Tensor:
    r"""The expected rank of every number, counted from one, in linear time.

    With A the soft sort of x (rows are ranks), a number is distributed over the ranks in proportion
    to its column:

    .. math::  \mathrm{rank}_i = \sum_n n \, A[n, i] \Big/ \sum_n A[n, i], \qquad n = 1 \dots N.

    As t → 0 these become the ranks of ``scipy.stats.rankdata``: ties get the mean of their ranks,
    also with ``hard=True``. As t → ∞ all ranks approach (N + 1) / 2.

    Args:
        x: the numbers, of any shape, along `dim`.
        descending: rank one is the largest.
        dim, options: those of :func:`soft_sort`. Hard ranks have no gradient;
            ``straight_through=True`` gives them that of the soft ones.

    Returns:
        Ranks in the shape of x; zero for padding. 16-bit inputs give float32 ranks, since bfloat16
        cannot represent 257.

    Example:
        >>> import torch
        >>> from espformer.sorting import soft_rank
        >>> x = torch.tensor([0.3, -1.2, 0.3, 5.0])
        >>> soft_rank(x, temperature=0.001)
        tensor([2.5000, 1.0000, 2.5000, 4.0000])
    """
    sort = prepare("soft_rank", x, dim, descending, **options)
    return sort.unflatten(ranks(sort), torch.Size())


def ranks(sort: SoftSort) -> Tensor:
    """:func:`soft_rank` of rows: (batch, N)."""
    share = float(sort.options.straight_through)
    if share and not sort.options.hard:
        soft = sort.with_options(straight_through=False).expected_ranks()
        with torch.no_grad():
            hard = sort.with_options(hard=True).expected_ranks()
        return pass_through(soft, hard, share)
    return sort.expected_ranks()


def spearman(x: Tensor, y: Tensor, *, dim: int = -1, **options: Unpack[SortOptions]) -> Tensor:
    r"""Spearman's correlation of soft ranks, differentiable with respect to both arguments.

    With r and s the soft ranks of x and y (:func:`soft_rank`) and bars for means,

    .. math::  \rho = \sum_i (r_i - \bar r)(s_i - \bar s) \Big/
               \sqrt{\textstyle\sum_i (r_i - \bar r)^2 \sum_i (s_i - \bar s)^2}.

    Args:
        x, y: of shapes that broadcast to each other; ranks are taken along `dim`.
        dim, options: those of :func:`soft_sort`; ``hard=True`` gives Spearman's ρ itself, as
            ``scipy.stats.spearmanr`` does. Masked pairs are ignored.

    Returns:
        The correlation, in the shape of x without `dim`; zero if all x or all y are equal. In units
        of the spread, numbers of float32 whose spread is below a millionth of the largest count as
        equal, since they differ by little more than rounding (``hard=True`` tells them apart).

    Example:
        >>> import torch
        >>> from espformer.sorting import spearman
        >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0])
        >>> spearman(x, x.exp(), hard=True), spearman(x, -x, hard=True)
        (tensor(1.), tensor(-1.))
    """
    x, y = _broadcast("spearman", x=x, y=y)
    a = prepare("spearman", x, dim, False, **options)
    b = prepare("spearman", y, dim, False, "y", **options)
    return _correlation(a, ranks(a), b, ranks(b)).view(a.lead)


def spearman_loss(
    prediction: Tensor,
    target: Tensor,
    *,
    dim: int = -1,
    reduction: str = "mean",
    **options: Unpack[SortOptions],
) -> Tensor:
    """One minus Spearman's correlation of soft ranks of `prediction` and true ranks of `target`.

    It trains a model to rank, whatever the scale of its scores. The loss is zero for the correct
    order, about one for a random order, and two for the reverse.

    If all predictions of a row are equal, the loss is one and the gradient zero, since no order is
    closer than another. A model whose last layer is initialised with zeros therefore never starts
    to learn: initialise that layer with random numbers. A single number along `dim` has no order
    either. So predictions of shape ``(N, 1)``, as a ``Linear(width, 1)`` gives them, have to be
    squeezed to ``(N,)``, or ranked along ``dim=0``: beside a target of shape ``(N,)`` they are an
    error, and beside one of shape ``(N, 1)`` there is a warning.

    Args:
        prediction: scores of the model, ranked softly.
        target: ground truth, of any real dtype, such as integer grades: ranked exactly with
            averaged ties; it gets no gradient.
        dim: the dimension to rank along; the other dimensions are batch dimensions.
        reduction: ``"mean"`` or ``"sum"`` over the batch, or ``"none"``. Rows without an order,
            such as those that are masked altogether, count too, with a loss of one.
        options: those of :func:`soft_sort`.

    Returns:
        One number, or with ``reduction="none"`` the shape of `prediction` without `dim`.

    Example:
        >>> import torch
        >>> from espformer.sorting import spearman_loss
        >>> target = torch.tensor([10.0, 20.0, 40.0, 30.0])
        >>> prediction = torch.tensor([0.1, 0.2, 0.3, 0.4], requires_grad=True)
        >>> loss = spearman_loss(prediction, target, temperature=0.5)
        >>> loss.backward()
        >>> bool(prediction.grad[2] < 0 < prediction.grad[3])  # third up, fourth down
        True
    """
    name = "spearman_loss"
    one_of(name, "reduction", reduction, REDUCTIONS)
    given = prediction, target
    prediction, target = _broadcast(name, prediction=prediction, target=target)
    _check_order(*given, dim)
    soft = prepare(name, prediction, dim, False, "prediction", **options)
    exact: SortOptions = {**options, "hard": True}
    grades = not (target.is_floating_point() or target.is_complex())
    # float32 does not tell all integers apart; their ranks it does.
    numbers = target.double() if grades else target.detach()
    hard = prepare(name, numbers, dim, False, "target", **exact)
    true = ranks(hard).to(soft.numbers.dtype) if grades else ranks(hard)
    loss = 1 - _correlation(soft, ranks(soft), hard, true).view(soft.lead)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def _check_order(prediction: Tensor, target: Tensor, dim: int) -> None:
    """Raises, or warns, if one number along `dim` leaves nothing to order: the loss is constant."""
    together = max(prediction.dim(), target.dim())
    if not is_integer(dim) or not -together <= dim < together:
        return  # an error of its own
    axis = dim if dim < 0 else dim - together
    counts = [x.shape[axis] if x.dim() >= -axis else 1 for x in (prediction, target)]
    if type(counts[0]) is not int or type(counts[1]) is not int or 1 not in counts:
        return
    shapes = f"prediction {tuple(prediction.shape)} and target {tuple(target.shape)}"
    advice = "squeeze(-1) a column, or pass dim=0 for two of them"
    if counts != [1, 1]:
        raise ValueError(
            f"spearman_loss: got {shapes}, of which one has a single number along dim {dim}: "
            f"repeated, it has no order, so the loss would be constant; {advice}"
        )
    if prediction.numel() > 1 and not torch.compiler.is_compiling():
        warnings.warn(
            f"spearman_loss: got {shapes}, with a single number along dim {dim}: the loss is one "
            f"and its gradient zero; {advice}",
            stacklevel=3,
        )


def _broadcast(name: str, **pair: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors, by the caller's names for them, in one shape."""
    (one, x), (other, y) = pair.items()
    for label, tensor in pair.items():
        check_padded(name, label, tensor)
    if x.device != y.device:
        raise ValueError(
            f"{name}: {one} is on {x.device} but {other} on {y.device}; use one device"
        )
    try:
        x, y = torch.broadcast_tensors(x, y)
    except RuntimeError:
        raise ValueError(
            f"{name}: shapes do not agree: {one} {tuple(x.shape)} and {other} {tuple(y.shape)}"
        ) from None
    return x, y


def _correlation(x: SoftSort, a: Tensor, y: SoftSort, b: Tensor) -> Tensor:
    """Pearson's correlation of the ranks a of x and b of y, (batch,); zero if a row is constant."""
    lengths = x.lengths.clamp(min=1)

    def centred(rows: Tensor) -> Tensor:
        rows = (rows - rows.sum(-1, keepdim=True) / lengths) / lengths
        return rows if x.mask is None else rows.masked_fill(~x.mask, 0)

    a, b = centred(a), centred(b)
    norms = a.square().sum(-1) * b.square().sum(-1)
    # Ranks of equal numbers differ only by rounding, which must not count as correlation.
    epsilon = (torch.finfo(a.dtype).eps * 8) ** 2
    constant = torch.minimum(a.square().mean(-1), b.square().mean(-1)) <= epsilon
    for flat in (x.constant, y.constant):
        constant = constant if flat is None else constant | flat
    correlation = (a * b).sum(-1) / norms.masked_fill(constant, 1).sqrt()
    return correlation.masked_fill(constant, 0)
