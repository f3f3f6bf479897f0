"""Soft sorts of numbers, and of whatever belongs to them."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from espformer.sorting.rows import SortOptions, prepare


def soft_sort(
    x: Tensor,
    values: Tensor | None = None,
    *,
    dim: int = -1,
    descending: bool = False,
    temperature: float | Tensor = 0.1,
    unit: str = "spread",
    metric: str = "absolute",
    balance: str = "rows",
    mask: Tensor | None = None,
    hard: bool = False,
    straight_through: bool | float = False,
    backend: str = "auto",
) -> Tensor:
    r"""Sorts numbers softly, or anything else by them: SoftSort in linear time.

    With :math:`s = \mathrm{sort}(x)` and a temperature t,

    .. math::

        A[n, i] = \mathrm{softmax}_i\bigl(-\mathrm{dist}(s_n, x_i) / t\bigr), \qquad
        \mathrm{out} = A \, V,

    where V is `values`, or x itself. As t → 0 this is ``torch.sort``, or ``values[x.argsort()]``;
    numbers that are equal share their ranks then. Time is O(N (log N + d)) and memory O(N d): no
    N×N matrix is made, forwards or backwards. Gradients flow to `x`, `values` and `temperature`,
    once: ``backend="dense"`` has second derivatives. Inputs of 16 bits are computed in float32.

    A row of x that holds NaN or an infinity comes out as NaN, and so does its gradient; other rows
    do not see it. Numbers that are masked out may be anything.

    Args:
        x: the numbers, of any shape, along `dim`.
        values: what to sort: of the shape of x, or of that with further dimensions at the end, for
            instance x ``(batch, N)`` and values ``(batch, N, d)``. None is x itself.
        dim: the dimension of x to sort along.
        descending: largest first.
        temperature: t > 0, how soft the sort is: a number, or a tensor that broadcasts to the shape
            of x without `dim`, one for each row.
        unit: ``"spread"``: t is a share of the standard deviation of the row, the width over which
            numbers mix, with either metric, so that the same t is as soft for numbers of any scale,
            and for few or many of one distribution; gradients flow through it. ``"absolute"``: t
            is a distance, or a squared one.
        metric: ``"absolute"``, ``dist = |s - x|`` (exact), or ``"squared"``, a sum of a few
            exponentials, within 2e-7 in float32 and 3e-11 in float64 of every pair's kernel.
        balance: ``"rows"``: rows of A sum to one. ``"both"``: columns do too, within about 1e-6.
        mask: boolean, broadcasts to x, True = takes part. The others are not sorted: ranks past
            those that are hold zeros. Every row is as if it were alone.
        hard: sort exactly, numbers that are equal in the order they stand in. Without a gradient
            through the order: only to `values` (to x where it is the value, as ``torch.sort``).
        straight_through: True: the hard result with the gradient of the soft one. A number in
            [0, 1] is the share of the hard result in a mix.
        backend: see :func:`espformer.esp_attention`; ``"auto"`` picks what fits the device.

    Returns:
        `values` in the order of x, in their shape and dtype.

    Example:
        >>> import torch
        >>> from espformer.sorting import soft_sort
        >>> x = torch.tensor([3.0, 1.0, 2.0])
        >>> soft_sort(x, temperature=0.01)
        tensor([1., 2., 3.])
        >>> rows = torch.tensor([[30.0, 31.0], [10.0, 11.0], [20.0, 21.0]])
        >>> soft_sort(x, rows, temperature=0.01)
        tensor([[10., 11.],
                [20., 21.],
                [30., 31.]])

    References:
        Prillo & Eisenschlos, *SoftSort: A Continuous Relaxation for the argsort Operator*, ICML
        2020. How it takes linear time: ``docs/mathematics.md``.
    """
    sort = prepare(
        "soft_sort", x, dim, descending, temperature=temperature, unit=unit, metric=metric,
        balance=balance, mask=mask, hard=hard, straight_through=straight_through, backend=backend,
    )  # fmt: skip
    values = x if values is None else values
    rows, trailing = sort.flatten("values", values)
    return sort.unflatten(sort.sort(rows), trailing).to(values.dtype)


def soft_unsort(
    x: Tensor,
    values: Tensor,
    *,
    dim: int = -1,
    descending: bool = False,
    **options: Unpack[SortOptions],
) -> Tensor:
    """The way back, from ranks to where the numbers stand: ``out = Aᵀ V`` with A of `soft_sort`.

    Hard, it undoes :func:`soft_sort`. Soft, it is the transpose, which is as near to an inverse as
    averages come: ``soft_unsort(x, soft_sort(x, v))`` smooths v over numbers that are near. With
    ``balance="both"`` it keeps the sum, and leaves constants as they are.

    Args:
        x: the numbers, as for :func:`soft_sort`.
        values: one row for each rank, ``x.shape`` or ``x.shape + (d, ...)``.
        dim, descending, options: those of :func:`soft_sort`. With a mask, rows of ranks that
            nobody has are not looked at, and padding gets zeros.

    Example:
        >>> import torch
        >>> from espformer.sorting import soft_unsort
        >>> x = torch.tensor([3.0, 1.0, 2.0])
        >>> soft_unsort(x, torch.tensor([100.0, 200.0, 300.0]), hard=True)
        tensor([300., 100., 200.])
    """
    sort = prepare("soft_unsort", x, dim, descending, **options)
    rows, trailing = sort.flatten("values", values)
    return sort.unflatten(sort.unsort(rows), trailing).to(values.dtype)


def soft_permutation(
    x: Tensor, *, dim: int = -1, descending: bool = False, **options: Unpack[SortOptions]
) -> Tensor:
    """The matrix A of :func:`soft_sort` itself, N×N: for looking at, and for small N.

    Returns:
        The shape of x without `dim`, then ``(N ranks, N tokens)``: ``A @ values`` is
        ``soft_sort(x, values)``. Rows and columns of padding are zero.

    Example:
        >>> import torch
        >>> from espformer.sorting import soft_permutation
        >>> soft_permutation(torch.tensor([3.0, 1.0, 2.0]), hard=True)
        tensor([[0., 1., 0.],
                [0., 0., 1.],
                [1., 0., 0.]])
    """
    sort = prepare("soft_permutation", x, dim, descending, **options)
    numbers = sort.numbers
    eye = torch.eye(sort.count, dtype=numbers.dtype, device=numbers.device)
    matrix = sort.sort(eye.expand(numbers.shape[0], -1, -1))
    return matrix.reshape(*sort.lead, sort.count, sort.count).to(x.dtype)
