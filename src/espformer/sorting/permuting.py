"""Soft sorts of numbers, and of rows by numbers."""

from __future__ import annotations

from numbers import Real
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
    **options: Unpack[SortOptions],
) -> Tensor:
    r"""Soft sort of numbers, or of other values by them: SoftSort in linear time.

    With :math:`s = \mathrm{sort}(x)` and a temperature t,

    .. math::

        A[n, i] = \mathrm{softmax}_i\bigl(-\mathrm{dist}(s_n, x_i) / t\bigr), \qquad
        \mathrm{out} = A \, V,

    where V is `values`, or x itself. As t → 0 this becomes ``torch.sort``, or
    ``values[x.argsort()]``, except that equal numbers share their ranks. Time is O(N (log N + d))
    and memory O(N d). No N×N matrix is formed in the forward or backward pass. Gradients flow to
    `x`, `values` and `temperature`. Only ``backend="dense"`` supports second derivatives. 16-bit
    inputs are computed in float32.

    A row of x that contains NaN or an infinity gives NaN, and so does its gradient; other rows are
    not affected. Masked numbers may hold anything.

    Args:
        x: the numbers, of any shape, along `dim`.
        values: what to sort. The shape is that of x, optionally followed by further dimensions, for
            instance x ``(batch, N)`` and values ``(batch, N, d)``. None means x itself.
        dim: the dimension of x to sort along.
        descending: largest first.
        temperature: t > 0, the softness of the sort, by default 0.1: a number, or a tensor that
            broadcasts to the shape of x without `dim`, one value per row.
        unit: ``"spread"`` (default): t is a fraction of the standard deviation of the row, the
            width over which numbers mix, with either metric. The same t is then equally soft at any
            scale, and for few or many numbers from one distribution. Gradients flow through the
            spread. ``"absolute"``: t is a distance, or a squared distance.
        metric: ``"absolute"`` (default), ``dist = |s - x|``, exact; or ``"squared"``, a sum of a
            few exponentials: each kernel entry is within 2e-7 in float32 and 3e-11 in float64.
        balance: ``"rows"`` (default): rows of A sum to one. ``"both"``: columns do too, within
            about 1e-6.
        mask: boolean, broadcasts to x, True = takes part. Masked numbers are not sorted, and the
            surplus ranks hold zeros. Each row gives the same result as on its own.
        hard: sort exactly, with a stable order of equal numbers. There is no gradient through the
            order, only to `values` (to x if it is the value, as in ``torch.sort``).
        straight_through: True: the hard result with the gradient of the soft one. A number in
            [0, 1] is the share of the hard result in a mix.
        backend: see :func:`espformer.esp_attention`; ``"auto"`` selects one for the device.

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
    if isinstance(values, Real):
        raise TypeError(
            f"soft_sort: values must be a tensor, what to sort by x, got {values}; a temperature "
            f"is passed by name, temperature={values}"
        )
    sort = prepare("soft_sort", x, dim, descending, **options)
    if values is None:
        numbers = sort.sort_numbers()
        return sort.unflatten(-numbers if descending else numbers, torch.Size()).to(x.dtype)
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
    """The inverse of a sort, from ranks to positions: ``out = Aᵀ V`` with A of `soft_sort`.

    With ``hard=True`` it undoes :func:`soft_sort`. Otherwise it is the transpose, which is only an
    approximate inverse: ``soft_unsort(x, soft_sort(x, v))`` smooths v over nearby numbers. With
    ``balance="both"`` it preserves sums and constants.

    Args:
        x: the numbers, as for :func:`soft_sort`.
        values: one row for each rank, ``x.shape`` or ``x.shape + (d, ...)``.
        dim, descending, options: those of :func:`soft_sort`. With a mask, values at surplus ranks
            are ignored, and padding gets zeros.

    Returns:
        One row for each number of x, in the shape and dtype of `values`.

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
    """The N×N matrix A of :func:`soft_sort`, for inspection and small N.

    Args:
        x: the numbers, of any shape, along `dim`.
        dim, descending, options: those of :func:`soft_sort`.

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
