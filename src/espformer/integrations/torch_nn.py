"""Mechanisms inside ``torch.nn.MultiheadAttention``, alone and in torch's Transformer layers.

In evaluation mode, torch's layers bypass their attention module: they pass its weights to a fused
softmax kernel, and ``TransformerEncoder`` packs padded batches into nested tensors for it. A model
would then train with one attention and evaluate with another. A converted module reports that its
projections do not have the form that this kernel requires, so no layer takes that path. The
encoder's nested tensors are disabled.
"""

import ast
import inspect
import textwrap
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from espformer.integrations.candidates import (
    ASSUMED_CAUSAL,
    CAUSAL,
    NOT_SELF,
    Candidate,
    Converted,
    present_tokens,
    restore_class,
    split_heads,
    swap_class,
)
from espformer.nn import Mechanism
from espformer.ops.common.operators import can_read

__all__ = ["find", "revert"]

# Names of cross-attention modules in decoder layers outside torch.
_CROSS_NAMES = {"multihead_attn", "cross_attn", "cross_attention", "encoder_attn"}
_NESTED = "_espformer_use_nested_tensor"
_CROSS = "_espformer_cross"


def find(name: str, module: nn.Module, parent: nn.Module | None) -> Candidate | None:
    """The module as a candidate, if it is an ``nn.MultiheadAttention``."""
    if not isinstance(module, nn.MultiheadAttention):
        return None
    candidate = Candidate(name, module, module.num_heads, module.head_dim, convert=_convert)
    original = getattr(type(module), "original", type(module))
    if original.forward is not nn.MultiheadAttention.forward:
        candidate.refusal = f"{original.__name__} has a forward of its own"
    elif module.bias_k is not None or module.bias_v is not None:
        candidate.refusal = "add_bias_kv=True adds a key that is no token, which has no mass"
    elif module.add_zero_attn:
        candidate.refusal = "add_zero_attn=True adds a key that is no token, which has no mass"
    elif isinstance(parent, nn.TransformerDecoderLayer):
        if parent.self_attn is module:
            candidate.refusal = ASSUMED_CAUSAL
        candidate.cross = parent.multihead_attn is module
    elif not isinstance(parent, nn.TransformerEncoderLayer):
        candidate.cross, candidate.unclear = _is_cross(name.rpartition(".")[2], module, parent)
    return candidate


def _is_cross(
    name: str, module: nn.MultiheadAttention, parent: nn.Module | None
) -> tuple[bool | None, bool]:
    """Whether it is cross-attention (None: only a call shows this), and whether this is ambiguous.

    Known by the width of its keys, by its name, or by how the parent calls it: with one expression
    as query and key, or with two.
    """
    if module.kdim != module.embed_dim or name in _CROSS_NAMES:
        return True, False
    same = _called_with_one(type(parent).forward, name) if parent is not None else None
    if same or "self" in name.split("_"):
        return False, False
    return None, same is False


def _called_with_one(forward: object, name: str) -> bool | None:
    """Whether ``self.<name>(query, key, ...)`` has one expression twice; None if not found."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(cast(Any, forward)))))
    except (OSError, TypeError, SyntaxError):
        return None
    meanings: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    meanings[target.id] = ast.dump(node.value)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.{name}":
            given = dict(zip(("query", "key"), node.args, strict=False))
            given |= {k.arg: k.value for k in node.keywords if k.arg in ("query", "key")}
            if len(given) == 2:
                found.append(_meaning(given["query"], meanings) == _meaning(given["key"], meanings))
    return all(found) if found else None


def _meaning(node: ast.expr, meanings: dict[str, str]) -> str:
    """The expression, or the one that its name stands for: ``q = k = x + positions``."""
    shown = ast.dump(node)
    return meanings.get(node.id, shown) if isinstance(node, ast.Name) else shown


def _convert(candidate: Candidate, mechanism: Mechanism) -> None:
    swap_class(candidate.module, _MultiheadAttention, mechanism)
    candidate.module.__dict__[_CROSS] = (candidate.cross, candidate.given)


def prepare(model: nn.Module) -> None:
    """Switch off nested tensors in every encoder that holds a converted module."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and _holds_converted(module):
            module.__dict__.setdefault(_NESTED, getattr(module, "use_nested_tensor", False))
            module.use_nested_tensor = False


def revert(module: nn.Module) -> bool:
    """Put the original computation back; False if it is there already."""
    module.__dict__.pop(_CROSS, None)
    return isinstance(module, nn.MultiheadAttention) and restore_class(module)


def finish(model: nn.Module) -> None:
    """Switch nested tensors on again where :func:`prepare` switched them off."""
    for module in model.modules():
        if _NESTED in module.__dict__ and not _holds_converted(module):
            module.use_nested_tensor = module.__dict__.pop(_NESTED)


