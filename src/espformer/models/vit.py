"""Vision Transformer (Dosovitskiy et al., ICLR 2021, https://arxiv.org/abs/2010.11929).

Modules are named as in timm (``patch_embed.proj``, ``cls_token``, ``pos_embed``,
``blocks.0.norm1``, ``blocks.0.attn.qkv``, ``blocks.0.mlp.fc1``, ``norm``, ``head``), so public
checkpoints load into a model of the same sizes, whatever its mechanism.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from espformer.models.blocks import NORM_EPS, Classifier, EncoderBlock, check_sizes, masked_mean
from espformer.nn import ESP, ClassToken, Mechanism

__all__ = ["PatchEmbedding", "VisionTransformer"]


class PatchEmbedding(nn.Module):
    """Splits an image into patches and projects each one linearly.

    Example:
        >>> PatchEmbedding(patch_size=(7, 14), channels=1, dim=8)(torch.randn(2, 1, 28, 28)).shape
        torch.Size([2, 8, 8])
    """

    def __init__(self, *, patch_size: tuple[int, int], channels: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        """``(batch, channels, height, width)`` to ``(batch, patches, dim)``, row by row."""
        return self.proj(images).flatten(2).transpose(1, 2)


class VisionTransformer(Classifier):
    """ViT with any attention mechanism, pre-norm.

    The defaults are the model that the ESPFormer paper trains on Cats & Dogs, in the convention of
    the code it builds on (Sinkformers, on vit-pytorch): 8 heads of width 64 although ``dim`` is
    128, no bias in ``qkv``, position embeddings drawn from N(0, 1).

    Args:
        classes: number of classes.
        mechanism: of all attention layers; :class:`espformer.nn.ESP` by default. If there is a
            class token, it attends by softmax by default (:class:`espformer.nn.ClassToken`).
        image_size: height and width in pixels, or one number for both.
        patch_size: height and width of a patch, or one number for both.
        channels: of the image.
        dim: width of the tokens.
        depth: number of blocks.
        heads: heads of each attention layer.
        head_dim: width of a head; None means ``dim // heads``.
        qk_dim, key_init: of all attention layers, see :class:`espformer.nn.Attention`.
        mlp_dim: hidden width of the feed-forwards; None omits them (the attention-only model of
            the paper's patch size experiment).
        pool: "cls" classifies a class token, "mean" the mean of the patches, without a class token.
        qkv_bias: bias in the projections of queries, keys and values, as in timm.
        dropout: on the embedding and on the output of all sublayers.
        position_std: standard deviation of the initial position embedding and class token; timm
            uses 0.02.

    Example:
        >>> from espformer.nn import ESP
        >>> model = VisionTransformer(image_size=32, depth=2, mechanism=ESP(sort_temperature=0.3))
        >>> images = torch.randn(3, 3, 32, 32)
        >>> model(images).shape
        torch.Size([3, 2])
        >>> [matrix.shape for matrix in model.attention_matrices(images)]
        [torch.Size([3, 8, 5, 5]), torch.Size([3, 8, 5, 5])]
    """

    def __init__(
        self,
        *,
        classes: int = 2,
        mechanism: Mechanism | None = None,
        image_size: int | Sequence[int] = 224,
        patch_size: int | Sequence[int] = 16,
        channels: int = 3,
        dim: int = 128,
        depth: int = 6,
        heads: int = 8,
        head_dim: int | None = 64,
        qk_dim: int | None = None,
        key_init: str = "own",
        mlp_dim: int | None = 128,
        pool: Literal["cls", "mean"] = "cls",
        qkv_bias: bool = False,
        dropout: float = 0.0,
        position_std: float = 1.0,
    ) -> None:
        super().__init__()
        check_sizes(
            "VisionTransformer", classes=classes, image_size=image_size, patch_size=patch_size,
            channels=channels, dim=dim, depth=depth, heads=heads, head_dim=head_dim, qk_dim=qk_dim,
            mlp_dim=mlp_dim,
        )  # fmt: skip
        image, patch = _pair(image_size), _pair(patch_size)
        if image[0] % patch[0] or image[1] % patch[1]:
            raise ValueError(
                f"VisionTransformer: image_size {image} must be a multiple of patch_size {patch}"
            )
        if pool not in ("cls", "mean"):
            raise ValueError(f'VisionTransformer: pool must be "cls" or "mean", got {pool!r}')
        if mechanism is None and pool == "cls":
            mechanism = ClassToken(ESP())
        self.image_shape = (channels, *image)
        self.pool = pool
        patches = (image[0] // patch[0]) * (image[1] // patch[1])
        self.patch_embed = PatchEmbedding(patch_size=patch, channels=channels, dim=dim)
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim)) if pool == "cls" else None
        self.pos_embed = nn.Parameter(torch.empty(1, patches + (pool == "cls"), dim))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            EncoderBlock(
                dim,
                heads,
                mechanism,
                head_dim=head_dim,
                qk_dim=qk_dim,
                key_init=key_init,
                mlp_dim=mlp_dim,
                qkv_bias=qkv_bias,
                dropout=dropout,
                depth=index,
            )
            for index in range(depth)
        )
        self.norm = nn.LayerNorm(dim, eps=NORM_EPS)
        self.head = nn.Linear(dim, classes)
        nn.init.normal_(self.pos_embed, std=position_std)
        if self.cls_token is not None:
            nn.init.normal_(self.cls_token, std=position_std)

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits of images.

        Args:
            inputs: images, ``(batch, channels, height, width)``.
            mask: boolean ``(batch, patches)``, True = takes part; the class token always does.

        Returns:
            ``(batch, classes)``.
        """
        if inputs.ndim != 4 or inputs.shape[1:] != self.image_shape:
            expected = ", ".join(str(size) for size in self.image_shape)
            raise ValueError(
                f"VisionTransformer: images must have shape (batch, {expected}), "
                f"got {tuple(inputs.shape)}"
            )
        x = self.patch_embed(inputs)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
            if mask is not None:
                mask = torch.cat([mask.new_ones(x.shape[0], 1), mask], dim=1)
        x = self.dropout(x + self.pos_embed)
        for block in self.blocks:
            x = block(x, mask)
        pooled = x[:, 0] if self.pool == "cls" else masked_mean(x, mask)
        return self.head(self.norm(pooled))


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    return height, width
