"""Checks of arguments. Every error says what was wrong, what was expected and what to do."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Collection, Iterable
from dataclasses import replace
from numbers import Integral
from typing import Unpack

import torch
from torch import Tensor

from espformer.ops.common.masks import resolve_masks, zero_padding
from espformer.ops.common.operators import can_read, has_autocast, is_transformed
from espformer.ops.esp.options import OPTIONS, ESPOptions, Options, check_option
from espformer.ops.esp.problem import Problem


def make_problem(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    options: Options,
    *,
    slices: Tensor | None,
    slice_logits: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> tuple[Problem, torch.Size]:
    """The arguments as a checked :class:`Problem`, and the leading dimensions of the call."""
    if value is None:
        lead = check_tokens(name, query=query, key=key)
    else:
        lead = check_tokens(name, query=query, key=key, value=value)
    chosen = _chosen(name, options, query.shape[-1])
    refuse_causal(name, is_causal)
    if attn_mask is not None:
        given = (mask, query_mask, key_mask)
        mask, key_mask = _padding_only(name, attn_mask, query, key, *given)
    query_mask, key_mask = resolve_masks(name, query, key, query_mask, key_mask, mask)
    same_mask = query_mask is key_mask

    def flat_mask(mask: Tensor | None, tokens: int) -> Tensor | None:
        return None if mask is None else mask.expand(*lead, tokens).reshape(-1, tokens)

    query_rows = flat_mask(query_mask, query.shape[-2])
    key_rows = query_rows if same_mask else flat_mask(key_mask, key.shape[-2])
    q = zero_padding(flat(query, lead), query_rows)
    k = zero_padding(flat(key, lead), key_rows)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    theta = _slices(name, slices, q.shape[-1], q.device, dtype, lead)
    count = q.shape[-1] if theta is None else theta.shape[-2]
    keep = None
    if chosen.slice_dropout:
        draw = torch.rand(q.shape[0], count, device=q.device)
        keep = (draw >= chosen.slice_dropout) | (draw == draw.amax(-1, keepdim=True))
    temperature = flat_temperature(
        name, "sort_temperature", chosen.sort_temperature, q.device, dtype, lead,
        "for one temperature per head its shape is (heads,)",
    )  # fmt: skip
    if isinstance(temperature, Tensor):
        chosen = replace(chosen, sort_temperature=temperature)
    logits = _slice_logits(name, slice_logits, count, q.device, dtype, lead)
    return Problem(q, k, chosen, theta, logits, query_rows, key_rows, keep), lead


def _chosen(name: str, options: Options, width: int) -> ESPOptions:
    """The checked options, with the scale of heads of this width; the same ones are looked up."""
    learnt = any(isinstance(option, Tensor) for option in options.values())
    if type(width) is int and not (learnt or torch.compiler.is_compiling()):  # not while tracing
        try:
            return _looked_up(name, width, **options)
        except TypeError:  # a value that cannot be looked up, or a wrong one, which is said below
            pass
    return _with_scale(check_options(name, options), width)


@functools.lru_cache(256, typed=True)
def _looked_up(name: str, width: int, **options: Unpack[Options]) -> ESPOptions:
    return _with_scale(check_options(name, options), width)


def _with_scale(chosen: ESPOptions, width: int) -> ESPOptions:
    t = chosen.sort_temperature
    t = t if isinstance(t, Tensor) else float(t)
    scale = width**-0.5 if chosen.scale is None else chosen.scale
    return replace(chosen, sort_temperature=t, scale=scale)


# What `sorting`, the paper and torch call them, which difflib takes for others or for none.
_ALSO_CALLED = {
    "temperature": "sort_temperature",
    "t": "sort_temperature",
    "unit": "temperature_unit",
    "tau": "inverse_temperature",
    "attn_mask": "mask",
    "causal": "is_causal",
}
_ARGUMENTS = ("slices", "slice_logits", "mask", "query_mask", "key_mask", "backend", "is_causal")
_ELSEWHERE = {
    "slicer": "espformer.nn.ESP",
    "learn_temperature": "espformer.nn.ESP",
    "learn_slice_weights": "espformer.nn.ESP",
    "dim": "espformer.nn.Attention",
    "heads": "espformer.nn.Attention",
    "head_dim": "espformer.nn.Attention",
    "iterations": "espformer.nn.Sinkhorn",
    "epsilon": "espformer.nn.Sinkhorn",
}


def check_options(
    name: str, options: Options, arguments: tuple[str, ...] = _ARGUMENTS
) -> ESPOptions:
    """The options of a call, checked.

    For error messages, `name` is the called function and `arguments` are its other keywords.
    """
    refuse_unknown(name, options, OPTIONS, arguments)
    chosen = ESPOptions(**options)
    chosen.check(name)
    return chosen


def check_scale(name: str, scale: float | None) -> None:
    """Raises if a factor on the scores of the baselines is not a number that ESP takes."""
    if not isinstance(scale, Tensor):  # the baselines take tensors, too
        check_option(name, OPTIONS["scale"], scale)


def refuse_unknown(
    name: str, options: Iterable[str], known: Collection[str], others: Collection[str] = ()
) -> None:
    """Raises for the first option that is not a known one; `others` are only suggested."""
    for option in options:
        if option not in known:
            names = (*known, *others)
            near = nearest(option, names)
            hint = f"did you mean {near!r}?" if near else f"choose from {', '.join(names)}"
            if option in _ELSEWHERE and "sort_temperature" in names:
                hint = f"it belongs to {_ELSEWHERE[option]}"
            raise TypeError(f"{name}: there is no option {option!r}; {hint}")


def nearest(option: str, known: Collection[str], cutoff: float = 0.6) -> str | None:
    """The known option that was probably meant, None if no name is as near as `cutoff`."""
    also = _ALSO_CALLED.get(option, option)
    if also in known:
        return also
    names = {name: name for name in known}
    if "sort_temperature" in names:  # "temprature" is nearer to "temperature_unit" than to it
        names["temperature"] = "sort_temperature"
    close = difflib.get_close_matches(option, names, 1, cutoff)
    return names[close[0]] if close else None


def flat(x: Tensor, lead: torch.Size) -> Tensor:
    """Tokens with all leading dimensions flattened: (batch, tokens, width)."""
    if x.shape[:-2] != lead:
        x = x.expand(*lead, *x.shape[-2:])
    return x.reshape(-1, *x.shape[-2:])


def check_tensor(name: str, label: str, x: Tensor) -> None:
    """Raises for lists, arrays and anything else that is not a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{name}: {label} must be a torch.Tensor, got {type(x).__name__}; convert it with "
            "torch.as_tensor"
        )


