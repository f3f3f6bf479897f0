"""From training to a file: ``python examples/ship_to_onnx.py model.onnx``.

A small encoder with soft ESP attention learns to tell which of two tokens came first. The sort is
annealed, then made exact. The hard model consists of sorts and gathers; it is exported to ONNX and
run by onnxruntime at other lengths. Needs ``pip install '.[onnx]'``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import espformer
from espformer.integrations.onnx import export_onnx, onnx_difference
from espformer.nn import ESP, parameter_groups


class Classifier(nn.Module):
    """Maps tokens of width 8 to one number per sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.block = espformer.convert(
            nn.TransformerEncoderLayer(
                32, nhead=4, dim_feedforward=64, batch_first=True, dropout=0
            ),
            ESP(),
        )
        self.head = nn.Linear(32, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embed(tokens)).amax(1)).squeeze(-1)


def examples(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences with a mark A and a mark B among noise; the answer is whether A comes first."""
    tokens = 0.3 * torch.randn(count, length, 8, generator=generator)
    tokens[..., 0] = torch.linspace(-1, 1, length)  # position of the token
    places = torch.rand(count, length, generator=generator).argsort(-1)[:, :2]
    rows = torch.arange(count)
    tokens[rows, places[:, 0], 1] = 3.0
    tokens[rows, places[:, 1], 2] = 3.0
    return tokens, (places[:, 0] < places[:, 1]).float()


def train(steps: int = 150) -> Classifier:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Classifier()
    optimiser = torch.optim.AdamW(parameter_groups(model, lr=3e-3, weight_decay=0.01))
    for step in range(steps):
        if step > steps // 2:
            espformer.anneal(model, 0.95)
        tokens, answers = examples(64, 20, generator)
        optimiser.zero_grad()
        F.binary_cross_entropy_with_logits(model(tokens), answers).backward()
        optimiser.step()
    return model.eval()


def accuracy(model: nn.Module) -> float:
    tokens, answers = examples(1000, 20, torch.Generator().manual_seed(1))
    with torch.no_grad():
        return float(((model(tokens) > 0) == (answers > 0.5)).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", default=Path("model.onnx"))
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()

    model = train(options.steps)
    print(f"accuracy, soft, t = {espformer.nn.get_sort_temperatures(model)}: {accuracy(model):.3f}")
    espformer.harden(model)
    print(f"accuracy, hard: {accuracy(model):.3f}")
    tokens, _ = examples(2, 20, torch.Generator().manual_seed(2))
    export_onnx(model, tokens, options.file)
    print(f"written: {options.file}, {options.file.stat().st_size / 1000:.0f} KB")
    for length in (5, 20, 50):
        tokens, _ = examples(3, length, torch.Generator().manual_seed(3))
        difference = onnx_difference(model, tokens, options.file)
        print(f"{length:3} tokens: onnxruntime differs by {difference:.1e}")


if __name__ == "__main__":
    main()
