"""The attention layer: projections around a mechanism."""

import torch
from torch import Tensor, nn

from espformer.functional.arguments import is_integer, one_of
from espformer.nn.esp import ESP
from espformer.nn.mechanisms import Mechanism
from espformer.ops.common.packing import Packing

__all__ = ["Attention"]


class Attention(nn.Module):
    """Multi-head attention with any mechanism.

    Self-attention has one fused projection ``qkv`` and an output projection ``proj``, named and
    laid out as in timm, so weights of public Vision Transformers can be loaded. Cross-attention
    (``cross=True``) has ``q``, ``kv`` and ``proj``.

    Args:
        dim: width of the tokens.
        heads: number of heads.
        mechanism: computes attention between the projections; :class:`ESP` by default. The layer
            binds a copy, so you can pass one object to many layers.
        qkv_bias: bias in the projections of queries, keys and values.
        proj_bias: bias in the output projection.
        cross: attend to a second set of tokens, the context.
        key_dim: width of the context's tokens (cross-attention only); `dim` by default.
        head_dim: width of a head; ``dim // heads`` by default.
        qk_dim: width of a head's queries and keys, if it differs from that of its values;
            `head_dim` by default. With axis slices, the cost of ESP is proportional to it.
        key_init: "own" initialises the key projection independently, "query" as a copy of the
            query projection, so that tokens initially match themselves.
        dropout: dropout on the output.
        depth: index of the layer in its model, from 0; some mechanisms depend on it.

    Example:
        >>> import torch
        >>> from espformer.nn import Sinkhorn
        >>> layer = Attention(dim=32, heads=4, mechanism=Sinkhorn(iterations=3))
        >>> lengths = torch.tensor([6, 4])
        >>> mask = torch.arange(6) < lengths[:, None]
        >>> output, matrix = layer(torch.randn(2, 6, 32), mask=mask, return_matrix=True)
        >>> output.shape, matrix.shape
        (torch.Size([2, 6, 32]), torch.Size([2, 4, 6, 6]))
    """

    def __init__(
        self,
        dim: int,
        heads: int = 8,
        mechanism: Mechanism | None = None,
        *,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        cross: bool = False,
        key_dim: int | None = None,
        head_dim: int | None = None,
        qk_dim: int | None = None,
        key_init: str = "own",
        dropout: float = 0.0,
        depth: int = 0,
    ) -> None:
        super().__init__()
        one_of("Attention", "key_init", key_init, ("own", "query"))
        widths = {"key_dim": key_dim, "head_dim": head_dim, "qk_dim": qk_dim}
        given = {name: n for name, n in widths.items() if n is not None}
        for name, number in {"dim": dim, "heads": heads, **given}.items():
            if not is_integer(number):
                raise TypeError(f"Attention: {name} must be an integer, got {number!r}")
        if heads < 1 or (head_dim is None and dim % heads):
            raise ValueError(
                f"Attention: dim must be a multiple of heads, got dim={dim} and heads={heads} "
                "(or give head_dim)"
            )
        if key_dim is not None and not cross:
            raise ValueError(
                f"Attention: key_dim={key_dim} is the width of a context, which only "
                "cross-attention has (pass cross=True)"
            )
        if mechanism is not None and not isinstance(mechanism, Mechanism):
            raise TypeError(
                "Attention: mechanism must be an object such as espformer.nn.ESP(), "
                f"got {mechanism!r}"
            )
        self.dim = dim
        self.heads = heads
        self.head_dim = dim // heads if head_dim is None else head_dim
        self.qk_dim = self.head_dim if qk_dim is None else qk_dim
        self.cross = cross
        self.key_dim = dim if key_dim is None else key_dim
        self.key_init = key_init
        if self.qk_dim < 1 or (key_init == "query" and self.key_dim != dim):
            raise ValueError(
                f"Attention: got qk_dim={self.qk_dim} and key_init={key_init!r} with dim={dim} and "
                f"key_dim={self.key_dim}; qk_dim must be at least 1, and key_init='query' needs "
                "queries and keys from tokens of the same width"
            )
        width, qk_width = heads * self.head_dim, heads * self.qk_dim
        if cross:
            self.q = nn.Linear(dim, qk_width, bias=qkv_bias)
            self.kv = nn.Linear(self.key_dim, qk_width + width, bias=qkv_bias)
        else:
            self.qkv = nn.Linear(dim, 2 * qk_width + width, bias=qkv_bias)
        if key_init == "query":
            self.copy_queries_to_keys()
        self.mechanism = (ESP() if mechanism is None else mechanism).bind(
            heads, self.qk_dim, value_dim=self.head_dim, depth=depth
        )
        self.proj = nn.Linear(width, dim, bias=proj_bias)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | Packing | None = None,
        context_mask: Tensor | None = None,
        return_matrix: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend.

        Args:
            x: tokens, ``(batch, N, dim)``. Packed sequences have shape ``(tokens, dim)``, with
                their packing as the mask (self-attention only).
            context: tokens to attend to, ``(batch, M, key_dim)``; cross-attention only.
            mask: boolean ``(batch, N)``, which tokens take part.
            context_mask: boolean ``(batch, M)``, which tokens of the context take part.
            return_matrix: also return the attention matrix, at extra cost.

        Returns:
            ``(batch, N, dim)``, and with `return_matrix` also ``(batch, heads, N, M)``. At padded
            tokens the output is the bias of the output projection, since the mechanism gives zero.
        """
        if isinstance(mask, Packing):
            return self._packed(x, mask, context, context_mask, return_matrix)
        query, key, value = self._project(x, context)
        if self.cross:
            if mask is None and context_mask is not None:
                mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
            masks = {"query_mask": mask, "key_mask": context_mask}
        elif context_mask is not None:
            raise ValueError(
                "Attention: got a context_mask, but this is self-attention (mask tokens of x with "
                "mask, or build the layer with cross=True)"
            )
        else:
            masks = {"query_mask": mask, "key_mask": mask}
        output = self.mechanism(query, key, value, **masks)
        output = self.dropout(self.proj(output.transpose(1, 2).flatten(2)))
        if return_matrix:
            return output, self.mechanism.matrix(query, key, **masks)
        return output

    def _packed(
        self, x: Tensor, packing: Packing, context: Tensor | None, context_mask: Tensor | None,
        return_matrix: bool,
    ) -> Tensor:  # fmt: skip
        """Self-attention of packed sequences, ``(tokens, dim)``."""
        if self.cross or context is not None or context_mask is not None or return_matrix:
            raise ValueError(
                "Attention: packed sequences support self-attention only, without return_matrix; "
                "for a context or a matrix pass padded tokens and a mask"
            )
        if x.ndim != 2 or x.shape[-1] != self.dim:
            raise ValueError(
                f"Attention: packed x must have shape (tokens, {self.dim}), got {tuple(x.shape)}"
            )
        widths = (self.qk_dim, self.qk_dim, self.head_dim)
        parts = self.qkv(x).split([self.heads * width for width in widths], -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)) for part in parts)
        output = packing.attend(self.mechanism, query, key, value)
        dropped: Tensor = self.dropout(self.proj(output.flatten(1)))
        return dropped

    def _project(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, ...]:
        """Queries, keys and values, ``(batch, heads, tokens, head_dim)`` each."""
        _check_tokens("x", x, self.dim)
        if not self.cross:
            if context is not None:
                is_mask = isinstance(context, Tensor) and context.dtype == torch.bool
                hint = "pass a mask as mask=..." if is_mask else "build the layer with cross=True"
                raise ValueError(f"Attention: got a context, but this is self-attention ({hint})")
            return self._split(self.qkv(x), self.qk_dim, self.qk_dim, self.head_dim)
        if context is None:
            raise ValueError(
                "Attention: cross-attention needs a context (to attend to x itself pass it twice)"
            )
        _check_tokens("context", context, self.key_dim)
        if context.shape[0] != x.shape[0]:
            raise ValueError(
                f"Attention: x and context must have the same batch, got {tuple(x.shape)} and "
                f"{tuple(context.shape)}"
            )
        key, value = self._split(self.kv(context), self.qk_dim, self.head_dim)
        return *self._split(self.q(x), self.qk_dim), key, value

    def _split(self, projected: Tensor, *widths: int) -> tuple[Tensor, ...]:
        """``(batch, tokens, all)`` to ``(batch, heads, tokens, width)`` for each of the widths."""
        parts = projected.split([self.heads * width for width in widths], -1)
        return tuple(part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)

    @torch.no_grad()
    def copy_queries_to_keys(self) -> None:
        """Make the projection of the keys a copy of that of the queries."""
        width = self.heads * self.qk_dim
        queries, keys = (self.q, self.kv) if self.cross else (self.qkv, self.qkv)
        start = 0 if self.cross else width
        for source, target in ((queries.weight, keys.weight), (queries.bias, keys.bias)):
            if source is not None:
                target[start : start + width].copy_(source[:width])

    def extra_repr(self) -> str:
        parts = [f"dim={self.dim}", f"heads={self.heads}", f"head_dim={self.head_dim}"]
        if self.qk_dim != self.head_dim:
            parts.append(f"qk_dim={self.qk_dim}")
        if self.key_init != "own":
            parts.append(f"key_init={self.key_init!r}")
        if self.cross:
            parts += ["cross=True", f"key_dim={self.key_dim}"]
        return ", ".join(parts)


def _check_tokens(name: str, tokens: Tensor, width: int) -> None:
    if tokens.ndim != 3 or tokens.shape[-1] != width:
        hint = f" (for one sequence pass {name}.unsqueeze(0))" if tokens.ndim == 2 else ""
        raise ValueError(
            f"Attention: {name} must have shape (batch, tokens, {width}), "
            f"got {tuple(tokens.shape)}{hint}"
        )