def check_module(name: str, model: object) -> None:
    """Raises for lists of modules, classes and anything else that is not a module."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"{name}: model must be a torch.nn.Module, got {type(model).__name__}; pass one model "
            "at a time, as an object"
        )


def are_nested(name: str, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the queries are a nested tensor; raises if one of the three is no tensor at all."""
    for label, x in {"query": query, "key": key, "value": value}.items():
        check_tensor(name, label, x)
    return query.is_nested


def is_integer(n: object) -> bool:
    """Whether this is an integer of Python, numpy or a compiler, whose sizes are symbols."""
    return isinstance(n, (Integral, torch.SymInt)) and not isinstance(n, bool)


def check_tokens(
    name: str,
    shape: tuple[str, ...] = ("batch", "heads", "tokens", "head_dim"),
    **tensors: Tensor,
) -> torch.Size:
    """The leading dimensions of two clouds of tokens, and of a value for each token of the second.

    Args:
        name: the called function, for error messages.
        shape: what the caller calls the dimensions.
        tensors: two or three, by the caller's names.
    """
    for label, x in tensors.items():
        check_tensor(name, label, x)
    (one, first), (other, second), *values = tensors.items()
    for label, x in tensors.items():
        if x.is_nested:
            raise ValueError(
                f"{name}: {label} is a nested tensor, which only esp_attention and "
                "sinkhorn_attention take, for query, key and value together; pad its (batch, "
                "tokens, heads, width) with torch.nested.to_padded_tensor and pass a mask"
            )
        if x.dim() < 2:
            raise ValueError(
                f"{name}: {label} must have shape ({', '.join(shape)}) or at least "
                f"({', '.join(shape[-2:])}), got {tuple(x.shape)}"
            )
        if not x.is_floating_point():
            raise ValueError(f"{name}: {label} must hold floating-point numbers, got {x.dtype}")
        if x.element_size() < 2:
            raise ValueError(
                f"{name}: {label} is {x.dtype}, in which nothing can be added up; cast it to "
                "bfloat16, float16, float32 or float64"
            )
        if 0 in x.shape[-2:]:
            raise ValueError(
                f"{name}: {label} of shape {tuple(x.shape)} has no {shape[-2]} or no width; at "
                f"least one {shape[-2][:-1]} is needed (for an empty sequence of a batch, mask its "
                f"{shape[-2]})"
            )
        if x.device != first.device:
            raise ValueError(
                f"{name}: {one} is on {first.device} but {label} on {x.device}; use one device"
            )
        if x.dtype != first.dtype and not has_autocast(x.device):
            raise ValueError(
                f"{name}: {one} is {first.dtype} but {label} is {x.dtype}; cast them to one dtype"
            )
    if first.shape[-1] != second.shape[-1]:
        raise ValueError(
            f"{name}: {one} and {other} must have the same {shape[-1]}, got {one} "
            f"{tuple(first.shape)} and {other} {tuple(second.shape)}"
        )
    for label, x in values:
        if x.shape[-2] != second.shape[-2]:
            raise ValueError(
                f"{name}: {other} and {label} must have equally many {shape[-2]}, got {other} "
                f"{tuple(second.shape)} and {label} {tuple(x.shape)}"
            )
    lead = first.shape[:-2]
    if all(x.shape[:-2] == lead for x in tensors.values()):
        return lead
    try:
        return torch.broadcast_shapes(*(x.shape[:-2] for x in tensors.values()))
    except RuntimeError:
        shapes = ", ".join(f"{label} {tuple(x.shape)}" for label, x in tensors.items())
        heads, groups = (x.shape[-3] if x.dim() > 2 else 1 for x in (first, second))
        hint = ""
        if heads > groups > 1 and heads % groups == 0:
            hint = (
                f" (for grouped queries repeat the other tensors: x.repeat_interleave("
                f"{heads // groups}, dim=-3))"
            )
        raise ValueError(f"{name}: leading dimensions do not agree: {shapes}{hint}") from None


