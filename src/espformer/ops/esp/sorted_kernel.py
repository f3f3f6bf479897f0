"""Linear-time products with the kernel matrix of sorted numbers.

For sorted numbers ``s_1 ≤ … ≤ s_N`` and ``κ[n, j] = k(|s_n - s_j| / width)`` this module computes
``κ X`` in O(N) time and memory, with its gradients. No N×N matrix is formed.

The kernel is a short sum of exponentials ``k(x) = Re Σ_r w_r exp(-p_r x)``. Ranks are divided into
chunks. Inside a chunk the small dense block of ``κ`` is used. One state per pole carries the
contribution of all earlier chunks, evaluated at the chunk's end ``e_c``:

    H_c = Σ_{j in chunks ≤ c} exp(-p (e_c - s_j)) x_j
    (κX)_n = (dense block) + Re Σ_r w_r exp(-p_r (s_n - e_{c-1})) H_{c-1,r} + (the mirror image)

and the states obey ``H_c = exp(-p (e_c - e_{c-1})) H_{c-1} + (the chunk's own sum)``. Every
exponential decays, so nothing overflows at any temperature. Distances are differences of sorted
numbers that are scaled afterwards. Differences of scaled numbers would lose all precision in
float32 at t = 1e-6.

The gradient is the same operator. With upstream P, κ symmetric and κ' odd,

    dX = κ P,     ds_n = P_n · (κ'X)_n + X_n · (κ'P)_n,     width · d/d width = -Σ_n s_n ds_n,

where κ' has the same poles with weights ``-w_r p_r``. Two things need care. ``exp(-|x|)`` has a
kink at zero. The order of equal numbers is arbitrary and must not change their gradients, so κ' is
taken as zero there. And the terms of ``Σ_n s_n ds_n`` cancel if the width is small compared with
the spread, so this sum is computed pair by pair: ``(s_n - s_j)`` times the gradient ("force")
between the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from espformer.ops.common.operators import refuse_double_backward
from espformer.ops.esp.exponentials import NEGLIGIBLE, ExponentialSum, decay

CHUNK = 32


class ChunkStates:
    """The recurrence over chunks: decays ``exp(-p x)`` to and from chunk borders, and states.

    A chunk receives two states per pole: one from the left, evaluated at the end of the previous
    chunk, and one from the right, evaluated at the start of the next chunk. The outermost chunks
    receive zeros. Both sides share one real matrix with the columns (left, right); for complex
    poles (Re left, Re right, Im left, Im right). The rows of the states have the same order.
    """

    def __init__(self, numbers: Tensor, scale: Tensor, poles: Tensor) -> None:
        first, last = numbers[..., :1], numbers[..., -1:]
        before = torch.cat([first[..., :1, :], last[..., :-1, :]], -2)
        after = torch.cat([first[..., 1:, :], last[..., -1:, :]], -2)
        self.poles, self.scale = poles, scale
        self.starts, self.ends = first, last
        self.to_end, self.from_end = (last - numbers) * scale, (numbers - before) * scale
        self.across, self.step = (after - before) * scale, (last - before) * scale
        into = self._both(self.to_end, (numbers - first) * scale)
        self.into = torch.cat([into.real, into.imag], -1) if into.is_complex() else into
        self.out_of = self._both(self.from_end, (after - numbers) * scale)
        self.decays = list(self._decays())

    def _decay(self, distance: Tensor) -> Tensor:
        """``exp(-p x)``: (...) to (..., poles)."""
        distance = distance.unsqueeze(-1)
        if not self.poles.is_complex():
            return decay(self.poles * distance)
        # Eight times as fast as torch.exp of complex numbers.
        return torch.polar(decay(self.poles.real * distance), -self.poles.imag * distance)

    def _both(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.cat([self._decay(left), self._decay(right)], -1)

    def _decays(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Decays of states over 1, 2, 4, … chunks, left and right: (…, chunks - hop, poles, 1)."""
        hop = 1
        while hop < self.ends.shape[-2]:
            left, right = (
                self._decay((x[..., hop:, :] - x[..., :-hop, :]) * self.scale).mT
                for x in (self.ends, self.starts)
            )
            yield hop, left, right
            hop *= 2

    def states(self, x: Tensor) -> Tensor:
        """The states H that arrive at every chunk: (batch, slices, chunks, rows, width).

        Every chunk sums its own part of the split operand x. Doubling adds the sums of the other
        chunks, in log2(chunks) steps.
        """
        own = self.into.mT @ x
        if self.poles.is_complex():
            own = torch.complex(*own.chunk(2, -2))
        epsilon = _magnitude(own) * NEGLIGIBLE**1.5
        left, right = own.chunk(2, -2)
        for hop, left_decay, right_decay in self.decays:
            from_left = _flush(epsilon, left[..., :-hop, :, :] * left_decay)
            from_right = _flush(epsilon, right[..., hop:, :, :] * right_decay)
            left[..., hop:, :, :].add_(from_left)
            right[..., :-hop, :, :].add_(from_right)
        # A chunk receives the states of its neighbours, without its own sum.
        arriving = torch.zeros_like(own)
        from_left, from_right = arriving.chunk(2, -2)
        from_left[..., 1:, :, :] = left[..., :-1, :, :]
        from_right[..., :-1, :, :] = right[..., 1:, :, :]
        return torch.cat([arriving.real, arriving.imag], -2) if own.is_complex() else arriving

    def readout(self, left: Tensor, right: Tensor) -> Tensor:
        """The matrix that maps states to ``Re Σ_r w_r exp(-p_r x_n) H_r``, given the weights w."""
        weighted = self.out_of * torch.cat([left, right])
        return torch.cat([weighted.real, -weighted.imag], -1) if weighted.is_complex() else weighted

    def sides(self, pulls: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over the columns that belong to the left states, and over those of the right."""
        left, right = pulls.unflatten(-1, (-1, 2, len(self.poles))).sum((-3, -1)).unbind(-1)
        return left, right

    def interaction(self, left: Tensor, right: Tensor, weights: Tensor) -> Tensor:
        """Interaction of the ranks left of each chunk with those right of it.

        ``Re Σ_r w_r exp(-p_r x) H_left,r · H_right,r``, where x is the distance across the chunk.
        """
        r = len(self.poles)
        if not self.poles.is_complex():
            left, right = left[..., :r, :], right[..., r:, :]
        else:
            left = torch.complex(left[..., :r, :], left[..., 2 * r : 3 * r, :])
            right = torch.complex(right[..., r : 2 * r, :], right[..., 3 * r :, :])
        products = (left * right).sum(-1, keepdim=True).mT
        return (weights * self._decay(self.across) * products).sum(-1).real


def _parts(states: Tensor) -> Tensor:
    return torch.view_as_real(states) if states.is_complex() else states


def _magnitude(states: Tensor) -> Tensor:
    """The largest real or imaginary part of the states of a head: (batch, 1, 1, 1, 1)."""
    return _parts(states).abs().flatten(1).amax(1).view(-1, 1, 1, 1, 1)


def _flush(epsilon: Tensor, states: Tensor) -> Tensor:
    """Sets states below epsilon to zero, in place: see `NEGLIGIBLE`."""
    numbers = _parts(states)
    numbers.masked_fill_(
        numbers.abs() < (epsilon.unsqueeze(-1) if states.is_complex() else epsilon), 0
    )
    return states


class SortedKernel:
    """The matrix ``κ[n, j] = k(|s_n - s_j| · inv_bandwidth)``, as a linear-time operator.

    Args:
        points: ``(batch, slices, ranks)``, ascending along the last dimension.
        inv_bandwidth: broadcastable to ``(batch, slices, 1)``: ``1/t`` or ``1/sqrt(t)``.
        table: the kernel as a sum of exponentials.

    Calling it maps ``(batch, slices, ranks, width)`` to the same shape. Gradients flow to the
    operand, to ``points`` and to ``inv_bandwidth``.
    """

    def __init__(self, points: Tensor, inv_bandwidth: Tensor, table: ExponentialSum) -> None:
        self.points, self.inv_bandwidth, self.table = points, inv_bandwidth, table
        differentiable = torch.is_grad_enabled() and (
            points.requires_grad or inv_bandwidth.requires_grad
        )
        with torch.no_grad():
            self._prepare(points.detach(), inv_bandwidth.detach())
            if differentiable:
                self._prepare_slopes()

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = _Product.apply(self, self.points, self.inv_bandwidth, x)
        return product

    def _prepare(self, points: Tensor, inv_bandwidth: Tensor) -> None:
        ranks = points.shape[-1]
        self.chunk = min(CHUNK, ranks)
        self.padding = -ranks % self.chunk
        if self.padding:  # repeat the last number; the operand is padded with zeros
            points = torch.cat(
                [points, points[..., -1:].expand(*points.shape[:-1], self.padding)], -1
            )
        self.numbers = points.unflatten(-1, (-1, self.chunk))  # (batch, slices, chunks, chunk)
        self.chunks = self.numbers.shape[-2]
        self.scale = inv_bandwidth.unsqueeze(-1)
        self.block = self.table.exact(self._differences().abs_())
        if self.chunks > 1:
            self.weights, poles = self._numbers(self.table.weights), self._numbers(self.table.poles)
            self.slopes = -self.weights * poles
            self.transfer = ChunkStates(self.numbers, self.scale, poles)
            self.reading = self.transfer.readout(self.weights, self.weights)

    def _numbers(self, numbers: tuple[complex, ...]) -> Tensor:
        real = not any(complex(x).imag for x in self.table.poles)
        dtype = self.numbers.dtype
        dtype = dtype if real else torch.promote_types(dtype, torch.complex64)
        return torch.tensor(numbers, dtype=dtype, device=self.numbers.device)

    def _differences(self) -> Tensor:
        """``(s_j - s_n) · inv_bandwidth`` inside every chunk."""
        s = self.numbers
        return (s.unsqueeze(-2) - s.unsqueeze(-1)).mul_(self.scale.unsqueeze(-1))

    def _prepare_slopes(self) -> None:
        """Derivatives with respect to scaled ``s_n``: of the block, and of reading the states."""
        x = self._differences()
        x = x.sign_() if self.table.metric == "absolute" else x.mul_(2)
        self.block_slope = x.mul_(self.block)
        if self.chunks > 1:  # κ' is odd: the sides differ in sign
            self.slope_readout = self.transfer.readout(self.slopes, -self.slopes)

    def _ties(self) -> ChunkStates | None:
        """States that only equal numbers of other chunks contribute to; None without such ties.

        Their pole is so large that they vanish over any distance.
        """
        first, last = self.numbers[..., 1:, 0], self.numbers[..., :-1, -1]
        # On a GPU ties are assumed: reading the numbers would synchronise the device.
        looked_at = first.device.type == "cpu" and not torch.compiler.is_compiling()
        if looked_at and not bool((first == last).any()):
            return None
        fastest = torch.finfo(self.numbers.dtype).max
        return ChunkStates(self.numbers, self.scale, self.numbers.new_tensor([fastest]))

    def split(self, x: Tensor) -> Tensor:
        """(batch, slices, ranks, width) to (batch, slices, chunks, chunk, width), zero padded."""
        if self.padding:
            x = torch.nn.functional.pad(x, (0, 0, 0, self.padding))
        return x.unflatten(-2, (self.chunks, self.chunk))

    def join(self, y: Tensor) -> Tensor:
        return y.flatten(-3, -2)[..., : self.points.shape[-1], :]

    def states(self, x: Tensor) -> Tensor | None:
        """The states of a split operand; None if there is only one chunk."""
        return self.transfer.states(x) if self.chunks > 1 else None

    def multiply(self, x: Tensor, states: Tensor | None) -> Tensor:
        """``κ x`` for a split operand and its states."""
        y = self.block @ x
        if states is not None:
            y.flatten(0, 2).baddbmm_(self.reading.flatten(0, 2), states.flatten(0, 2))
        return y

    def slope(
        self, x: Tensor, p: Tensor, x_states: Tensor | None, p_states: Tensor | None
    ) -> Tensor:
        """``ds_n = P_n · (κ'X)_n + X_n · (κ'P)_n``: (batch, slices, chunks, chunk)."""
        force = (p @ x.mT).mul_(self.block_slope)
        ds = force.sum(-1) - force.sum(-2)
        if x_states is None or p_states is None:
            return ds
        ds += self._slope_from_states(p, x_states).sum(-1) + self._slope_from_states(
            x, p_states
        ).sum(-1)
        ties = self._ties() if self.table.metric == "absolute" else None
        if ties is not None:  # remove the contribution of ties: k'(0) is zero, not -1
            one = torch.ones_like(self.slopes)
            undo = ties.readout(one, -one)
            ds += (undo * (p @ ties.states(x).mT)).sum(-1)
            ds += (undo * (x @ ties.states(p).mT)).sum(-1)
        return ds

    def _slope_from_states(self, p: Tensor, states: Tensor) -> Tensor:
        """``P_n · (κ'X)_n`` from other chunks, by states: (batch, slices, chunks, chunk, rows)."""
        return (p @ states.mT).mul_(self.slope_readout)

    def bandwidth_slope(
        self, x: Tensor, p: Tensor, x_states: Tensor | None, p_states: Tensor | None
    ) -> Tensor:
        """``Σ_n s_n ds_n`` for scaled numbers, (batch, slices, 1): pair by pair.

        The distance between two numbers has three parts: to the border of the first one's chunk,
        across the chunks between, and from the border of the second one's chunk.
        """
        force = (p @ x.mT).mul_(self.block_slope)
        total = -force.mul_(self._differences()).sum((-3, -2, -1))
        if x_states is not None and p_states is not None:
            transfer, slopes = self.transfer, self.slopes
            for rows, states in ((p, x_states), (x, p_states)):
                left, right = transfer.sides(self._slope_from_states(rows, states))
                total += (left * transfer.from_end - right * transfer.to_end).sum((-2, -1))
            interaction = transfer.interaction(x_states, p_states, slopes) + transfer.interaction(
                p_states, x_states, slopes
            )
            total += (interaction * transfer.step).sum((-2, -1))
        return total.unsqueeze(-1)


class _Product(torch.autograd.Function):
    """``κ x``. It saves O(ranks · width) numbers for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, kernel: SortedKernel, points: Tensor, inv_bandwidth: Tensor, x: Tensor
    ) -> Tensor:
        parts = kernel.split(x)
        states = kernel.states(parts)
        ctx.kernel = kernel
        ctx.save_for_backward(points, inv_bandwidth, x, states)
        return kernel.join(kernel.multiply(parts, states))

    @staticmethod
    @refuse_double_backward("espformer's linear-time soft sort")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kernel: SortedKernel = ctx.kernel
        points, inv_bandwidth, x, states = ctx.saved_tensors
        p = kernel.split(grads[0])
        p_states = kernel.states(p)
        pair = (kernel.split(x), p, states, p_states)
        d_points = d_inv_bandwidth = dx = None
        if ctx.needs_input_grad[1]:
            d_points = kernel.slope(*pair).flatten(-2)[..., : points.shape[-1]] * inv_bandwidth
        if ctx.needs_input_grad[2]:
            slope = kernel.bandwidth_slope(*pair) / inv_bandwidth
            d_inv_bandwidth = slope.sum_to_size(inv_bandwidth.shape)
        if ctx.needs_input_grad[3]:
            dx = kernel.join(kernel.multiply(p, p_states))
        return None, d_points, d_inv_bandwidth, dx
