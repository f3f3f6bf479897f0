"""Algorithm 1 of *ESPFormer: Doubly-Stochastic Attention with Expected Sliced Transport Plans*.

This is the dense formula in the paper's symbols, and the oracle that every other backend is tested
against. It takes O(L N²) time and memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from espformer.ops.esp.balancing import chebyshev_exponents
from espformer.ops.esp.coupling import couple
from espformer.ops.esp.problem import Problem


def soft_sort(v: Tensor, problem: Problem, mask: Tensor | None) -> Tensor:
    """``SoftSort_t(v)`` of v (batch, L, N): (batch, L, N, N); rows are ranks, columns tokens."""
    here = torch.ones_like(v, dtype=torch.bool) if mask is None else mask.unsqueeze(1).expand_as(v)
    options, v = problem.options, problem.in_units(v, here)
    order = v.masked_fill(~here, torch.inf).argsort(dim=-1, stable=True)  # padded tokens rank last
    sorted_v, sorted_here = v.gather(-1, order), here.gather(-1, order)
    pairs = sorted_here.unsqueeze(-1) & here.unsqueeze(-2)
    d = (sorted_v.unsqueeze(-1) - v.unsqueeze(-2)).abs()
    if options.hard:
        token = torch.arange(v.shape[-1], device=v.device)
        same = d == 0 if options.ties == "average" else order.unsqueeze(-1) == token
        kernel = (same & pairs).to(v.dtype)
    else:
        x = d * problem.inv_bandwidth().view(-1, 1, 1, 1)
        logits = (-x if options.metric == "absolute" else -x * x).masked_fill(~pairs, -torch.inf)
        if options.balance == "rows":
            return logits.masked_fill(~sorted_here.unsqueeze(-1), 0).softmax(-1) * pairs
        kernel = logits.exp()
    if options.balance == "both" and not options.hard:
        x = kernel.sum(-1).masked_fill(~sorted_here, 1).rsqrt()
        for exponent in chebyshev_exponents():
            by_token = torch.zeros_like(x).scatter(-1, order, x).unsqueeze(-1)
            row_sums = (x * (kernel @ by_token).squeeze(-1)).masked_fill(~sorted_here, 1)
            x = x * row_sums**-exponent
        by_token = torch.zeros_like(x).scatter(-1, order, x)
        return x.unsqueeze(-1) * kernel * by_token.unsqueeze(-2)
    return kernel / kernel.sum(-1, keepdim=True).clamp(min=1)


def plan(problem: Problem) -> Tensor:
    """``N · G``, the attention matrix: (batch, N, M)."""
    problem = problem.scaled()
    Q, K, tau = problem.query, problem.key, problem.options.inverse_temperature
    n, m = lengths(problem)
    ΘQ, ΘK = problem.projections()
    A = soft_sort(ΘQ, problem, problem.query_mask)
    B = soft_sort(ΘK, problem, problem.key_mask)
    T = couple(problem.options.coupling, n, m, Q.shape[-2], K.shape[-2], Q.dtype).matrix(
        K.shape[-2]
    )
    N_U = A.mT @ T.unsqueeze(1) @ B  # N · U_l, (batch, L, N, M)
    C = (Q.unsqueeze(-2) - K.unsqueeze(-3)).square().sum(-1)
    D = (C.unsqueeze(1) * N_U).sum((-2, -1)) / n.clamp(min=1).unsqueeze(-1)
    σ = problem.slice_weights(D if tau else None)
    return N_U.mean(1) if σ is None else torch.einsum("bl,blnm->bnm", σ, N_U)


def attend(problem: Problem, value: Tensor) -> Tensor:
    """``N · G V``: (batch, N, d)."""
    return plan(problem) @ value.to(problem.dtype)


def lengths(problem: Problem) -> tuple[Tensor, Tensor]:
    """Tokens that take part, per sequence: two integer tensors of shape (batch,)."""
    Q, K = problem.query, problem.key
    q = (
        Q.new_ones(Q.shape[:2], dtype=torch.bool)
        if problem.query_mask is None
        else problem.query_mask
    )
    k = K.new_ones(K.shape[:2], dtype=torch.bool) if problem.key_mask is None else problem.key_mask
    return q.sum(-1), k.sum(-1)
