"""Set Transformer (Lee et al., ICML 2019, https://arxiv.org/abs/1810.00825).

Blocks follow the equations of that paper. With X and Y sets of vectors,

    MAB(X, Y)  = LayerNorm(H + rFF(H)),   H = LayerNorm(X + Multihead(X, Y, Y))
    SAB(X)     = MAB(X, X)
    ISAB(X)    = MAB(X, MAB(I, X)),       I trained inducing points
    PMA(X)     = MAB(S, X),               S trained seeds

where rFF is one linear layer with ReLU. In all but SAB the numbers of queries and keys may differ
(N ≠ M), so the mechanism's coupling of unequal sets is used here.
"""

from typing import cast

import torch
from torch import Tensor, nn

from espformer.models.blocks import NORM_EPS, Classifier, check_sizes
from espformer.nn import Attention, Mechanism

__all__ = ["ISAB", "MAB", "PMA", "SAB", "SetTransformer"]


class MAB(nn.Module):
    """Multi-head attention block, MAB(X, Y).

    Example:
        >>> x, y = torch.randn(2, 3, 32), torch.randn(2, 7, 32)
        >>> MAB(32, 4)(x, y).shape
        torch.Size([2, 3, 32])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        mechanism: Mechanism | None = None,
        *,
        layer_norm: bool = True,
        depth: int = 0,
    ) -> None:
        super().__init__()
        self.attn = Attention(dim, heads, mechanism, cross=True, depth=depth)
        self.fc = nn.Linear(dim, dim)
        self.norm1 = nn.LayerNorm(dim, eps=NORM_EPS) if layer_norm else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=NORM_EPS) if layer_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """``(batch, N, dim)``, for a context of shape ``(batch, M, dim)``."""
        x = self.norm1(x + self.attn(x, context, mask=mask, context_mask=context_mask))
        return cast(Tensor, self.norm2(x + self.fc(x).relu()))


class SAB(nn.Module):
    """Set attention block: every element attends to all, N×N.

    Example:
        >>> SAB(32, 4)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        mechanism: Mechanism | None = None,
        *,
        layer_norm: bool = True,
        depth: int = 0,
    ) -> None:
        super().__init__()
        self.mab = MAB(dim, heads, mechanism, layer_norm=layer_norm, depth=depth)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.mab(x, x, mask, mask)


class ISAB(nn.Module):
    """Induced set attention block: uses a few trained inducing points, linear in the set size.

    Example:
        >>> ISAB(32, 4, inducing_points=3)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        mechanism: Mechanism | None = None,
        *,
        inducing_points: int,
        layer_norm: bool = True,
        depth: int = 0,
    ) -> None:
        super().__init__()
        self.inducing_points = nn.Parameter(torch.empty(inducing_points, dim))
        nn.init.xavier_uniform_(self.inducing_points)
        self.gather = MAB(dim, heads, mechanism, layer_norm=layer_norm, depth=depth)
        self.spread = MAB(dim, heads, mechanism, layer_norm=layer_norm, depth=depth)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        points = self.inducing_points.expand(x.shape[0], -1, -1)
        return self.spread(x, self.gather(points, x, context_mask=mask), mask=mask)


class PMA(nn.Module):
    """Pooling by multi-head attention: trained seeds attend to the set.

    A doubly-stochastic matrix with a single row is uniform, so with one seed such a mechanism
    computes the mean; use several seeds.

    Example:
        >>> PMA(32, 4, seeds=2)(torch.randn(3, 5, 32)).shape
        torch.Size([3, 2, 32])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        mechanism: Mechanism | None = None,
        *,
        seeds: int,
        layer_norm: bool = True,
        depth: int = 0,
    ) -> None:
        super().__init__()
        self.seeds = nn.Parameter(torch.empty(seeds, dim))
        nn.init.xavier_uniform_(self.seeds)
        self.mab = MAB(dim, heads, mechanism, layer_norm=layer_norm, depth=depth)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.mab(self.seeds.expand(x.shape[0], -1, -1), x, context_mask=mask)


class SetTransformer(Classifier):
    """Set Transformer for point clouds: ISABs, then PMA, SABs and a linear layer.

    The defaults are the ModelNet40 model of the ESPFormer paper (two ISABs in the encoder, a PMA
    and a SAB in the decoder) with the sizes of the code it builds on (Sinkformers). The paper does
    not give the number of seeds. With one seed the SAB would do nothing, and a doubly-stochastic
    PMA would be the mean.

    Points are first mapped linearly to `dim`, so that every block has one width.

    Args:
        classes: number of classes.
        mechanism: of all attention layers; :class:`espformer.nn.ESP` by default.
        channels: coordinates and features of a point.
        dim: width of all blocks.
        heads: heads of each attention layer.
        inducing_points: of each ISAB.
        encoder_depth: number of ISABs.
        seeds: of the PMA; their outputs are concatenated before the last layer.
        decoder_depth: number of SABs after the PMA.
        dropout: before the PMA and before the last layer.
        layer_norm: normalise inside the blocks.

    Example:
        >>> from espformer.nn import Sinkhorn
        >>> model = SetTransformer(dim=32, mechanism=Sinkhorn(iterations=5))
        >>> points = torch.randn(2, 20, 3)
        >>> model(points).shape
        torch.Size([2, 40])
        >>> [tuple(matrix.shape[-2:]) for matrix in model.attention_matrices(points)]
        [(16, 20), (20, 16), (16, 20), (20, 16), (4, 20), (4, 4)]
    """

    def __init__(
        self,
        *,
        classes: int = 40,
        mechanism: Mechanism | None = None,
        channels: int = 3,
        dim: int = 256,
        heads: int = 4,
        inducing_points: int = 16,
        encoder_depth: int = 2,
        seeds: int = 4,
        decoder_depth: int = 1,
        dropout: float = 0.5,
        layer_norm: bool = True,
    ) -> None:
        super().__init__()
        check_sizes(
            "SetTransformer", classes=classes, channels=channels, dim=dim, heads=heads,
            inducing_points=inducing_points, encoder_depth=encoder_depth, seeds=seeds,
            decoder_depth=decoder_depth,
        )  # fmt: skip
        self.embed = nn.Linear(channels, dim)
        self.encoder = nn.ModuleList(
            ISAB(
                dim,
                heads,
                mechanism,
                inducing_points=inducing_points,
                layer_norm=layer_norm,
                depth=index,
            )
            for index in range(encoder_depth)
        )
        self.pool = PMA(
            dim, heads, mechanism, seeds=seeds, layer_norm=layer_norm, depth=encoder_depth
        )
        self.decoder = nn.ModuleList(
            SAB(dim, heads, mechanism, layer_norm=layer_norm, depth=encoder_depth + 1 + index)
            for index in range(decoder_depth)
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(seeds * dim, classes)

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits of sets, independent of the order of their elements.

        Args:
            inputs: points, ``(batch, points, channels)``.
            mask: boolean ``(batch, points)``, True = takes part.

        Returns:
            ``(batch, classes)``.
        """
        if inputs.ndim != 3 or inputs.shape[-1] != self.embed.in_features:
            raise ValueError(
                "SetTransformer: points must have shape (batch, points, "
                f"{self.embed.in_features}), got {tuple(inputs.shape)}"
            )
        if mask is not None:
            inputs = inputs.masked_fill(~mask.unsqueeze(-1), 0)
        x = self.embed(inputs)
        for block in self.encoder:
            x = block(x, mask)
        x = self.pool(self.dropout(x), mask)
        for block in self.decoder:
            x = block(x)
        return self.head(self.dropout(x).flatten(1))
