"""Does it matter that gradients go through the spread? A small ViT learns digits with and without.

    python tools/constant_spread.py --data-dir DIRECTORY --seeds 0,1,2,3

With ``temperature_unit="spread"`` the width of the soft sort is t times the standard deviation of
the projections on a slice, and the gradient of that standard deviation is exact. `Constant` divides
queries and keys by the same standard deviations, detached. Outputs are equal, gradients are not.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor

from espformer import esp_attention
from espformer.lab.data import load
from espformer.models import VisionTransformer
from espformer.nn import ESP, Mechanism, Softmax

TRAIN, TEST = 6_000, 4_000  # images
EPOCHS, BATCH = 3, 100
HEADS, HEAD_DIM = 16, 4  # four axes a head


class Constant(Mechanism):
    """ESP attention in units of a spread that has no gradient."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        query, key = (
            x / x.std(-2, keepdim=True, correction=0).detach().clamp_min(1e-6) for x in (query, key)
        )
        return esp_attention(
            query, key, value, query_mask=query_mask, key_mask=key_mask,
            temperature_unit="absolute", sort_temperature=0.3,
        )  # fmt: skip


MECHANISMS: dict[str, type[Mechanism]] = {"exact": ESP, "constant": Constant, "softmax": Softmax}


def accuracies(mechanism: Mechanism, seed: int, data_dir: str | None) -> list[float]:
    """Return the test accuracy in percent after every epoch."""
    splits = load("mnist", data_dir=data_dir).tensors
    train, test = splits["train"], splits["test"]
    torch.manual_seed(seed)
    model = VisionTransformer(
        image_size=28, channels=1, classes=10, patch_size=4, dim=64, mlp_dim=128, depth=4,
        heads=HEADS, head_dim=HEAD_DIM, mechanism=mechanism,
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(train.inputs), generator=draw)[:TRAIN]
    found = []
    for _ in range(EPOCHS):
        model.train()
        for rows in chosen[torch.randperm(TRAIN, generator=draw)].split(BATCH):
            loss = F.cross_entropy(model(_images(train.inputs[rows])), train.labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = [
                model(_images(images)).argmax(-1) == labels
                for images, labels in zip(
                    test.inputs[:TEST].split(500), test.labels[:TEST].split(500), strict=True
                )
            ]
        found.append(100 * torch.cat(right).float().mean().item())
    return found


def _images(pixels: Tensor) -> Tensor:
    return (pixels / 255 - 0.13) / 0.31


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", help="where mnist/ lies")
    parser.add_argument("--seeds", default="0,1,2,3", help="with commas (%(default)s)")
    options = parser.parse_args()
    for seed in map(int, options.seeds.split(",")):
        for name, mechanism in MECHANISMS.items():
            scores = accuracies(mechanism(), seed, options.data_dir)
            print(f"seed {seed} {name}: " + ", ".join(f"{s:.1f}" for s in scores), flush=True)


if __name__ == "__main__":
    main()
