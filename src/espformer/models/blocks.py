"""Shared by several models: encoder blocks, pooling, positions, attention matrices."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from espformer.functional.arguments import is_integer
from espformer.nn import Attention, Mechanism
from espformer.ops.common.packing import Packing

__all__ = [
    "MLP",
    "Classifier",
    "EncoderBlock",
    "check_sizes",
    "evaluating",
    "masked_max",
    "masked_mean",
    "record_attention",
    "sinusoidal_positions",
    "token_positions",
]

NORM_EPS = 1e-6


class MLP(nn.Module):
    """Two linear layers with an activation between, named ``fc1`` and ``fc2`` as in timm.

    Example:
        >>> MLP(8, 32)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self, dim: int, hidden: int, *, activation: nn.Module | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.activation = nn.GELU() if activation is None else activation
        self.fc2 = nn.Linear(hidden, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.fc2(self.activation(self.fc1(x))))


class EncoderBlock(nn.Module):
    """Self-attention and a feed-forward, each with a residual connection.

    Args:
        dim: width of the tokens.
        heads: number of heads.
        mechanism: of the attention; :class:`espformer.nn.ESP` by default.
        head_dim: width of a head; ``dim // heads`` by default.
        qk_dim, key_init: of the attention, see :class:`espformer.nn.Attention`.
        mlp_dim: hidden width of the feed-forward; None omits it and its norm.
        norm_first: pre-norm (as in ViT) or post-norm.
        activation: of the feed-forward; GELU by default.
        qkv_bias: bias in the projections of queries, keys and values.
        dropout: on the output of both sublayers.
        depth: index of the block in its model, from 0.

    Example:
        >>> EncoderBlock(32, 4, mlp_dim=64)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        mechanism: Mechanism | None = None,
        *,
        head_dim: int | None = None,
        qk_dim: int | None = None,
        key_init: str = "own",
        mlp_dim: int | None = None,
        norm_first: bool = True,
        activation: nn.Module | None = None,
        qkv_bias: bool = True,
        dropout: float = 0.0,
        depth: int = 0,
    ) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.norm1 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.attn = Attention(
            dim,
            heads,
            mechanism,
            head_dim=head_dim,
            qk_dim=qk_dim,
            key_init=key_init,
            qkv_bias=qkv_bias,
            dropout=dropout,
            depth=depth,
        )
        self.norm2: nn.LayerNorm | None = None
        self.mlp: MLP | None = None
        if mlp_dim is not None:
            self.norm2 = nn.LayerNorm(dim, eps=NORM_EPS)
            self.mlp = MLP(dim, mlp_dim, activation=activation, dropout=dropout)

    def forward(self, x: Tensor, mask: Tensor | Packing | None = None) -> Tensor:
        """``(batch, tokens, dim)`` to the same; `mask` is boolean, ``(batch, tokens)``.

        Or packed sequences, ``(tokens, dim)``, and their packing instead of a mask.
        """
        if self.norm_first:
            x = x + self.attn(self.norm1(x), mask=mask)
        else:
            x = self.norm1(x + self.attn(x, mask=mask))
        if self.mlp is None or self.norm2 is None:
            return x
        if self.norm_first:
            return x + self.mlp(self.norm2(x))
        return self.norm2(x + self.mlp(x))


class Classifier(nn.Module):
    """Base class of classification models: logits, and the attention matrices behind them."""

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits, ``(batch, classes)``; `mask` is boolean, ``(batch, tokens)``."""
        raise NotImplementedError

    @torch.no_grad()
    def attention_matrices(self, inputs: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """The attention matrices of a forward in evaluation mode, in the order they are used.

        Returns:
            One ``(batch, heads, N, M)`` for each attention layer.
        """
        with evaluating(self), record_attention(self) as matrices:
            # Not self(...): a compiled call would not notice what the record attaches.
            self.forward(inputs, mask)
        return matrices


@contextmanager
def record_attention(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the attention matrix of every mechanism that `model` calls, in the order of calls.

    Matrices are computed only for this record, and gradients flow to them as in the model. The
    matrix of a mechanism includes those that it wraps (the base of ``Differential``).

    Example:
        >>> from espformer.nn import Attention
        >>> layer = Attention(32, heads=4)
        >>> with record_attention(layer) as matrices:
        ...     _ = layer(torch.randn(2, 5, 32))
        >>> [matrix.shape for matrix in matrices]
        [torch.Size([2, 4, 5, 5])]
    """
    matrices: list[Tensor] = []

    def record(
        mechanism: Mechanism, positional: tuple[Any, ...], named: dict[str, Any], output: Tensor
    ) -> None:
        arguments = dict(zip(("query", "key", "value"), positional, strict=False)) | named
        del arguments["value"]
        matrices.append(mechanism.matrix(**arguments))

    mechanisms = [module for module in model.modules() if isinstance(module, Mechanism)]
    inner = {part for whole in mechanisms for part in whole.modules() if part is not whole}
    hooks = [
        mechanism.register_forward_hook(record, with_kwargs=True)
        for mechanism in mechanisms
        if mechanism not in inner
    ]
    try:
        yield matrices
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put `model` in evaluation mode, and restore the mode of every submodule afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def check_sizes(model: str, **sizes: int | Sequence[int] | None) -> None:
    """Refuse sizes and numbers of parts below one. A depth or the id of a token may be zero.

    Args:
        model: name of the model, for messages.
        **sizes: arguments of the model by name; None is one that is not given.

    Example:
        >>> check_sizes("VisionTransformer", patch_size=(4, 8), depth=0, mlp_dim=None)
        >>> check_sizes("VisionTransformer", depth=-1)
        Traceback (most recent call last):
        ...
        ValueError: VisionTransformer: depth must be at least 0, got -1
    """
    for name, size in sizes.items():
        least = 0 if name.endswith(("depth", "_id")) else 1
        several = isinstance(size, Sequence) and not isinstance(size, str)
        numbers: Any = size if several else [] if size is None else [size]
        for number in numbers:
            if not is_integer(number):
                raise TypeError(f"{model}: {name} must be an integer, got {number!r}")
            if number < least:
                raise ValueError(f"{model}: {name} must be at least {least}, got {size}")


def masked_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the tokens that take part; zero where none does.

    Args:
        x: ``(batch, tokens, dim)``.
        mask: boolean ``(batch, tokens)``, True = takes part; None for all.

    Returns:
        ``(batch, dim)``.

    Example:
        >>> x = torch.tensor([[[1.0], [3.0], [torch.nan]]])
        >>> masked_mean(x, torch.tensor([[True, True, False]]))
        tensor([[2.]])
    """
    if mask is None:
        return x.mean(-2)
    wide = torch.promote_types(x.dtype, torch.float32)  # a sum of float16 may overflow
    total = x.masked_fill(~mask.unsqueeze(-1), 0).sum(-2, dtype=wide)
    return (total / mask.sum(-1, keepdim=True).clamp(min=1)).to(x.dtype)


def masked_max(x: Tensor, mask: Tensor | None) -> Tensor:
    """Maximum over the tokens that take part; zero where none does.

    Args:
        x: ``(..., tokens, dim)``.
        mask: boolean ``(..., tokens)``, True = takes part; None for all.

    Returns:
        ``(..., dim)``.

    Example:
        >>> x = torch.tensor([[[-1.0], [-3.0], [5.0]]])
        >>> masked_max(x, torch.tensor([[True, True, False]]))
        tensor([[-1.]])
    """
    if mask is None:
        return x.amax(-2)
    maximum = x.masked_fill(~mask.unsqueeze(-1), -torch.inf).amax(-2)
    return maximum.masked_fill(~mask.any(-1, keepdim=True), 0)


def sinusoidal_positions(length: int, dim: int) -> Tensor:
    r"""Positions of Vaswani et al. 2017, ``(length, dim)``.

    .. math:: P_{n, 2i} = \sin(n / 10000^{2i/\text{dim}}), \quad
              P_{n, 2i+1} = \cos(n / 10000^{2i/\text{dim}})

    Example:
        >>> sinusoidal_positions(2, 4)[0]
        tensor([0., 1., 0., 1.])
    """
    frequencies = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
    angles = torch.arange(length).unsqueeze(1) * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :dim]


def token_positions(mask: Tensor) -> Tensor:
    """Position of each token among the real tokens; padding anywhere has no effect.

    Example:
        >>> token_positions(torch.tensor([[False, True, True, False]]))
        tensor([[0, 0, 1, 1]])
    """
    return (mask.cumsum(-1) - 1).clamp(min=0)
