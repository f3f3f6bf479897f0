"""Parts of an autoregressive decoder: causal softmax, incremental attention, decoder block.

In training, a decoder computes all positions of a known target at once; in translation, one after
the other. The two agree only if the output at a position does not depend on later positions.
Doubly-stochastic attention does not have this property, not even in cross-attention to the source:
its columns sum to one, so the weight that one query takes is missing for the others. So the decoder
uses softmax, or a mechanism built on it such as ``Differential(CausalSoftmax())``.
:class:`DecoderBlock` refuses mechanisms that look ahead.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from espformer.models.blocks import MLP, NORM_EPS, evaluating
from espformer.nn import Attention, Mechanism, Softmax

__all__ = ["CausalSoftmax", "DecoderBlock", "DecoderState", "IncrementalAttention"]


class CausalSoftmax(Mechanism):
    """Softmax attention in which a query sees the keys up to its own position.

    The N queries are the last N of the M key positions, so a single query with all keys so far
    gives the last row of the full result.

    Example:
        >>> x = torch.randn(2, 4, 5, 8)
        >>> whole = CausalSoftmax()(x, x, x)
        >>> torch.allclose(CausalSoftmax()(x[:, :, 4:], x, x), whole[:, :, 4:], atol=1e-6)
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
        self._refuse_masks(query_mask, key_mask)
        if query.shape[-2] == 1:
            return F.scaled_dot_product_attention(query, key, value)
        if query.shape[-2] == key.shape[-2]:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        seen = self._seen(query, key)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)

    def matrix(
        self,
        query: Tensor,
        key: Tensor,
        *,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        self._refuse_masks(query_mask, key_mask)
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        return scores.masked_fill(~self._seen(query, key), -torch.inf).softmax(-1)

    @staticmethod
    def _seen(query: Tensor, key: Tensor) -> Tensor:
        """Which key each query sees, ``(N, M)``."""
        n, m = query.shape[-2], key.shape[-2]
        return torch.ones(n, m, dtype=torch.bool, device=query.device).tril(m - n)

    @staticmethod
    def _refuse_masks(query_mask: Tensor | None, key_mask: Tensor | None) -> None:
        if query_mask is not None or key_mask is not None:
            raise ValueError(
                "CausalSoftmax: masks are not supported; pad targets at their end, where no "
                "earlier position sees the padding"
            )


@dataclass
class DecoderState:
    """Keys and values that a decoder block keeps between the steps of a search.

    Attributes:
        memory_key, memory_value: of the source, ``(batch, heads, source, head_dim)``.
        key, value: of the positions so far, ``(batch · beam, heads, positions, head_dim)``.
    """

    memory_key: Tensor
    memory_value: Tensor
    key: Tensor | None = None
    value: Tensor | None = None

    def reorder(self, rows: Tensor) -> None:
        """Let row i continue row ``rows[i]``; keys and values of the source do not change."""
        if self.key is not None and self.value is not None:
            self.key, self.value = self.key[rows], self.value[rows]


class IncrementalAttention(Attention):
    """:class:`espformer.nn.Attention` that can also continue from cached keys and values."""

    def advance(self, x: Tensor, state: DecoderState) -> Tensor:
        """Self-attention of the next positions ``(batch, new, dim)``; updates `state`."""
        query, key, value = self._project(x, None)
        if state.key is not None and state.value is not None:
            key = torch.cat([state.key, key], dim=2)
            value = torch.cat([state.value, value], dim=2)
        state.key, state.value = key, value
        return self._merge(self.mechanism(query, key, value))

    def memory(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a context, ``(batch, heads, M, head_dim)`` each."""
        key, value = self._split(self.kv(context), self.qk_dim, self.head_dim)
        return key, value

    def look_up(self, x: Tensor, state: DecoderState, context_mask: Tensor) -> Tensor:
        """Cross-attention of ``(batch, N, dim)`` to the context that `state` holds."""
        every = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        return self._merge(
            self.mechanism(
                *self._split(self.q(x), self.qk_dim),
                state.memory_key,
                state.memory_value,
                query_mask=every,
                key_mask=context_mask,
            )
        )

    def _merge(self, output: Tensor) -> Tensor:
        return cast(Tensor, self.dropout(self.proj(output.transpose(1, 2).flatten(2))))


class DecoderBlock(nn.Module):
    """Causal self-attention, cross-attention to the source and a feed-forward, post-norm.

    Args:
        dim: width of the tokens.
        heads: number of heads.
        mlp_dim: hidden width of the feed-forward.
        decoder_mechanism: of the self-attention; :class:`CausalSoftmax` by default.
        cross_mechanism: of the cross-attention; :class:`espformer.nn.Softmax` by default.
        dropout: on the output of all sublayers.
        depth: index of the block in its model, from 0.

    Example:
        >>> block = DecoderBlock(32, 4, mlp_dim=64)
        >>> target, source = torch.randn(2, 3, 32), torch.randn(2, 5, 32)
        >>> block(target, source, torch.ones(2, 5, dtype=torch.bool)).shape
        torch.Size([2, 3, 32])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        mlp_dim: int,
        decoder_mechanism: Mechanism | None = None,
        cross_mechanism: Mechanism | None = None,
        dropout: float = 0.0,
        depth: int = 0,
    ) -> None:
        super().__init__()
        decoder_mechanism = CausalSoftmax() if decoder_mechanism is None else decoder_mechanism
        cross_mechanism = Softmax() if cross_mechanism is None else cross_mechanism
        self.self_attn = IncrementalAttention(
            dim, heads, decoder_mechanism, dropout=dropout, depth=depth
        )
        self.norm1 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.cross_attn = IncrementalAttention(
            dim, heads, cross_mechanism, cross=True, dropout=dropout, depth=depth
        )
        self.norm2 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.mlp = MLP(dim, mlp_dim, activation=nn.ReLU(), dropout=dropout)
        self.norm3 = nn.LayerNorm(dim, eps=NORM_EPS)
        _refuse_looking_ahead(self.self_attn, "decoder_mechanism")
        _refuse_looking_ahead(self.cross_attn, "cross_mechanism")

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        """All positions of a known target at once.

        Args:
            x: ``(batch, target, dim)``.
            memory: encoded source, ``(batch, source, dim)``.
            memory_mask: boolean ``(batch, source)``, True = takes part.
        """
        # Self-attention of a new state is that of the whole target.
        return self.step(x, self.start(memory), memory_mask)

    def start(self, memory: Tensor) -> DecoderState:
        """The state before the first position, for an encoded source ``(batch, source, dim)``."""
        return DecoderState(*self.cross_attn.memory(memory))

    def step(self, x: Tensor, state: DecoderState, memory_mask: Tensor) -> Tensor:
        """Process the next positions of each target and update `state`.

        Args:
            x: ``(batch, new, dim)``, or ``(batch · beam, 1, dim)`` in a search with a beam.
            state: of this block.
            memory_mask: boolean ``(batch, source)``, True = takes part.
        """
        shape = x.shape
        x = self.norm1(x + self.self_attn.advance(x, state))
        # Cross-attention treats each query alone: the beam of a sentence can share one memory.
        x = x.view(len(memory_mask), -1, shape[-1])
        x = self.norm2(x + self.cross_attn.look_up(x, state, memory_mask))
        return cast(Tensor, self.norm3(x + self.mlp(x))).view(shape)


@torch.no_grad()
def _refuse_looking_ahead(attention: Attention, argument: str) -> None:
    """Raise if a later position changes what the attention gives to an earlier one."""
    mechanism, heads, width = attention.mechanism, attention.heads, attention.head_dim
    # Fixed numbers: building a model must not change the random number generator.
    probe = torch.arange(3.0 * heads * 5 * width).mul(1.7).sin().view(3, 1, heads, 5, width)
    if probe.is_meta:
        return
    query, key, value = probe
    changed = query.flip(-1)[:, :, 4:]
    later = [torch.cat([query[:, :, :4], changed], dim=2), key, value]
    if not attention.cross:
        later[1:] = [torch.cat([x[:, :, :4], changed], dim=2) for x in (key, value)]
    with evaluating(mechanism):
        before, after = mechanism(query, key, value), mechanism(*later)
    if not torch.allclose(before[:, :, :4], after[:, :, :4], atol=1e-4, rtol=1e-3):
        raise ValueError(
            f"DecoderBlock: with {argument}={type(mechanism).__name__} a position would see later "
            "ones, which do not exist when the model translates. Use doubly-stochastic attention "
            "in the encoder only; a decoder needs softmax (CausalSoftmax for self-attention), or "
            "a mechanism built on it"
        )
