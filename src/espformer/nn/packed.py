"""Attention without the cost of padding: padded batches are packed internally."""

import torch
from torch import Tensor

from espformer.nn.mechanisms import Wrapper
from espformer.ops.common.operators import can_decide_by, is_transformed
from espformer.ops.common.packing import Packing, cumulative

__all__ = ["Packed"]


class Packed(Wrapper):
    """Computes `base` without the cost of padding, by grouping sequences of similar length.

    Use it in models that pad, such as those of transformers: ``convert(model, Packed(ESP()))``.
    Output and gradients equal those of `base`, up to rounding. Python reads the lengths, so a GPU
    is synchronised. Batches without a mask, and calls that are compiled, exported, captured as a
    CUDA graph or transformed by ``torch.func``, are passed to `base` unchanged.

    Args:
        base: the mechanism.

    Example:
        >>> import torch
        >>> from espformer.nn import ESP
        >>> x = torch.randn(2, 4, 6, 8)
        >>> mask = torch.arange(6) < torch.tensor([[6], [2]])
        >>> base = ESP(slicer="axis")
        >>> masks = {"query_mask": mask, "key_mask": mask}
        >>> torch.allclose(Packed(base)(x, x, x, **masks), base(x, x, x, **masks), atol=1e-6)
        True
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        tokens = (query.shape[0], query.shape[-2]), (key.shape[0], key.shape[-2])
        by_sequence = query.dim() == 4 and all(
            mask is None or mask.shape == shape
            for mask, shape in zip((query_mask, key_mask), tokens, strict=True)
        )
        given = [mask for mask in (query_mask, key_mask) if mask is not None]
        if not given or not by_sequence or is_transformed() or not can_decide_by(query, *given):
            return self.base(query, key, value, query_mask=query_mask, key_mask=key_mask)
        # If both masks are one tensor, they stay one: queries and keys have equal lengths.
        k_mask = _mask(key_mask, tokens[1], key)
        q_mask = k_mask if query_mask is key_mask else _mask(query_mask, tokens[0], query)
        offsets = cumulative(q_mask.sum(-1).tolist())
        k_offsets = None if q_mask is k_mask else cumulative(k_mask.sum(-1).tolist())
        packing = Packing(offsets, k_offsets, device=query.device, name="Packed")
        packed = packing.attend(
            self.base,
            query.transpose(1, 2)[q_mask],
            key.transpose(1, 2)[k_mask],
            value.transpose(1, 2)[k_mask],
        )
        out = packed.new_zeros(*tokens[0], *packed.shape[1:]).index_put((q_mask,), packed)
        return out.transpose(1, 2)

    def matrix(
        self,
        query: Tensor,
        key: Tensor,
        *,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        return self.base.matrix(query, key, query_mask=query_mask, key_mask=key_mask)


def _mask(mask: Tensor | None, shape: tuple[int, int], tokens: Tensor) -> Tensor:
    """The mask, or a mask of ones if there is none."""
    return torch.ones(shape, dtype=torch.bool, device=tokens.device) if mask is None else mask
