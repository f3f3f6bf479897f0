"""ESP attention as a single custom operator, which compilers do not trace.

torch.compile would unroll the loop over groups of slices, which takes minutes, and it cannot trace
a backward pass that recomputes a group before differentiating it. Inside a custom operator both
run as in eager mode, with the same memory and for all lengths. The backward pass starts from the
inputs, which costs one more forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from espformer.ops.common.operators import autograd_inside_an_operator, refuse_double_backward
from espformer.ops.esp.options import KERNEL_OPTIONS, OPTIONS, ESPOptions
from espformer.ops.esp.problem import Problem

Attend = Callable[[Problem, Tensor], Tensor]

OPERANDS = (
    "Tensor query, Tensor key, Tensor value, Tensor? slices, Tensor? slice_logits, "
    "Tensor sort_temperature"
)
MASKS = "Tensor? query_mask, Tensor? key_mask, Tensor? keep, bool one_mask"
SETTINGS = ", ".join(
    f"{'float' if name == 'scale' else OPTIONS[name].type} {name}" for name in KERNEL_OPTIONS
)
SCHEMA = f"{OPERANDS}, {MASKS}, str identity_side, {SETTINGS}"
DIFFERENTIABLE = OPERANDS.count("Tensor")  # this many arguments, from the first
TENSORS = DIFFERENTIABLE + MASKS.count("Tensor")


def as_custom_op(name: str, attend: Attend) -> Attend:
    """Registers `attend` as the operator ``espformer::<name>``, and returns a function for it."""

    def forward(*args: Any) -> Tensor:
        return attend(*_problem(*args)).contiguous()

    def backward(upstream: Tensor, needed: list[bool], *args: Any) -> list[Tensor]:
        operands: list[Any] = [None if x is None else x.detach() for x in args[: len(needed)]]
        leaves = [x.requires_grad_() for x in _needed(operands, needed)]
        with autograd_inside_an_operator():
            out = attend(*_problem(*operands, *args[len(needed) :]))
            if not out.requires_grad:  # a hard sort has no gradient
                return [x.new_zeros(x.shape) for x in leaves]
            grads = torch.autograd.grad(out, leaves, upstream, materialize_grads=True)
        return [x.contiguous() for x in grads]

    operator = torch.library.custom_op(
        f"espformer::{name}", forward, mutates_args=(), schema=f"({SCHEMA}) -> Tensor"
    )
    operator_backward = torch.library.custom_op(
        f"espformer::{name}_backward", backward, mutates_args=(),
        schema=f"(Tensor upstream, bool[] needed, {SCHEMA}) -> Tensor[]",
    )  # fmt: skip

    @operator.register_fake
    def _(*args: Any) -> Tensor:
        problem, value = _problem(*args)
        return value.new_empty((*problem.query.shape[:2], value.shape[-1]), dtype=problem.dtype)

    @operator_backward.register_fake
    def _(upstream: Tensor, needed: list[bool], *args: Any) -> list[Tensor]:
        return [x.new_empty(x.shape) for x in _needed(args, needed)]

    def remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:TENSORS])
        ctx.settings = inputs[TENSORS:]

    @refuse_double_backward("espformer's linear-time attention")
    def gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = list(ctx.needs_input_grad[:DIFFERENTIABLE])
        found = iter(operator_backward(*grads, needed, *ctx.saved_tensors, *ctx.settings))
        rest = (None,) * (len(ctx.needs_input_grad) - DIFFERENTIABLE)
        return *(next(found) if need else None for need in needed), *rest

    operator.register_autograd(gradients, setup_context=remember)

    def call(problem: Problem, value: Tensor) -> Tensor:
        out: Tensor = operator(*_arguments(problem, value))
        return out

    return call


def _needed(operands: Any, needed: list[bool]) -> list[Tensor]:
    return [x for x, need in zip(operands, needed, strict=False) if need]


def _arguments(problem: Problem, value: Tensor) -> tuple[Any, ...]:
    """The arguments of the operator, in the order of `SCHEMA`."""
    return (
        problem.query, problem.key, value, problem.slices, problem.slice_logits,
        problem.temperatures(), problem.query_mask, problem.key_mask, problem.keep,
        problem.query_mask is problem.key_mask, problem.identity_side,
        *(getattr(problem.options, name) for name in KERNEL_OPTIONS),
    )  # fmt: skip


def _problem(
    query: Tensor, key: Tensor, value: Tensor, slices: Tensor | None, slice_logits: Tensor | None,
    sort_temperature: Tensor, query_mask: Tensor | None, key_mask: Tensor | None,
    keep: Tensor | None, one_mask: bool, identity_side: str, *settings: Any,
) -> tuple[Problem, Tensor]:  # fmt: skip
    """The inverse of :func:`_arguments`."""
    chosen = dict(zip(KERNEL_OPTIONS, settings, strict=True))
    options = ESPOptions(sort_temperature=sort_temperature, **chosen)
    key_mask = query_mask if one_mask else key_mask
    problem = Problem(
        query, key, options, slices, slice_logits, query_mask, key_mask, keep, identity_side
    )
    return problem, value
