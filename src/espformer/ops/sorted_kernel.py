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

where κ' has the same poles with weights ``-w_r p_r``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from espformer.ops.autograd import refuse_double_backward
from espformer.ops.exponentials import ExponentialSum

CHUNK = 32


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
        s = values.unflatten(-1, (-1, self.chunk))  # (batch, slices, chunks, chunk)
        scale = inverse_width.unsqueeze(-1)
        self.distance = (s.unsqueeze(-1) - s.unsqueeze(-2)).abs_().mul_(scale.unsqueeze(-1))
        self.block = self.table.exact(self.distance)
        self.chunks = s.shape[-2]
        if self.chunks == 1:
            return
        dtype = torch.promote_types(values.dtype, torch.complex64)
        poles = torch.tensor(self.table.poles, dtype=torch.complex128, device=values.device)
        self.real = not any(complex(p).imag for p in self.table.poles)
        self.poles = poles.real.to(values.dtype) if self.real else poles.to(dtype)
        weights = torch.tensor(self.table.weights, dtype=torch.complex128, device=values.device)
        self.weights = weights.real.to(values.dtype) if self.real else weights.to(dtype)
        first, last = s[..., :1], s[..., -1:]
        # Left states flow rightwards, measured at the ends of chunks; right ones mirror them.
        self.into_left = self._decay((last - s)[..., :-1, :] * scale)
        self.into_right = self._decay((s - first)[..., 1:, :] * scale)
        self.from_left = self._decay((s[..., 1:, :] - last[..., :-1, :]) * scale)
        self.from_right = self._decay((first[..., 1:, :] - s[..., :-1, :]) * scale)
        self.ends = last[..., :-1, 0]
        self.starts = first[..., 1:, 0]

    def _decay(self, distance: Tensor) -> Tensor:
        """``exp(-p x)``: (..., chunk) to (..., chunk, poles)."""
        return torch.exp(-self.poles * distance.unsqueeze(-1))

    def _scan(self, states: Tensor, positions: Tensor) -> Tensor:
        """Adds to every state what earlier ones hand on, by doubling: log2(chunks) steps."""
        scale, shift = self.inverse_width.detach(), 1
        while shift < positions.shape[-1]:
            gap = (positions[..., shift:] - positions[..., :-shift]).abs_() * scale
            earlier = states[..., :-shift, :, :] * self._decay(gap).unsqueeze(-1)
            states[..., shift:, :, :] += earlier
            shift *= 2
        return states

    def states(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Left states at chunks 0 … c-2 (for chunks 1 …) and right states at chunks 1 … (for 0 …).

        Complex states are returned as real rows: (batch, slices, chunks - 1, rows, width).
        """
        left = self._inflow(self.into_left, x[..., :-1, :, :])
        right = self._inflow(self.into_right, x[..., 1:, :, :])
        left = self._scan(left, self.ends)
        right = self._scan(right.flip(-3), self.starts.flip(-1)).flip(-3)
        return self._rows(left), self._rows(right)

    def _inflow(self, waves: Tensor, x: Tensor) -> Tensor:
        if self.real:
            return waves.mT @ x
        return torch.complex(waves.real.mT @ x, waves.imag.mT @ x)

    def _rows(self, states: Tensor) -> Tensor:
        return states if self.real else torch.cat([states.real, states.imag], -2)

    def readout(self, waves: Tensor, weights: Tensor) -> Tensor:
        """``Re Σ w exp(-p x) H`` as a real matrix that multiplies the rows of the states."""
        weighted = waves * weights
        return weighted if self.real else torch.cat([weighted.real, -weighted.imag], -1)

    def split(self, x: Tensor) -> Tensor:
        """(batch, slices, ranks, width) to (batch, slices, chunks, chunk, width), zero padded."""
        if self.padding:
            x = torch.nn.functional.pad(x, (0, 0, 0, self.padding))
        return x.unflatten(-2, (self.chunks, self.chunk))

    def join(self, y: Tensor) -> Tensor:
        return y.flatten(-3, -2)[..., : self.values.shape[-1], :]

    def multiply(self, x: Tensor, states: tuple[Tensor, Tensor] | None) -> Tensor:
        """``κ x`` for a split operand and its states."""
        y = self.block @ x
        if states is not None:
            y[..., 1:, :, :] += self.readout(self.from_left, self.weights) @ states[0]
            y[..., :-1, :, :] += self.readout(self.from_right, self.weights) @ states[1]
        return y

    def slope(
        self, x: Tensor, p: Tensor, x_states: tuple[Tensor, Tensor] | None,
        p_states: tuple[Tensor, Tensor] | None,
    ) -> Tensor:  # fmt: skip
        """``P_n · (κ'X)_n + X_n · (κ'P)_n``: (batch, slices, chunks, chunk)."""
        products = p @ x.mT
        products = products + products.mT
        if self.table.metric == "squared":
            products *= self.distance * 2
        # k' is -block (absolute) or -2 x block (squared); κ' is odd: rows right of the column lose.
        products *= self.block
        sign = torch.ones(self.chunk, self.chunk, dtype=x.dtype, device=x.device)
        ds = (products * (sign.triu(1) - sign.tril(-1))).sum(-1)
        if x_states is not None and p_states is not None:
            left = self.readout(self.from_left, -self.weights * self.poles)
            right = self.readout(self.from_right, self.weights * self.poles)
            for rows, states in ((p, x_states), (x, p_states)):
                ds[..., 1:, :] += (left * (rows[..., 1:, :, :] @ states[0].mT)).sum(-1)
                ds[..., :-1, :] += (right * (rows[..., :-1, :, :] @ states[1].mT)).sum(-1)
        return ds


class _Product(torch.autograd.Function):
    """``κ x``; what is kept for the backward is O(ranks)."""

    @staticmethod
    def forward(
        ctx: Any, kernel: SortedKernel, values: Tensor, inverse_width: Tensor, x: Tensor
    ) -> Tensor:
        parts = kernel.split(x)
        states = kernel.states(parts) if kernel.chunks > 1 else None
        ctx.kernel, ctx.has_states = kernel, states is not None
        ctx.save_for_backward(values, inverse_width, x, *(states or ()))
        return kernel.join(kernel.multiply(parts, states))

    @staticmethod
    @refuse_double_backward("espformer's linear-time soft sort")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kernel: SortedKernel = ctx.kernel
        values, inverse_width, x, *states = ctx.saved_tensors
        p = kernel.split(grads[0])
        p_states = kernel.states(p) if kernel.chunks > 1 else None
        dx = kernel.join(kernel.multiply(p, p_states)) if ctx.needs_input_grad[3] else None
        if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):
            return None, None, None, dx
        x_states = (states[0], states[1]) if ctx.has_states else None
        slope = kernel.slope(kernel.split(x), p, x_states, p_states).flatten(-2)
        slope = slope[..., : values.shape[-1]]  # per unit of scaled distance
        centred = values - values.mean(-1, keepdim=True)
        d_inverse_width = (slope * centred).sum(-1, keepdim=True).sum_to_size(inverse_width.shape)
        return None, slope * inverse_width, d_inverse_width, dx
