"""Sort random colours into a smooth picture: ``python examples/sort_colours.py colours.png``.

A thousand colours lie on a grid in random order. Which order makes neighbours similar? There are
1024! orders. Sorting a list of numbers defines a permutation, so we learn the numbers: one per
colour, 1,024 parameters instead of a matrix with a million. In each round

1. a path visits all cells of the grid in random order;
2. the colours along the path get the numbers 0, 1, 2, …, which keep the current order;
3. a few steps of gradient descent change the numbers, so that colours softly sorted by them differ
   less from the mean of their neighbourhood;
4. the colours are sorted exactly by the learnt numbers, and the new order is kept if it is better.

Early rounds use wide neighbourhoods, late ones only near neighbours. The idea of shuffled paths is
from Barthel et al., *ShuffleSoftSort* (2025); here the sort takes linear time.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from espformer.sorting import soft_sort


def roughness(grid: Tensor, radius: int = 1) -> Tensor:
    """The mean squared distance of cells (side, side, 3) from the mean of their neighbourhood."""
    size = 2 * radius + 1
    picture = grid.movedim(-1, 0).unsqueeze(0)
    around = F.avg_pool2d(picture, size, stride=1, padding=radius, count_include_pad=False)
    return (picture - around).square().sum(1).mean()


def improve(colours: Tensor, path: Tensor, radius: int, steps: int) -> Tensor:
    """Colours (side, side, 3) in a better order, found by moving them along a path."""
    along, back = colours.flatten(0, 1)[path], path.argsort()
    keys = torch.arange(len(along), dtype=torch.float32, requires_grad=True)
    optimiser = torch.optim.Adam([keys], lr=0.3)

    def arranged(hard: bool = False) -> Tensor:
        ordered = soft_sort(keys, along, unit="absolute", temperature=0.3, hard=hard)
        return ordered[back].view_as(colours)

    for _ in range(steps):
        optimiser.zero_grad()
        grid = arranged()
        # Mixing makes any picture smooth: measure roughness relative to the remaining variance.
        loss = roughness(grid, radius) / grid.flatten(0, 1).var(0).sum()
        loss.backward()
        optimiser.step()
    found = arranged(hard=True).detach()
    return found if roughness(found, radius) < roughness(colours, radius) else colours


def sort_colours(side: int = 32, rounds: int = 250, steps: int = 8, seed: int = 0) -> list[Tensor]:
    """Random colours, and the same colours sorted, each (side, side, 3)."""
    generator = torch.Generator().manual_seed(seed)
    start = colours = torch.rand(side, side, 3, generator=generator)
    for i in range(rounds):
        radius = max(1, round(side / 4 * (1 - i / rounds)))
        path = torch.randperm(side * side, generator=generator)
        colours = improve(colours, path, radius, steps)
    return [start, colours]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=Path, nargs="?", default=Path("colours.png"))
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=250)
    options = parser.parse_args()

    pictures = sort_colours(options.side, options.rounds)
    for name, picture in zip(("before", "after"), pictures, strict=True):
        print(f"{name}: roughness {float(roughness(picture)):.4f}")

    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(6, 3), layout="constrained")
    for axis, picture in zip(axes, pictures, strict=True):
        axis.imshow(picture.numpy())
        axis.set_axis_off()
    figure.savefig(options.picture, dpi=100)
    print(f"written: {options.picture}")


if __name__ == "__main__":
    main()
