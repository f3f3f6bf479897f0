"""Small ViTs learn MNIST on a CPU with variants of ESP attention, for questions about its design.

    python tools/small_vits.py --data-dir DIRECTORY --seeds 0,1,2,3 --only exact --only constant

- Does it matter that gradients go through the spread? With ``temperature_unit="spread"`` the width
  of the soft sort is t times the standard deviation of the projections on a slice, and the gradient
  of that standard deviation is exact. `constant` divides queries and keys by the same standard
  deviations, detached. Outputs are equal, gradients are not.
- Does it help to weigh slices by their costs? `tau-1` to `tau-100` have an inverse temperature.
  Claim, written before the runs: up to 10 the weights of the slices differ by less than a tenth
  after training, and accuracies by less than seeds do; at 100 they differ by more.
- How many slices does a layer of few heads need? `1x64` has one head of width 64 that sorts along
  64 slices, `1x8` the same head with 8, and so on up to four heads. Claim, written before the runs:
  64 slices a layer are more accurate than 8 a head, in the mean over seeds, for one, two and four
  heads, and most so for one. The first seed contradicted it, so `4x2` and `4x4` were added. Claim,
  written before these: with four heads 2, 4 and 8 slices differ by less than two points.
  `1-softmax` to `4-softmax` have as many heads.

Prints the test accuracy after every epoch, and for ESP the largest weight of a slice times their
number, the mean over heads and layers: 1 if all weigh alike; if one of four has all the weight, 4.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from espformer import esp_attention
from espformer.lab.data import load
from espformer.lab.data.base import TensorSet
from espformer.lab.training.attention import recorded_calls, slice_statistics
from espformer.models import VisionTransformer
from espformer.nn import ESP, Mechanism, Softmax

TRAIN, TEST = 6_000, 4_000  # images
BATCH = 100
DIM = 64  # of the tokens, and of all heads together
HEADS = 16  # unless the name of a variant begins with another number


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


MECHANISMS: dict[str, Callable[[], Mechanism]] = {
    "exact": ESP,
    "constant": Constant,
    "softmax": Softmax,
    **{f"tau-{tau}": partial(ESP, inverse_temperature=float(tau)) for tau in (1, 10, 100)},
    **{
        f"{heads}x{slices}": partial(ESP, slices=slices)
        for heads, counts in ((1, (8, 64)), (2, (8, 32)), (4, (2, 4, 8, 16)))
        for slices in counts
    },
    **{f"{heads}-softmax": Softmax for heads in (1, 2, 4)},
}


def learn(name: str, seed: int, epochs: int, data_dir: str | None) -> tuple[list[float], float]:
    """Return the test accuracy in percent after every epoch, and the largest slice weight."""
    heads = int(name[0]) if name[0].isdigit() else HEADS
    task = load("mnist", data_dir=data_dir)
    train, test = cast(TensorSet, task.train), cast(TensorSet, task.test)
    torch.manual_seed(seed)
    model = VisionTransformer(
        image_size=28, channels=1, classes=10, patch_size=4, dim=DIM, mlp_dim=128, depth=4,
        heads=heads, head_dim=DIM // heads, mechanism=MECHANISMS[name](),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(train.inputs), generator=draw)[:TRAIN]
    found = []
    for _ in range(epochs):
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
    with torch.no_grad(), recorded_calls(model) as calls:
        model(_images(test.inputs[:BATCH]))
    return found, slice_statistics(calls).get("slice_weight", float("nan"))


def _images(pixels: Tensor) -> Tensor:
    return (pixels / 255 - 0.13) / 0.31


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", help="where mnist/ lies")
    parser.add_argument("--seeds", default="0,1,2,3", help="separated by commas (%(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--only", action="append", choices=list(MECHANISMS), help="default: all")
    options = parser.parse_args()
    for seed in map(int, options.seeds.split(",")):
        for name in options.only or MECHANISMS:
            scores, weight = learn(name, seed, options.epochs, options.data_dir)
            after = ", ".join(f"{score:.1f}" for score in scores)
            print(f"seed {seed} {name}: {after} (slice weight {weight:.3f})", flush=True)


if __name__ == "__main__":
    main()
