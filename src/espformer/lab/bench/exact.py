"""The float64 result of a case, on some of its heads: what the timed result is compared with.

The dense formula where it fits; beyond that the linear-time operator in float64, whose tests
compare it with the dense formula, and Sinkhorn's algorithm in blocks of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from espformer import functional
from espformer.lab.bench.attentions import ESP, SINKHORN, Attention, differential, esp
from espformer.lab.bench.cases import Case
from espformer.lab.bench.kernel_attention import dense_kernel_attention, kernel_attention

# Numbers of the largest float64 array that an oracle may make, and of a block of rows.
LARGEST = {"cuda": 1 << 27, "cpu": 1 << 23}
LONG = 1 << 15
BLOCK = {"cuda": 1 << 27, "cpu": 1 << 20}


def results(
    attention: Attention, inputs: Sequence[Tensor], backward: bool, heads: Sequence[int] | None
) -> list[Tensor]:
    """The output and, with `backward`, the gradients in queries, keys and values; some heads."""
    query, key, value, upstream = inputs
    if not backward:
        with torch.no_grad():
            found = [attention(query, key, value)]
    else:
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        out = attention(*leaves)
        grads = torch.autograd.grad(out, leaves, upstream, materialize_grads=True)
        found = [out.detach(), *grads]
    return found if heads is None else [x[:, heads] for x in found]


def checked_heads(case: Case) -> list[int]:
    """Return the first and the last head; differential attention works on pairs of them.

    The last alone of long sequences, whose float64 result takes seconds.
    """
    last = case.heads - 1
    if case.operator == "differential" and case.heads > 1:
        return sorted({0, 1, last - 1, last})
    return [last] if case.tokens > LONG else sorted({0, last})


class Oracle:
    """Float64 results, computed once for all backends and modes of a case."""

    def __init__(self, cases: Sequence[Case], device: torch.device) -> None:
        self.device = device
        self._backward = {self._key(case) for case in cases if case.backward}
        self._users = [self._key(case) for case in cases]
        self._found: dict[tuple[object, ...], list[Tensor]] = {}

    @staticmethod
    def _key(case: Case) -> tuple[object, ...]:
        return (
            case.operator, case.tokens, case.heads, case.width, case.qk_width, case.slices,
            case.dtype, case.seed,
        )  # fmt: skip

    def __call__(self, case: Case) -> list[Tensor]:
        """Return the output, and the gradients if the case has them, of the checked heads."""
        key = self._key(case)
        if key not in self._found:
            heads = checked_heads(case)
            inputs = [x[:, heads].double() for x in case.inputs(self.device)]
            attention = _exact(case, len(heads), self.device)
            self._found[key] = results(attention, inputs, key in self._backward, None)
        found = self._found[key]
        return found if case.backward else found[:1]

    def done_with(self, case: Case) -> None:
        """Forget the result after the last case that needs it."""
        key = self._key(case)
        self._users.remove(key)
        if key not in self._users:
            self._found.pop(key, None)


def _exact(case: Case, heads: int, device: torch.device) -> Attention:
    if case.operator in ESP:
        size = heads * case.slice_count * case.tokens**2
        return esp(case, device, backend="dense" if size <= LARGEST[device.type] else "linear")
    if case.operator == "differential":
        return differential(case, device, heads, "float64")
    if case.operator == "kernel":
        size = heads * case.query_width * case.tokens**2
        return dense_kernel_attention if size <= LARGEST[device.type] else kernel_attention
    iterations = SINKHORN.get(case.operator, 1)  # softmax is the first iteration
    if heads * case.tokens**2 * (2 * iterations + 2) <= 8 * LARGEST[device.type]:
        return lambda q, k, v: functional.sinkhorn_attention(q, k, v, iterations=iterations)
    return lambda q, k, v: sinkhorn_in_blocks(q, k, v, iterations, BLOCK[device.type])


def sinkhorn_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, iterations: int, block_elements: int
) -> Tensor:
    """Sinkhorn attention of ``(1, heads, N, width)`` in blocks of rows; gradients recompute them.

    The same as :func:`espformer.sinkhorn_attention` (ε = 1, no masks), with an N×N matrix nowhere.
    """
    updates = max(iterations, 1)
    query = query * query.shape[-1] ** -0.5
    rows = max(1, block_elements // (key.shape[-2] * query.shape[1]))
    blocks = query.split(rows, dim=-2)
    columns = key.new_zeros(*key.shape[:-2], 1, key.shape[-2])  # potential of every key
    potential = [query.new_zeros(()) for _ in blocks]  # and of every query

    def by_rows(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
        return -(q @ k.mT + g).logsumexp(-1, keepdim=True)

    def by_columns(q: Tensor, k: Tensor, f: Tensor) -> Tensor:
        return (q @ k.mT + f).logsumexp(-2, keepdim=True)

    def output(q: Tensor, k: Tensor, v: Tensor, f: Tensor, g: Tensor) -> Tensor:
        return (q @ k.mT + f + g).exp() @ v

    def run(fn: Callable[..., Tensor], *args: Tensor) -> Tensor:
        result: Tensor = checkpoint(fn, *args, use_reentrant=False)
        return result

    for update in range(updates):
        if update % 2 == 0:
            potential = [run(by_rows, q, key, columns) for q in blocks]
        else:
            parts = [run(by_columns, q, key, f) for q, f in zip(blocks, potential, strict=True)]
            columns = -torch.cat(parts, dim=-2).logsumexp(-2, keepdim=True)
    out = [run(output, q, key, value, f, columns) for q, f in zip(blocks, potential, strict=True)]
    factor = 1.0 if updates % 2 else query.shape[-2] / key.shape[-2]
    return factor * torch.cat(out, dim=-2)