def _holds_converted(module: nn.Module) -> bool:
    return any(isinstance(part, _MultiheadAttention) for part in module.modules())


class _MultiheadAttention(Converted):
    """``nn.MultiheadAttention`` around a mechanism: the same arguments, the same weights."""

    @property
    def _qkv_same_embed_dim(self) -> bool:
        # The attribute that torch's layers check before they bypass this module, see above.
        return False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        module = cast(nn.MultiheadAttention, self)
        if is_causal:
            raise ValueError(f"converted MultiheadAttention: is_causal=True is refused, {CAUSAL}")
        if query.is_nested or key.is_nested:
            raise ValueError(
                "converted MultiheadAttention: got a nested tensor; pass a padded one with "
                "key_padding_mask (convert the whole nn.TransformerEncoder rather than one of its "
                "layers: then it makes no nested tensors)"
            )
        shared = query is key
        masked = key_padding_mask is not None or attn_mask is not None
        cross = _cross_in_call(module, query, key, masked=masked)
        batched = query.dim() == 3
        if not batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not module.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))

        q, k, v = (
            split_heads(x, module.num_heads)
            for x in _project(module, query, key, value, shared=shared)
        )
        key_mask = _key_mask(key_padding_mask, attn_mask, q, k)
        query_mask = key_mask
        if cross and key_mask is not None:
            query_mask = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device)
        mechanism = cast(Mechanism, module.mechanism)
        output = mechanism(q, k, v, query_mask=query_mask, key_mask=key_mask)
        output = module.out_proj(output.transpose(1, 2).flatten(2))
        if not batched:
            output = output.squeeze(0)
        elif not module.batch_first:
            output = output.transpose(0, 1)
        if not need_weights:
            return output, None
        weights = mechanism.matrix(q, k, query_mask=query_mask, key_mask=key_mask)
        weights = weights.mean(1) if average_attn_weights else weights
        return output, weights if batched else weights.squeeze(0)


def _cross_in_call(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, *, masked: bool
) -> bool:
    """Whether this call is cross-attention, whose queries do not share the padding of its keys.

    In self-attention, queries and keys may be different objects (copies or views) with the same
    values. Lengths never decide.
    """
    cross, given = module.__dict__.get(_CROSS, (None, None))
    if cross or query is key:
        return bool(cross)
    length = 0 if query.dim() == 2 or not module.batch_first else 1
    if query.shape[length] != key.shape[length]:
        if not given:
            raise ValueError(f"converted MultiheadAttention: {NOT_SELF}")
        return True
    if cross is False or not masked:
        return False  # without padding it makes no difference
    if can_read(query, key) and torch.equal(query, key):
        return False
    if given is None:
        raise ValueError(
            "converted MultiheadAttention: queries and keys are different tensors of one length, "
            "and keys are padded; whether the queries are padded too is not known. Say it with "
            "convert(..., cross=True) (cross-attention: all queries take part) or cross=False "
            "(self-attention: they share the padding)"
        )
    return bool(given)


def _project(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, *, shared: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if module.in_proj_weight is None:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    elif shared and value is key:
        q, k, v = F.linear(query, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
        return q, k, v
    else:
        weights = module.in_proj_weight.chunk(3)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    q, k, v = (
        F.linear(x, weight, bias)
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    return q, k, v


def _key_mask(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, q: Tensor, k: Tensor
) -> Tensor | None:
    """Which keys take part: ``(batch, M)`` or ``(batch, heads, M)``. In torch.nn True = ignore."""
    present = None if key_padding_mask is None else _present("key_padding_mask", key_padding_mask)
    if attn_mask is None:
        return present
    if not can_read(attn_mask):
        raise ValueError(
            "converted MultiheadAttention: attn_mask cannot be checked in a call that is compiled, "
            "captured or transformed by vmap; say which tokens are padding with key_padding_mask"
        )
    pairs = _present("attn_mask", attn_mask)
    if not torch.equal(pairs, pairs[..., :1, :].expand_as(pairs)):
        raise ValueError(
            f"converted MultiheadAttention: attn_mask of shape {tuple(attn_mask.shape)} treats "
            "queries differently. Only padding can be masked, with key_padding_mask: a causal "
            "matrix whose rows and columns sum to one is the identity (leave causal modules "
            "unconverted with convert(..., where=...))"
        )
    columns = pairs[..., 0, :]
    if bool(columns.all()):
        return present
    columns = columns.expand(k.shape[0] * k.shape[1], -1).unflatten(0, k.shape[:2])
    return columns if present is None else columns & present.unsqueeze(1)


def _present(name: str, mask: Tensor) -> Tensor:
    """A mask of torch.nn, boolean or added to the scores, as True = takes part."""
    if mask.dtype == torch.bool:
        return ~mask
    return present_tokens("converted MultiheadAttention", name, mask)
