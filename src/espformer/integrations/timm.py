"""Mechanisms inside the attention of timm's Vision Transformers.

Modules are recognised by their attributes and by what they compute. So timm itself is not imported,
and copies of the class in other libraries work too. ``qkv``, ``proj`` and the optional norms are
kept; only the computation between them changes.
"""

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn

from espformer.integrations.candidates import (
    CAUSAL,
    Candidate,
    Converted,
    restore_class,
    swap_class,
    unusual_scale,
)
from espformer.nn import Mechanism, Softmax

__all__ = ["find", "revert"]

# What timm's `Attention` holds, and what its forward takes. Anything more (windows with a table of
# biases, rotary positions) is another attention, whose meaning would be lost.
_PARTS = {"qkv", "q_norm", "k_norm", "attn_drop", "norm", "proj", "proj_drop", "mechanism"}
_ARGUMENTS = {"self", "x", "attn_mask", "is_causal"}


def find(name: str, module: nn.Module, parent: nn.Module | None) -> Candidate | None:
    """The module as a candidate, if it is built like timm's ``Attention``."""
    if not _looks_like_timm(module):
        return None
    heads = int(cast(Any, module.num_heads))
    head_dim = cast(nn.Linear, module.qkv).out_features // (3 * heads)
    candidate = Candidate(name, module, heads, head_dim, convert=_convert)
    candidate.scale = unusual_scale(cast(Any, getattr(module, "scale", None)), head_dim)
    original = getattr(type(module), "original", type(module))
    extra = set(dict(module.named_children())) - _PARTS
    extra |= set(dict(module.named_parameters(recurse=False)))
    arguments = set(inspect.signature(original.forward).parameters) - _ARGUMENTS
    if extra or arguments:
        more = ", ".join(sorted(extra | arguments))
        candidate.refusal = f"more than plain attention of a Vision Transformer: {more}"
    elif not isinstance(module, _Attention) and not _is_softmax_attention(module):
        candidate.refusal = "computes something else than plain softmax attention"
    return candidate


def _looks_like_timm(module: nn.Module) -> bool:
    original = getattr(type(module), "original", type(module))
    children = dict(module.named_children())
    qkv, heads = children.get("qkv"), getattr(module, "num_heads", None)
    return (
        "Attention" in original.__name__
        and isinstance(qkv, nn.Linear)
        and "proj" in children
        and isinstance(heads, int)
        and qkv.out_features % (3 * heads) == 0
    )


@torch.no_grad()
def _is_softmax_attention(module: nn.Module) -> bool:
    """Whether the converted module with softmax gives the same output as the module, on a small
    input.

    Modules with the same attributes may order the columns of ``qkv`` differently, or attend with
    one token only.
    """
    weight = cast(nn.Linear, module.qkv).weight
    if weight.is_meta:
        return True
    width = weight.shape[1]
    probe = torch.arange(2.0 * 5 * width).mul(1.7).sin().view(2, 5, width).to(weight)
    modes = {part: part.training for part in module.modules()}
    try:
        expected = module.eval()(probe)
        softmax = Softmax(scale=cast(Any, getattr(module, "scale", None)))
        found = _attend(module, softmax, probe, None)
    except (RuntimeError, ValueError, TypeError):  # it takes other shapes
        return False
    finally:
        for part, mode in modes.items():
            part.training = mode
    error = 1e-4 if weight.dtype in (torch.float32, torch.float64) else 3e-2
    return found.shape == expected.shape and torch.allclose(found, expected, error, error)


def _convert(candidate: Candidate, mechanism: Mechanism) -> None:
    swap_class(candidate.module, _Attention, mechanism)


def revert(module: nn.Module) -> bool:
    """Put the original computation back; False if it is there already."""
    return isinstance(module, _Attention) and restore_class(module)


class _Attention(Converted):
    """timm's ``Attention`` around a mechanism: ``(batch, tokens, dim)`` to the same shape."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        module = cast(Any, self)
        if is_causal:
            raise ValueError(f"converted Attention: is_causal=True is refused, {CAUSAL}")
        return _attend(module, module.mechanism, x, _key_mask(attn_mask, x))


def _attend(module: Any, mechanism: Mechanism, x: Tensor, mask: Tensor | None) -> Tensor:
    query, key, value = (
        module.qkv(x).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
    )
    query = getattr(module, "q_norm", _same)(query)
    key = getattr(module, "k_norm", _same)(key)
    output = mechanism(query, key, value, query_mask=mask, key_mask=mask)
    output = getattr(module, "norm", _same)(output.transpose(1, 2).flatten(2))
    return cast(Tensor, getattr(module, "proj_drop", _same)(module.proj(output)))


def _same(x: Tensor) -> Tensor:
    return x


def _key_mask(attn_mask: Tensor | None, x: Tensor) -> Tensor | None:
    """``(batch, tokens)`` from the mask of all heads and queries, ``(batch, 1, 1, tokens)``."""
    if attn_mask is None:
        return None
    batch, tokens = x.shape[:2]
    if attn_mask.dtype != torch.bool or attn_mask.shape != (batch, 1, 1, tokens):
        raise ValueError(
            "converted Attention: attn_mask can only say which tokens take part: boolean, of shape "
            f"{(batch, 1, 1, tokens)}; got {attn_mask.dtype} {tuple(attn_mask.shape)}"
        )
    return attn_mask[:, 0, 0]
