"""Point Cloud Transformer (Guo et al., CVM 2021, https://arxiv.org/abs/2012.09688).

With LBR = linear layer, batch norm and ReLU, and SA(F) the attention output for features F, a layer
is

    naive:   F + LBR(SA(F))
    offset:  F + LBR(F − SA(F))

and its attention has one head with queries and keys a quarter as wide as its values. The original
PCT uses a softmax along one dimension, divided by its sums along the other. Here SA(F) is the
output of the mechanism, and nothing else changes.
"""

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn

from espformer.models.blocks import Classifier, check_sizes, masked_max, masked_mean
from espformer.models.points import farthest_points, gather, nearest_points
from espformer.nn import ESP, Mechanism

__all__ = ["NeighbourEmbedding", "PointAttention", "PointCloudTransformer", "PointLayer"]


class PointLayer(nn.Module):
    """Linear layer, batch norm over the points that take part, activation (LBR).

    Example:
        >>> layer = PointLayer(3, 8)
        >>> mask = torch.tensor([[True, True, False], [True, True, True]])
        >>> layer(torch.randn(2, 3, 3), mask)[0, 2].abs().sum().item()
        0.0
    """

    def __init__(
        self,
        channels: int,
        dim: int,
        *,
        activation: nn.Module | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, dim, bias=bias)
        self.norm = nn.BatchNorm1d(dim)
        self.activation = nn.ReLU() if activation is None else activation

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """``(..., channels)`` to ``(..., dim)``, zero where `mask` (all but channels) is False."""
        rows = x.flatten(0, -2) if mask is None else x[mask]
        rows = self.activation(self.norm(self.linear(rows)))
        if mask is None:
            return rows.view(*x.shape[:-1], -1)
        return rows.new_zeros(*mask.shape, rows.shape[-1]).masked_scatter(mask.unsqueeze(-1), rows)


