"""Encoder-decoder for translation (Vaswani et al., NeurIPS 2017, https://arxiv.org/abs/1706.03762).

The sizes are those of fairseq's ``transformer_iwslt_de_en``, which the ESPFormer paper trains on
IWSLT'14: post-norm, sinusoidal positions, embeddings times √dim, and one matrix for the embedding
of the target and the output layer.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from espformer.models.blocks import (
    EncoderBlock,
    check_sizes,
    evaluating,
    sinusoidal_positions,
    token_positions,
)
from espformer.models.decoder import DecoderBlock
from espformer.models.search import beam_search
from espformer.nn import Attention, Mechanism

__all__ = ["TranslationTransformer"]


class TranslationTransformer(nn.Module):
    """Translation Transformer with any mechanism in the encoder and softmax in the decoder.

    A decoder must not see later positions, which rules out doubly-stochastic attention, see
    :mod:`espformer.models.decoder`. To use differential attention everywhere::

        TranslationTransformer(
            mechanism=Differential(ESP()),
            decoder_mechanism=Differential(CausalSoftmax()),
            cross_mechanism=Differential(Softmax()),
            ...
        )

    Args:
        vocabulary: number of token ids of the source.
        target_vocabulary: number of token ids of the target; `vocabulary` by default.
        mechanism: of the encoder; :class:`espformer.nn.ESP` by default.
        decoder_mechanism: of the decoder's self-attention;
            :class:`espformer.models.CausalSoftmax` by default.
        cross_mechanism: of the decoder's attention to the source; :class:`espformer.nn.Softmax`
            by default.
        dim: width of the tokens.
        heads: heads of each attention layer.
        mlp_dim: hidden width of the feed-forwards.
        encoder_depth: number of encoder blocks.
        decoder_depth: number of decoder blocks.
        dropout: on the embeddings and on the output of all sublayers.
        max_length: longest source and target.
        pad_id: id of the padding token, in source and target.
        start_id: id before the first token of a target.
        end_id: id after the last token of a target.

    Example:
        >>> model = TranslationTransformer(
        ...     vocabulary=20, target_vocabulary=30, dim=32, mlp_dim=64, encoder_depth=1,
        ...     decoder_depth=1)
        >>> source = torch.tensor([[5, 9, 7, 3], [8, 3, 0, 0]])
        >>> target = torch.tensor([[2, 6, 4], [2, 5, 7]])
        >>> model(source, target).shape
        torch.Size([2, 3, 30])
        >>> model.translate(source, beam=2, max_length=6).shape[0]
        2
    """

    positions: Tensor

    def __init__(
        self,
        *,
        vocabulary: int,
        target_vocabulary: int | None = None,
        mechanism: Mechanism | None = None,
        decoder_mechanism: Mechanism | None = None,
        cross_mechanism: Mechanism | None = None,
        dim: int = 512,
        heads: int = 4,
        mlp_dim: int = 1024,
        encoder_depth: int = 6,
        decoder_depth: int = 6,
        dropout: float = 0.3,
        max_length: int = 1024,
        pad_id: int = 0,
        start_id: int = 2,
        end_id: int = 3,
    ) -> None:
        super().__init__()
        check_sizes(
            "TranslationTransformer", vocabulary=vocabulary, target_vocabulary=target_vocabulary,
            dim=dim, heads=heads, mlp_dim=mlp_dim, encoder_depth=encoder_depth,
            decoder_depth=decoder_depth, max_length=max_length, pad_id=pad_id, start_id=start_id,
            end_id=end_id,
        )  # fmt: skip
        self.pad_id = pad_id
        self.start_id = start_id
        self.end_id = end_id
        if target_vocabulary is None:
            target_vocabulary = vocabulary
        self.source_embedding = nn.Embedding(vocabulary, dim, padding_idx=pad_id)
        self.target_embedding = nn.Embedding(target_vocabulary, dim, padding_idx=pad_id)
        positions = sinusoidal_positions(max_length, dim)
        self.register_buffer("positions", positions, persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.ModuleList(
            EncoderBlock(
                dim,
                heads,
                mechanism,
                mlp_dim=mlp_dim,
                norm_first=False,
                activation=nn.ReLU(),
                dropout=dropout,
                depth=index,
            )
            for index in range(encoder_depth)
        )
        self.decoder = nn.ModuleList(
            DecoderBlock(
                dim,
                heads,
                mlp_dim=mlp_dim,
                decoder_mechanism=decoder_mechanism,
                cross_mechanism=cross_mechanism,
                dropout=dropout,
                depth=index,
            )
            for index in range(decoder_depth)
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise embeddings and linear layers as fairseq does; mechanisms are not changed."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
                module.weight[self.pad_id].zero_()
        for module in self.modules():
            if isinstance(module, Attention):
                # Xavier with gain 2^{-1/2}, for each of the fused matrices.
                bound = math.sqrt(1.5 / module.dim)
                for linear in (module.q, module.kv) if module.cross else (module.qkv,):
                    nn.init.uniform_(linear.weight, -bound, bound)

    def forward(self, source: Tensor, target: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """Logits of the next token after each prefix of the targets.

        Args:
            source: token ids, ``(batch, source)``.
            target: token ids that begin with `start_id` and are padded at the end,
                ``(batch, target)``.
            source_mask: boolean ``(batch, source)``, True = takes part; by default, all tokens
                but `pad_id`.

        Returns:
            ``(batch, target, target_vocabulary)``; entry n predicts the token after ``target[n]``.
        """
        source_mask = self._mask(source, source_mask)
        memory = self.encode(source, source_mask)
        index = torch.arange(target.shape[1], device=target.device).expand_as(target)
        x = self._embed(self.target_embedding, target, index)
        for block in self.decoder:
            x = block(x, memory, source_mask)
        return F.linear(x, self.target_embedding.weight)

    def encode(self, source: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """The encoder's output, ``(batch, source, dim)``."""
        mask = self._mask(source, source_mask)
        x = self._embed(self.source_embedding, source, token_positions(mask))
        for block in self.encoder:
            x = block(x, mask)
        return x

    @torch.no_grad()
    def translate(
        self,
        source: Tensor,
        source_mask: Tensor | None = None,
        *,
        beam: int = 5,
        length_penalty: float = 1.0,
        max_length: int | None = None,
    ) -> Tensor:
        """Translate by beam search, one position at a time, in evaluation mode.

        Args:
            source: token ids, ``(batch, source)``.
            source_mask: boolean ``(batch, source)``, True = takes part; by default, all tokens
                but `pad_id`.
            beam: number of hypotheses, see :func:`espformer.models.beam_search`; 1 is greedy.
            length_penalty: power of the length by which a hypothesis' log-probability is divided.
            max_length: maximum number of tokens of a translation, including the end token; by
                default 1.2 times the tokens of its source plus 10.

        Returns:
            Token ids ``(batch, length)`` that end with `end_id`, padded with `pad_id`.
        """
        mask = self._mask(source, source_mask)
        if max_length is None:
            limits = (1.2 * mask.sum(1)).long() + 10
        else:
            limits = torch.full((len(source),), max_length, device=source.device)
        with evaluating(self):
            search = _Search(self, self.encode(source, mask), mask)
            tokens, _ = beam_search(
                search.advance,
                limits.clamp(max=len(self.positions)),
                beam=beam,
                length_penalty=length_penalty,
                start_id=self.start_id,
                end_id=self.end_id,
                pad_id=self.pad_id,
            )
        return tokens

    def _mask(self, source: Tensor, mask: Tensor | None) -> Tensor:
        return source != self.pad_id if mask is None else mask

    def _embed(self, embedding: nn.Embedding, tokens: Tensor, index: Tensor) -> Tensor:
        if tokens.shape[1] > len(self.positions):
            raise ValueError(
                f"TranslationTransformer: sequences of {tokens.shape[1]} tokens are longer than "
                f"max_length={len(self.positions)} (cut them, or build a model with more)"
            )
        x = embedding(tokens) * math.sqrt(embedding.embedding_dim)
        return self.dropout(x + self.positions[index])


class _Search:
    """The decoder between the steps of a search: what each block keeps, and the position."""

    def __init__(self, model: TranslationTransformer, memory: Tensor, mask: Tensor) -> None:
        self.model = model
        self.mask = mask
        self.blocks = [block for block in model.decoder if isinstance(block, DecoderBlock)]
        self.states = [block.start(memory) for block in self.blocks]
        self.position = 0

    def advance(self, last: Tensor, parents: Tensor | None) -> Tensor:
        """Log-probabilities of the next token, see :func:`espformer.models.beam_search`."""
        batch, beam = last.shape
        if parents is not None:
            rows = (parents + torch.arange(batch, device=last.device).unsqueeze(1) * beam).flatten()
            for state in self.states:
                state.reorder(rows)
        model = self.model
        tokens = last.view(-1, 1)
        x = model._embed(model.target_embedding, tokens, torch.full_like(tokens, self.position))
        for block, state in zip(self.blocks, self.states, strict=True):
            x = block.step(x, state, self.mask)
        self.position += 1
        logits = F.linear(x, model.target_embedding.weight)
        return logits.float().log_softmax(-1).view(batch, beam, -1)
