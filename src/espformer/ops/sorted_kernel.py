"""Linear-time products with the kernel matrix of sorted numbers.

For sorted numbers ``s_1 ≤ … ≤ s_N`` and ``κ[n, j] = k(|s_n - s_j| / width)`` this module computes
``κ X`` in O(N) time and memory, with its gradients. No N×N matrix exists at any moment.

The kernel is a short sum of exponentials ``k(x) = Re Σ_r w_r exp(-p_r x)``. Ranks are cut into
chunks. Inside a chunk the small dense block of ``κ`` is used. What all earlier chunks contribute
to the points of chunk c is carried in one state per pole, measured at the chunk's end ``e_c``:

    H_c = Σ_{j in chunks ≤ c} exp(-p (e_c - s_j)) x_j
    (κX)_n = (dense block) + Re Σ_r w_r exp(-p_r (s_n - e_{c-1})) H_{c-1,r} + (the mirror image)

and the states obey ``H_c = exp(-p (e_c - e_{c-1})) H_{c-1} + (the chunk's own inflow)``. Every
exponential has a non-negative argument: no overflow, for any temperature. Distances are always
differences of sorted numbers scaled afterwards, never differences of scaled numbers: in float32
that is the difference between working and failing at t = 1e-6.

The gradient is the same operator. With upstream P, κ symmetric and κ' odd,

    dX = κ P,     ds_n = P_n · (κ'X)_n + X_n · (κ'P)_n,     width · d/d width = -Σ_n s_n ds_n,

where κ' has the same poles with weights ``-w_r p_r``. Two things need care. ``exp(-|x|)`` has a
kink at zero: equal numbers shall not push each other apart by the order they happen to stand in,
so κ' is zero there. And ``Σ_n s_n ds_n`` cancels when the width is small beside the spread: it is
added up from pairs, ``(s_n - s_j)`` times the force between them.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from espformer.ops.autograd import refuse_double_backward
from espformer.ops.exponentials import ExponentialSum

CHUNK = 32

Sides = tuple[Tensor, Tensor]  # what comes from the left, what comes from the right


class Waves:
    """What chunks hand on to each other: decays ``exp(-p x)`` to and from their borders.

    A chunk receives from the left what stood at the end of the one before it, and from the right
    what stood at the start of the one after it; the outermost receive zeros.
    """

    def __init__(self, numbers: Tensor, scale: Tensor, poles: Tensor) -> None:
        first, last = numbers[..., :1], numbers[..., -1:]
        before = torch.cat([first[..., :1, :], last[..., :-1, :]], -2)
        after = torch.cat([first[..., 1:, :], last[..., -1:, :]], -2)
        self.poles, self.scale = poles, scale
        self.starts, self.ends = first, last
        self.to_end, self.from_end = (last - numbers) * scale, (numbers - before) * scale
        self.across, self.step = (after - before) * scale, (last - before) * scale
        self.into_left = self._decay(self.to_end)
        self.into_right = self._decay((numbers - first) * scale)
        self.from_left = self._decay(self.from_end)
        self.from_right = self._decay((after - numbers) * scale)

    def _decay(self, distance: Tensor) -> Tensor:
        """``exp(-p x)``: (...) to (..., poles)."""
        return torch.exp(-self.poles * distance.unsqueeze(-1))

    def states(self, x: Tensor) -> Sides:
        """H of a split operand: two of (batch, slices, chunks, poles, width), maybe complex."""
        left = self._scan(_inflow(self.into_left, x), self.ends)
        right = self._scan(_inflow(self.into_right, x).flip(-3), self.starts.flip(-2)).flip(-3)
        none = torch.zeros_like(left[..., :1, :, :])
        return torch.cat([none, left[..., :-1, :, :]], -3), torch.cat(
            [right[..., 1:, :, :], none], -3
        )

    def _scan(self, states: Tensor, positions: Tensor) -> Tensor:
        """Adds to every state what earlier ones hand on, by doubling: log2(chunks) steps."""
        shift = 1
        while shift < positions.shape[-2]:
            gap = (positions[..., shift:, :] - positions[..., :-shift, :]).abs_() * self.scale
            earlier = states[..., :-shift, :, :] * self._decay(gap).mT
            states[..., shift:, :, :] += earlier
            shift *= 2
        return states

    def read(self, states: Sides, weights: Tensor) -> Sides:
        """``Re Σ_r w_r exp(-p_r x_n) H_r``: two of (batch, slices, chunks, chunk, width)."""
        return (
            _readout(self.from_left * weights) @ _rows(states[0]),
            _readout(self.from_right * weights) @ _rows(states[1]),
        )

    def pull(self, p: Tensor, states: Sides, weights: Tensor) -> Sides:
        """``P_n`` times the same, and negative from the right: (batch, slices, chunks, chunk)."""
        return (
            (_readout(self.from_left * weights) * (p @ _rows(states[0]).mT)).sum(-1),
            (_readout(self.from_right * -weights) * (p @ _rows(states[1]).mT)).sum(-1),
        )

    def flow(self, left: Tensor, right: Tensor, weights: Tensor) -> Tensor:
        """What passes over each chunk: ``Re Σ_r w_r exp(-p_r x) H_r · H_r``, x from end to end."""
        meeting = (left * right).sum(-1, keepdim=True).mT
        return (weights * self._decay(self.across) * meeting).sum(-1).real


def _inflow(waves: Tensor, x: Tensor) -> Tensor:
    if not waves.is_complex():
        return waves.mT @ x
    return torch.complex(waves.real.mT @ x, waves.imag.mT @ x)


def _rows(states: Tensor) -> Tensor:
    return torch.cat([states.real, states.imag], -2) if states.is_complex() else states


def _readout(weighted: Tensor) -> Tensor:
    """The real matrix that takes the real part of a product with states, given as rows."""
    return torch.cat([weighted.real, -weighted.imag], -1) if weighted.is_complex() else weighted


class SortedKernel:
    """The matrix ``κ[n, j] = k(|s_n - s_j| · inverse_width)``, ready to be multiplied with.

    Args:
        values: ``(batch, slices, ranks)``, ascending along the last dimension.
        inverse_width: broadcastable to ``(batch, slices, 1)``: ``1/t`` or ``1/sqrt(t)``.
        table: the kernel as a sum of exponentials.

    Calling it maps ``(batch, slices, ranks, width)`` to the same shape. Gradients flow to the
    operand, to ``values`` and to ``inverse_width``.
    """

    def __init__(self, values: Tensor, inverse_width: Tensor, table: ExponentialSum) -> None:
        self.values, self.inverse_width, self.table = values, inverse_width, table
        with torch.no_grad():
            self._prepare(values.detach(), inverse_width.detach())

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = _Product.apply(self, self.values, self.inverse_width, x)
        return product

    def _prepare(self, values: Tensor, inverse_width: Tensor) -> None:
        ranks = values.shape[-1]
        self.chunk = min(CHUNK, ranks)
        self.padding = -ranks % self.chunk
        if self.padding:  # repeat the last number; the operand is padded with zeros
            values = torch.cat(
                [values, values[..., -1:].expand(*values.shape[:-1], self.padding)], -1
            )
        self.numbers = values.unflatten(-1, (-1, self.chunk))  # (batch, slices, chunks, chunk)
        self.chunks = self.numbers.shape[-2]
        self.scale = inverse_width.unsqueeze(-1)
        self.block = self.table.exact(self._differences().abs_())
        if self.chunks > 1:
            self.weights, poles = self._numbers(self.table.weights), self._numbers(self.table.poles)
            self.slopes = -self.weights * poles
            self.waves = Waves(self.numbers, self.scale, poles)

    def _numbers(self, numbers: tuple[complex, ...]) -> Tensor:
        real = not any(complex(x).imag for x in self.table.poles)
        dtype = self.numbers.dtype if real else self.numbers.dtype.to_complex()
        return torch.tensor(numbers, dtype=dtype, device=self.numbers.device)

    def _differences(self) -> Tensor:
        """``(s_j - s_n) · inverse_width`` inside every chunk."""
        s = self.numbers
        return (s.unsqueeze(-2) - s.unsqueeze(-1)).mul_(self.scale.unsqueeze(-1))

    @cached_property
    def block_slope(self) -> Tensor:
        """The derivative of the block in ``s_n``, for scaled numbers."""
        x = self._differences()
        x = x.sign_() if self.table.metric == "absolute" else x.mul_(2)
        return x.mul_(self.block)

    @cached_property
    def ties(self) -> Waves:
        """Waves that die at once: they carry what stands at exactly the same number."""
        fastest = torch.finfo(self.numbers.dtype).max
        return Waves(self.numbers, self.scale, self.numbers.new_tensor([fastest]))

    def split(self, x: Tensor) -> Tensor:
        """(batch, slices, ranks, width) to (batch, slices, chunks, chunk, width), zero padded."""
        if self.padding:
            x = torch.nn.functional.pad(x, (0, 0, 0, self.padding))
        return x.unflatten(-2, (self.chunks, self.chunk))

    def join(self, y: Tensor) -> Tensor:
        return y.flatten(-3, -2)[..., : self.values.shape[-1], :]

    def states(self, x: Tensor) -> Sides | None:
        """What a split operand sends from chunk to chunk; None if there is one chunk."""
        return self.waves.states(x) if self.chunks > 1 else None

    def multiply(self, x: Tensor, states: Sides | None) -> Tensor:
        """``κ x`` for a split operand and its states."""
        y = self.block @ x
        if states is not None:
            for part in self.waves.read(states, self.weights):
                y += part
        return y

    def slope(self, x: Tensor, p: Tensor, x_states: Sides | None, p_states: Sides | None) -> Tensor:
        """``ds_n = P_n · (κ'X)_n + X_n · (κ'P)_n``: (batch, slices, chunks, chunk)."""
        force = (p @ x.mT).mul_(self.block_slope)
        ds = force.sum(-1) - force.sum(-2)
        if x_states is None or p_states is None:
            return ds
        pulls = [self.waves.pull(p, x_states, self.slopes)]
        pulls += [self.waves.pull(x, p_states, self.slopes)]
        if self.table.metric == "absolute":  # k'(0) is zero, not -1
            one = torch.ones_like(self.slopes)
            pulls += [self.ties.pull(p, self.ties.states(x), one)]
            pulls += [self.ties.pull(x, self.ties.states(p), one)]
        for left, right in pulls:
            ds += left + right
        return ds

    def stretch(
        self, x: Tensor, p: Tensor, x_states: Sides | None, p_states: Sides | None
    ) -> Tensor:
        """``Σ_n s_n ds_n`` for scaled numbers, (batch, slices, 1): pair by pair.

        The way between two numbers leads to the end of a chunk, over whole chunks, and on.
        """
        force = (p @ x.mT).mul_(self.block_slope)
        total = -force.mul_(self._differences()).sum((-3, -2, -1))
        if x_states is not None and p_states is not None:
            waves, slopes = self.waves, self.slopes
            for rows, states in ((p, x_states), (x, p_states)):
                left, right = waves.pull(rows, states, slopes)
                total += (left * waves.from_end - right * waves.to_end).sum((-2, -1))
            flow = waves.flow(x_states[0], p_states[1], slopes)
            flow += waves.flow(p_states[0], x_states[1], slopes)
            total += (flow * waves.step).sum((-2, -1))
        return total.unsqueeze(-1)


class _Product(torch.autograd.Function):
    """``κ x``; what is kept for the backward is O(ranks)."""

    @staticmethod
    def forward(
        ctx: Any, kernel: SortedKernel, values: Tensor, inverse_width: Tensor, x: Tensor
    ) -> Tensor:
        parts = kernel.split(x)
        states = kernel.states(parts)
        ctx.kernel = kernel
        ctx.save_for_backward(values, inverse_width, x, *(states or ()))
        return kernel.join(kernel.multiply(parts, states))

    @staticmethod
    @refuse_double_backward("espformer's linear-time soft sort")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kernel: SortedKernel = ctx.kernel
        values, inverse_width, x, *states = ctx.saved_tensors
        p = kernel.split(grads[0])
        p_states = kernel.states(p)
        pair = (kernel.split(x), p, (states[0], states[1]) if states else None, p_states)
        d_values = d_inverse_width = dx = None
        if ctx.needs_input_grad[1]:
            d_values = kernel.slope(*pair).flatten(-2)[..., : values.shape[-1]] * inverse_width
        if ctx.needs_input_grad[2]:
            stretch = kernel.stretch(*pair) / inverse_width
            d_inverse_width = stretch.sum_to_size(inverse_width.shape)
        if ctx.needs_input_grad[3]:
            dx = kernel.join(kernel.multiply(p, p_states))
        return None, d_values, d_inverse_width, dx
