"""Text classifier on an encoder (Vaswani et al., NeurIPS 2017, https://arxiv.org/abs/1706.03762).

The model of the text-classification-transformer of https://github.com/lyeoni/nlp-tutorial, on which
Sinkformers and ESPFormer compare attention on IMDb and TweetEval. Differences from that code:
padding is excluded from the attention and from the maximum, so a review gives the same logits in
every batch; positions count from zero; and the model returns logits, not probabilities.
"""

from torch import Tensor, nn

from espformer.models.blocks import (
    Classifier,
    EncoderBlock,
    check_sizes,
    masked_max,
    sinusoidal_positions,
    token_positions,
)
from espformer.nn import Mechanism
from espformer.ops.common.packing import Packing

__all__ = ["TextClassifier"]


class TextClassifier(Classifier):
    """Token and position embeddings, post-norm encoder, maximum over tokens, linear layer.

    The defaults are the tutorial's, which the ESPFormer paper keeps.

    Args:
        vocabulary: number of token ids.
        classes: number of classes.
        mechanism: of all attention layers; :class:`espformer.nn.ESP` by default.
        dim: width of the tokens.
        depth: number of blocks.
        heads: heads of each attention layer.
        head_dim: width of a head; None means ``dim // heads``.
        qk_dim, key_init: of all attention layers, see :class:`espformer.nn.Attention`.
        mlp_dim: hidden width of the feed-forwards.
        max_length: longest sequence.
        dropout: on the output of all sublayers.
        pad_id: id of the padding token.
        packed: process only real tokens, as packed sequences, so the cost of a batch depends on
            its number of tokens. The logits are the same up to rounding. This synchronises the
            device to read the lengths, so a packed model cannot be captured as a CUDA graph.

    Example:
        >>> import torch
        >>> from espformer.nn import Softmax
        >>> model = TextClassifier(vocabulary=100, depth=2, mechanism=Softmax())
        >>> tokens = torch.tensor([[5, 9, 7, 3], [8, 4, 0, 0]])
        >>> model(tokens).shape
        torch.Size([2, 2])
        >>> alone = model.eval()(tokens[1:, :2])
        >>> torch.allclose(model(tokens)[1:], alone, atol=1e-5)
        True
    """

    positions: Tensor

    def __init__(
        self,
        *,
        vocabulary: int,
        classes: int = 2,
        mechanism: Mechanism | None = None,
        dim: int = 256,
        depth: int = 6,
        heads: int = 8,
        head_dim: int | None = None,
        qk_dim: int | None = None,
        key_init: str = "own",
        mlp_dim: int = 1024,
        max_length: int = 512,
        dropout: float = 0.1,
        pad_id: int = 0,
        packed: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(
            "TextClassifier", vocabulary=vocabulary, classes=classes, dim=dim, depth=depth,
            heads=heads, head_dim=head_dim, qk_dim=qk_dim, mlp_dim=mlp_dim, max_length=max_length,
            pad_id=pad_id,
        )  # fmt: skip
        self.pad_id = pad_id
        self.packed = packed
        self.embedding = nn.Embedding(vocabulary, dim, padding_idx=pad_id)
        positions = sinusoidal_positions(max_length, dim)
        self.register_buffer("positions", positions, persistent=False)
        self.blocks = nn.ModuleList(
            EncoderBlock(
                dim,
                heads,
                mechanism,
                head_dim=head_dim,
                qk_dim=qk_dim,
                key_init=key_init,
                mlp_dim=mlp_dim,
                norm_first=False,
                activation=nn.ReLU(),
                dropout=dropout,
                depth=index,
            )
            for index in range(depth)
        )
        self.head = nn.Linear(dim, classes)

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits of sequences of tokens.

        Args:
            inputs: token ids, ``(batch, tokens)``.
            mask: boolean ``(batch, tokens)``, True = takes part; by default, all tokens but
                `pad_id`.

        Returns:
            ``(batch, classes)``.
        """
        if inputs.shape[1] > len(self.positions):
            raise ValueError(
                f"TextClassifier: sequences of {inputs.shape[1]} tokens are longer than "
                f"max_length={len(self.positions)} (cut them, or build a model with more)"
            )
        if mask is None:
            mask = inputs != self.pad_id
        positions = token_positions(mask)
        if self.packed:
            x = self._packed(inputs, mask, positions)
        else:
            x = self.embedding(inputs) + self.positions[positions]
            for block in self.blocks:
                x = block(x, mask)
        return self.head(masked_max(x, mask))

    def _packed(self, inputs: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """The output of the blocks, computed on packed sequences; zero at padding."""
        packing = Packing.of_mask(mask)
        x = self.embedding(inputs[mask]) + self.positions[positions[mask]]
        for block in self.blocks:
            x = block(x, packing)
        return x.new_zeros(*mask.shape, x.shape[-1]).index_put((mask,), x)

    def attention_matrices(self, inputs: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        packed, self.packed = self.packed, False  # packed, there is no matrix of a whole batch
        try:
            return super().attention_matrices(inputs, mask)
        finally:
            self.packed = packed
