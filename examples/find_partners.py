"""A task that needs attention: ``python examples/find_partners.py``.

Every symbol occurs twice in a sequence, at random places: once with a payload, once without. The
model has to predict the payload for the token that has none, so this token must find the one other
token with the same symbol. In a Transformer only the attention passes information between tokens.
With uniform attention, the mean of all tokens, the model learns which payloads occur, but not whose
they are: it scores as if it always named the most frequent one.

A Transformer of two layers is trained with each attention on sequences that are drawn anew for
every step, and scored on new sequences; ESP also with an exact sort.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import espformer
from espformer.nn import ESP, Attention, Mechanism, Sinkhorn, Softmax, Uniform

SYMBOLS, PAYLOADS, DIM, HEADS = 64, 8, 64, 8
NOTHING = PAYLOADS  # the payload of tokens that have none


def draw(sequences: int, pairs: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Symbols, payloads, and answers, -100 where nothing is asked: (sequences, 2 · pairs) each."""
    symbols = torch.rand(sequences, SYMBOLS, generator=generator).argsort(1)[:, :pairs]
    payloads = torch.randint(PAYLOADS, (sequences, pairs), generator=generator)
    shuffled = torch.rand(sequences, 2 * pairs, generator=generator).argsort(1)
    tokens = (
        (symbols, symbols),
        (payloads, torch.full_like(payloads, NOTHING)),
        (torch.full_like(payloads, -100), payloads),
    )
    return tuple(torch.cat(halves, 1).gather(1, shuffled) for halves in tokens)  # type: ignore


class Block(nn.Module):
    """Attention and a feed-forward network, each normalised before."""

    def __init__(self, mechanism: Mechanism) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(DIM), Attention(DIM, HEADS, mechanism))
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.feed_forward(x)


class Model(nn.Module):
    """Two blocks between embeddings and logits of the payloads. Tokens have no positions."""

    def __init__(self, mechanism: Mechanism) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, DIM)
        self.payloads = nn.Embedding(PAYLOADS + 1, DIM)
        self.blocks = nn.Sequential(Block(mechanism), Block(mechanism), nn.LayerNorm(DIM))
        self.logits = nn.Linear(DIM, PAYLOADS)

    def forward(self, symbols: Tensor, payloads: Tensor) -> Tensor:
        return self.logits(self.blocks(self.symbols(symbols) + self.payloads(payloads)))


def train(mechanism: Mechanism, pairs: int, steps: int, seed: int) -> Model:
    """Train on batches of 64 sequences."""
    torch.manual_seed(seed)
    model = Model(mechanism)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        symbols, payloads, answers = draw(64, pairs, generator)
        loss = F.cross_entropy(model(symbols, payloads).flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: Model, pairs: int) -> float:
    """Share of correct answers in 500 new sequences, in percent."""
    symbols, payloads, answers = draw(500, pairs, torch.Generator().manual_seed(12345))
    asked = answers != -100
    found = model(symbols, payloads).argmax(-1)
    return 100 * (found == answers)[asked].double().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--pairs", type=int, default=12, help="pairs in a sequence (12)")
    parser.add_argument("--steps", type=int, default=300, help="training steps (300)")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds (1)")
    given = parser.parse_args()
    if not 1 <= given.pairs <= SYMBOLS:
        parser.error(f"--pairs must be between 1 and {SYMBOLS}")

    print(f"{2 * given.pairs} tokens, {given.steps} steps, correct answers in % for each seed")
    for name, mechanism in {
        "uniform": Uniform(),
        "softmax": Softmax(),
        "Sinkhorn": Sinkhorn(),
        "ESP": ESP(),
    }.items():
        soft, hard = [], []
        for seed in range(given.seeds):
            model = train(mechanism, given.pairs, given.steps, seed)
            soft.append(accuracy(model, given.pairs))
            if mechanism.has_sort_temperature:
                espformer.harden(model)
                hard.append(accuracy(model, given.pairs))
        print(f"{name:16}", *(f"{score:6.1f}" for score in soft), flush=True)
        if hard:
            print(f"{name + ', hard':16}", *(f"{score:6.1f}" for score in hard), flush=True)


if __name__ == "__main__":
    main()