class NeighbourEmbedding(nn.Module):
    """Samples points and gives each one the features of its neighbours.

    Points are chosen by farthest point sampling. For each point, the features of its nearest
    neighbours relative to its own, concatenated with its own, pass through two point layers and a
    maximum.

    Args:
        channels: width of the input features.
        dim: width of the output features.
        samples: number of points to keep.
        neighbours: number of nearest neighbours per point, including itself.
        sampled: the points were produced by farthest point sampling, in its order, so the sample
            consists of the first ones.

    Example:
        >>> embed = NeighbourEmbedding(8, 16, samples=5, neighbours=4)
        >>> points, features, _ = embed(torch.randn(2, 20, 3), torch.randn(2, 20, 8))
        >>> points.shape, features.shape
        (torch.Size([2, 5, 3]), torch.Size([2, 5, 16]))
    """

    def __init__(
        self, channels: int, dim: int, *, samples: int, neighbours: int, sampled: bool = False
    ) -> None:
        super().__init__()
        self.samples = samples
        self.sampled = sampled
        self.neighbours = neighbours
        self.layer1 = PointLayer(2 * channels, dim)
        self.layer2 = PointLayer(dim, dim)

    def forward(
        self,
        points: Tensor,
        features: Tensor,
        mask: Tensor | None = None,
        *,
        random_start: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Sampled points, their features, and which of them take part.

        Args:
            points: ``(batch, points, 3)``.
            features: ``(batch, points, channels)``.
            mask: boolean ``(batch, points)``, True = takes part.
            random_start: start the sampling at a random point.
        """
        if self.sampled:
            beginning = torch.arange(min(self.samples, points.shape[1]), device=points.device)
            chosen = beginning.expand(len(points), -1)
            chosen_mask = None if mask is None else mask[:, : len(beginning)]
        else:
            chosen, chosen_mask = farthest_points(
                points, self.samples, mask, random_start=random_start
            )
        centres, own = gather(points, chosen), gather(features, chosen)
        nearest, nearest_mask = nearest_points(centres, points, self.neighbours, mask)
        own = own.unsqueeze(2)
        differences = gather(features, nearest) - own
        group = torch.cat([differences, own.expand_as(differences)], dim=-1)
        if chosen_mask is not None and nearest_mask is not None:
            nearest_mask = nearest_mask & chosen_mask.unsqueeze(-1)
        group = self.layer2(self.layer1(group, nearest_mask), nearest_mask)
        return centres, masked_max(group, nearest_mask), chosen_mask


class PointAttention(nn.Module):
    """One layer of PCT, see the top of this file.

    Args:
        dim: width of the features.
        mechanism: :class:`espformer.nn.ESP` by default.
        heads: number of heads.
        offset: use offset-attention instead of naive attention.
        tie_query_key: project queries and keys by one matrix, see :class:`PointCloudTransformer`.
        depth: index of the layer in its model, from 0.

    Example:
        >>> PointAttention(32)(torch.randn(2, 10, 32)).shape
        torch.Size([2, 10, 32])
    """

    def __init__(
        self,
        dim: int,
        mechanism: Mechanism | None = None,
        *,
        heads: int = 1,
        offset: bool = True,
        tie_query_key: bool = False,
        depth: int = 0,
    ) -> None:
        super().__init__()
        if dim % 4 or dim % heads:
            raise ValueError(
                f"PointAttention: dim must be a multiple of 4 and of heads, got dim={dim} and "
                f"heads={heads}"
            )
        self.heads = heads
        self.offset = offset
        self.query = nn.Linear(dim, heads * (dim // 4), bias=False)
        self.key = None if tie_query_key else nn.Linear(dim, heads * (dim // 4), bias=False)
        self.value = nn.Linear(dim, dim)
        self.mechanism = (ESP() if mechanism is None else mechanism).bind(
            heads, dim // 4, value_dim=dim // heads, depth=depth
        )
        self.layer = PointLayer(dim, dim, bias=True)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """``(batch, points, dim)`` to the same; `mask` is boolean, ``(batch, points)``."""
        query, value = self._split(self.query(x)), self._split(self.value(x))
        key = query if self.key is None else self._split(self.key(x))
        attended = self.mechanism(query, key, value, query_mask=mask, key_mask=mask)
        attended = attended.transpose(1, 2).flatten(2)
        return x + self.layer(x - attended if self.offset else attended, mask)

    def _split(self, x: Tensor) -> Tensor:
        """``(batch, points, width)`` to ``(batch, heads, points, width / heads)``."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class PointCloudTransformer(Classifier):
    """PCT with any attention mechanism.

    The variants of the original: PCT (the default), its simple form ``samples=None, dim=128`` and
    its naive form, which also has ``offset=False``.

    The published code projects queries and keys by the same matrix, although the equations of the
    original have two. An exact sort then matches every point with itself: hard ESP attention would
    be the identity. So queries and keys have separate projections here. `tie_query_key` gives the
    published number of parameters (2.88 million, and 1.36 million for the other forms).

    Args:
        classes: number of classes.
        mechanism: of all attention layers; :class:`espformer.nn.ESP` by default.
        channels: coordinates of a point, first x, y and z, then others such as a normal.
        dim: width of the attention layers.
        depth: number of attention layers; their outputs are concatenated.
        heads: heads of each layer, each with queries and keys a quarter as wide as `dim`. With 4
            heads the values have the same width, which ``Differential`` requires.
        samples: number of points kept by the two neighbour embeddings; None omits the embeddings.
        neighbours: number of neighbours of each of these points.
        offset: use offset-attention instead of naive attention.
        pool: "max" over points, or "max_mean", the maximum and the mean side by side.
        tie_query_key: one projection for queries and keys.
        random_start: in training, start farthest point sampling at a random point of each cloud
            instead of the one farthest from the middle; evaluation never does.
        dropout: in the head.

    Example:
        >>> from espformer.nn import ESP
        >>> model = PointCloudTransformer(dim=64, samples=(16, 8), neighbours=4, mechanism=ESP())
        >>> points = torch.randn(2, 50, 3)
        >>> model(points).shape
        torch.Size([2, 40])
        >>> [tuple(matrix.shape) for matrix in model.attention_matrices(points)]
        [(2, 1, 8, 8), (2, 1, 8, 8), (2, 1, 8, 8), (2, 1, 8, 8)]
    """

    def __init__(
        self,
        *,
        classes: int = 40,
        mechanism: Mechanism | None = None,
        channels: int = 3,
        dim: int = 256,
        depth: int = 4,
        heads: int = 1,
        samples: Sequence[int] | None = (512, 256),
        neighbours: int = 32,
        offset: bool = True,
        pool: Literal["max", "max_mean"] = "max",
        tie_query_key: bool = False,
        random_start: bool = False,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        check_sizes(
            "PointCloudTransformer", classes=classes, channels=channels, dim=dim, depth=depth,
            heads=heads, samples=samples, neighbours=neighbours,
        )  # fmt: skip
        if pool not in ("max", "max_mean"):
            raise ValueError(
                f'PointCloudTransformer: pool must be "max" or "max_mean", got {pool!r}'
            )
        if channels < 3:
            raise ValueError(f"PointCloudTransformer: a point has x, y and z, got {channels=}")
        self.channels = channels
        self.pool = pool
        self.random_start = random_start
        width = dim if samples is None else dim // 4
        self.embed1 = PointLayer(channels, width)
        self.embed2 = PointLayer(width, width)
        self.neighbourhoods = nn.ModuleList()
        fused = depth * dim
        if samples is not None:
            for factor, count in enumerate(samples, start=1):
                self.neighbourhoods.append(
                    NeighbourEmbedding(
                        factor * width,
                        2 * factor * width,
                        samples=count,
                        neighbours=neighbours,
                        sampled=factor > 1,
                    )
                )
            self.mix1 = PointLayer(dim, dim)
            self.mix2 = PointLayer(dim, dim)
            # The features before attention go into the fusion too.
            fused += dim
        self.layers = nn.ModuleList(
            PointAttention(
                dim,
                mechanism,
                heads=heads,
                offset=offset,
                tie_query_key=tie_query_key,
                depth=index,
            )
            for index in range(depth)
        )
        self.fuse = PointLayer(fused, 1024, activation=nn.LeakyReLU(0.2))
        self.head1 = PointLayer(1024 if pool == "max" else 2048, 512, activation=nn.LeakyReLU(0.2))
        self.head2 = PointLayer(512, 256, activation=nn.LeakyReLU(0.2), bias=True)
        self.head = nn.Linear(256, classes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits of point clouds, independent of the order of their points.

        Args:
            inputs: points, ``(batch, points, channels)``.
            mask: boolean ``(batch, points)``, True = takes part.

        Returns:
            ``(batch, classes)``.
        """
        if inputs.ndim != 3 or inputs.shape[-1] != self.channels:
            raise ValueError(
                f"PointCloudTransformer: points must have shape (batch, points, {self.channels}), "
                f"got {tuple(inputs.shape)}"
            )
        x = self.embed2(self.embed1(inputs, mask), mask)
        outputs = []
        if len(self.neighbourhoods):
            points = inputs[..., :3]
            for embed in self.neighbourhoods:
                start = self.random_start and self.training
                points, x, mask = embed(points, x, mask, random_start=start)
            before, x = x, self.mix2(self.mix1(x, mask), mask)
            outputs.append(before)
        for layer in self.layers:
            x = layer(x, mask)
            outputs.append(x)
        x = self.fuse(torch.cat(outputs, dim=-1), mask)
        pooled = masked_max(x, mask)
        if self.pool == "max_mean":
            pooled = torch.cat([pooled, masked_mean(x, mask)], dim=-1)
        pooled = self.dropout(self.head1(pooled))
        pooled = self.dropout(self.head2(pooled))
        return cast(Tensor, self.head(pooled))