def flat_temperature(
    name: str, argument: str, t: float | Tensor, device: torch.device, dtype: torch.dtype,
    lead: torch.Size, advice: str,
) -> float | Tensor:  # fmt: skip
    """The temperature: a number unchanged, a tensor flattened to (batch,)."""
    if not isinstance(t, Tensor):
        return float(t)
    # Values on a GPU are not checked: reading them would synchronise the device.
    if t.device.type == "cpu" and can_read(t) and not bool((t > 0).all()):
        raise ValueError(
            f"{name}: {argument} must be > 0 everywhere, got {t} (for hard sorting pass hard=True)"
        )
    try:
        return t.to(device, dtype).expand(lead).reshape(-1)
    except RuntimeError:
        raise ValueError(
            f"{name}: {argument} of shape {tuple(t.shape)} does not broadcast to the leading "
            f"dimensions {tuple(lead)}; {advice}"
        ) from None


def _slices(
    name: str, slices: Tensor | None, head_dim: int, device: torch.device, dtype: torch.dtype,
    lead: torch.Size,
) -> Tensor | None:  # fmt: skip
    if slices is None:
        return None
    if is_integer(slices):
        raise TypeError(
            f"{name}: slices must be a tensor of directions, (slices, head_dim) or (heads, slices, "
            f"head_dim), got {slices}; espformer.nn.ESP(slices={slices}) draws them"
        )
    check_tensor(name, "slices", slices)
    if slices.dim() < 2 or slices.shape[-1] != head_dim or slices.shape[-2] == 0:
        raise ValueError(
            f"{name}: slices must have shape (L, head_dim) or (heads, L, head_dim) with head_dim "
            f"{head_dim} and L >= 1, got {tuple(slices.shape)}"
        )
    slices = slices.to(device, dtype)
    if slices.dim() == 2:
        return slices.unsqueeze(0)
    try:
        return slices.expand(*lead, *slices.shape[-2:]).reshape(-1, *slices.shape[-2:])
    except RuntimeError:
        raise ValueError(
            f"{name}: slices of shape {tuple(slices.shape)} do not broadcast to the leading "
            f"dimensions {tuple(lead)} of the queries"
        ) from None


