"""Beam search for a batch of sentences, over any model that gives next-token probabilities."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["beam_search"]


def beam_search(
    advance: Callable[[Tensor, Tensor | None], Tensor],
    limits: Tensor,
    *,
    beam: int = 5,
    length_penalty: float = 1.0,
    start_id: int,
    end_id: int,
    pad_id: int,
) -> tuple[Tensor, Tensor]:
    r"""The best sequence found by beam search for each sentence.

    A sequence of n tokens, the end token included, scores
    :math:`\frac{1}{n^\alpha} \sum_i \log p(y_i \mid y_{<i})`, where α is the length penalty. Each
    step extends the live hypotheses of a sentence by every token. Those that end, among the best
    `beam` extensions, are finished; the best `beam` of the others live on. A sentence is done with
    `beam` finished hypotheses, or at its limit, where all must end. So a beam of one is greedy
    decoding, and a beam as large as the number of prefixes is exhaustive search. At least one token
    comes before the end, unless the limit is one.

    Args:
        advance: takes the last tokens, ``(batch, beam)``, and which hypothesis each of them
            extends, indices ``(batch, beam)`` into the beam of the step before, None at the first
            step; returns log-probabilities of the next token, ``(batch, beam, vocabulary)``.
        limits: maximum number of tokens per sentence, including the end token: integers
            ``(batch,)``.
        beam: number of hypotheses.
        length_penalty: α; larger favours longer sequences.
        start_id: token before the first.
        end_id: token after the last.
        pad_id: pads shorter sequences, and is never generated.

    Returns:
        Tokens ``(batch, length)`` with the end token, without the start token, and their scores
        ``(batch,)``.

    Example:
        >>> chances = torch.tensor([0.0, 0.2, 0.3, 0.5]).log()  # pad, end, and two words
        >>> def advance(last, parents):
        ...     return chances.expand(*last.shape, -1)
        >>> limits = torch.tensor([3, 2])
        >>> tokens, scores = beam_search(advance, limits, beam=2, start_id=1, end_id=1, pad_id=0)
        >>> tokens
        tensor([[3, 3, 1],
                [3, 1, 0]])
    """
    if beam < 1:
        raise ValueError(f"beam_search: beam must be at least 1, got {beam}")
    if bool((limits < 1).any()):
        raise ValueError(f"beam_search: limits must be at least 1, got {limits.tolist()}")
    batch, device = len(limits), limits.device
    longest = int(limits.max())

    last = torch.full((batch, beam), start_id, device=device)
    parents: Tensor | None = None
    tokens = torch.full((batch, beam, longest), pad_id, device=device)
    # Start with one hypothesis: the others would be copies of it.
    scores = torch.full((batch, beam), -torch.inf, device=device)
    scores[:, 0] = 0

    best_tokens = tokens[:, 0].clone()
    best_scores = torch.full((batch,), -torch.inf, device=device)
    finished = torch.zeros(batch, dtype=torch.long, device=device)

    for length in range(1, longest + 1):
        steps = advance(last, parents).float()
        steps = _forbid(steps, length, limits, end_id, pad_id)
        vocabulary = steps.shape[-1]
        # Each hypothesis can end in one way only, so twice the beam leaves a beam that goes on.
        extended = (scores.unsqueeze(-1) + steps).flatten(1)
        candidates = extended.topk(min(2 * beam, extended.shape[1]))
        token, origin = candidates.indices % vocabulary, candidates.indices // vocabulary
        ends = token == end_id

        ending = ends & candidates.values.isfinite() & (finished < beam).unsqueeze(1)
        ending[:, beam:] = False
        final = (candidates.values / length**length_penalty).masked_fill(~ending, -torch.inf)
        score, rank = final.max(1)
        text = _at(tokens, origin.gather(1, rank.unsqueeze(1)))[:, 0]
        text[:, length - 1] = end_id
        better = score > best_scores
        best_scores = torch.where(better, score, best_scores)
        best_tokens = torch.where(better.unsqueeze(1), text, best_tokens)
        finished += ending.sum(1)
        if bool(((finished >= beam) | (limits <= length)).all()):
            break

        scores, live = candidates.values.masked_fill(ends, -torch.inf).topk(beam)
        parents, last = origin.gather(1, live), token.gather(1, live)
        tokens = _at(tokens, parents)
        tokens[:, :, length - 1] = last

    return best_tokens[:, : int((best_tokens != pad_id).sum(1).max())], best_scores


def _forbid(steps: Tensor, length: int, limits: Tensor, end_id: int, pad_id: int) -> Tensor:
    """Log-probabilities with -inf for padding, for ending too early and for going on too long."""
    token = torch.arange(steps.shape[-1], device=steps.device)
    forbidden = token == pad_id
    at_limit = (limits <= length).view(-1, 1)
    too_late = at_limit & (token != end_id)
    too_early = ~at_limit & (token == end_id) & (length == 1)
    return steps.masked_fill((forbidden | too_late | too_early).unsqueeze(1), -torch.inf)


def _at(tokens: Tensor, hypotheses: Tensor) -> Tensor:
    """The rows ``(batch, chosen, length)`` of the beam."""
    return tokens.gather(1, hypotheses.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))