def _slice_logits(
    name: str, logits: Tensor | None, count: int, device: torch.device, dtype: torch.dtype,
    lead: torch.Size,
) -> Tensor | None:  # fmt: skip
    if logits is None:
        return None
    check_tensor(name, "slice_logits", logits)
    if logits.dim() < 1 or logits.shape[-1] != count:
        raise ValueError(
            f"{name}: slice_logits must have shape (L,) or (heads, L) with one number for each of "
            f"the L = {count} slices, got {tuple(logits.shape)}"
        )
    try:
        return logits.to(device, dtype).expand(*lead, count).reshape(-1, count)
    except RuntimeError:
        raise ValueError(
            f"{name}: slice_logits of shape {tuple(logits.shape)} do not broadcast to the leading "
            f"dimensions {tuple(lead)} of the queries"
        ) from None


_IDENTITY = (
    "a lower-triangular matrix whose rows and columns sum to one is the identity; causal models "
    "keep softmax attention (espformer.nn.Softmax)"
)


def refuse_causal(name: str, is_causal: bool) -> None:
    """Raises if attention is to be causal."""
    if is_causal:
        raise ValueError(f"{name}: causal attention is not possible: {_IDENTITY}")


def _padding_only(
    name: str, attn_mask: Tensor, query: Tensor, key: Tensor, *others: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Padding by `attn_mask`: as the mask of self-attention, or else as that of the keys."""
    check_tensor(name, "attn_mask", attn_mask)
    padding = (*key.shape[:-3], 1, 1, key.shape[-2])
    alone = all(mask is None for mask in others)
    if attn_mask.dtype != torch.bool or attn_mask.shape != padding or not alone:
        raise ValueError(
            f"{name}: attn_mask can only say which keys are padding: boolean, of shape {padding}, "
            f"without another mask; got {attn_mask.dtype} {tuple(attn_mask.shape)}. Better pass "
            f"mask (batch, tokens). Pairwise and causal masks are not possible: {_IDENTITY}"
        )
    present = attn_mask[..., 0, 0, :]
    return (present, None) if query.shape[-2] == key.shape[-2] else (None, present)


def one_of(name: str, argument: str, got: str, allowed: tuple[str, ...]) -> None:
    if got not in allowed:
        choices = ", ".join(repr(a) for a in allowed)
        raise ValueError(f"{name}: {argument} must be one of {choices}, got {got!r}")


def runs_kernels(name: str, *tokens: Tensor) -> None:
    """Raises if the Triton kernels cannot run on these tensors."""
    device, interpreted = tokens[0].device, os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        raise ValueError(
            f'{name}: backend="triton" needs CUDA tensors, got tensors on {device}; '
            'backend="auto" selects one for the device'
        )
    if interpreted and any(x.dtype == torch.bfloat16 for x in tokens):
        raise ValueError(
            f"{name}: got torch.bfloat16, which Triton's interpreter (TRITON_INTERPRET=1) computes "
            "wrongly; pass float16 or float32, or unset TRITON_INTERPRET and use a GPU"
        )


def under_transforms(name: str, backend: str, able: str) -> bool:
    """Whether ``torch.func`` transforms this call; then raises for backends other than `able`."""
    if not is_transformed():
        return False
    if backend not in ("auto", able):
        raise ValueError(
            f'{name}: torch.func cannot transform backend="{backend}", whose gradient is '
            f'hand-written; pass backend="{able}", or "auto", which selects it'
        )
    return True
