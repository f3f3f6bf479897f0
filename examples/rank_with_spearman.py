"""Train a model to rank, with a ranking loss: ``python examples/rank_with_spearman.py``.

In which of 442 patients will diabetes progress most? Only the order matters, not the value. A
small network learns it from scikit-learn's diabetes data in three ways: by squared error, by one
minus the Spearman correlation of soft ranks (`espformer.sorting.spearman_loss`), and, if torchsort
is installed, by the same loss with its ranks. Each is scored by the Spearman correlation on test
data.

The target is used twice: as measured, and transformed to ``exp(2 z)`` of the standardised target,
which has the same order. A ranking loss gives the same result for both; the squared error is
dominated by a few large values.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from statistics import mean, stdev

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

from espformer.sorting import soft_rank, spearman, spearman_loss

Loss = Callable[[Tensor, Tensor], Tensor]


def standardised(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / x.std(0)


def data() -> tuple[Tensor, Tensor]:
    """Ten measurements of 442 patients, and the progression of their disease after a year."""
    features, target = load_diabetes(return_X_y=True)
    return tuple(standardised(torch.tensor(x, dtype=torch.float32)) for x in (features, target))


def torchsort_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """The same loss with torchsort's soft ranks, at the default strength."""
    import torchsort

    ranks = torchsort.soft_rank(prediction.unsqueeze(0)).squeeze(0)
    a, b = (r - r.mean() for r in (ranks, soft_rank(target, hard=True)))
    return 1 - (a * b).sum() / (a.norm() * b.norm())


def losses() -> dict[str, Loss]:
    """The losses that can be compared on this machine."""
    found: dict[str, Loss] = {
        "squared error": nn.functional.mse_loss,
        "espformer, Spearman": lambda x, y: spearman_loss(x, y, temperature=0.5),
    }
    if importlib.util.find_spec("torchsort"):
        found["torchsort, Spearman"] = torchsort_loss
    return found


def train(loss: Loss, features: Tensor, target: Tensor, seed: int, epochs: int) -> float:
    """Spearman's correlation on a fifth of the patients after training on the others."""
    torch.manual_seed(seed)
    order = torch.randperm(len(target))
    test, rest = order[: len(order) // 5], order[len(order) // 5 :]
    network = nn.Sequential(nn.Linear(features.shape[-1], 32), nn.Tanh(), nn.Linear(32, 1))
    optimiser = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=0.1)
    for _ in range(epochs):
        for batch in rest[torch.randperm(len(rest))].split(64):
            optimiser.zero_grad()
            loss(network(features[batch]).squeeze(-1), target[batch]).backward()
            optimiser.step()
    with torch.no_grad():
        return float(spearman(network(features[test]).squeeze(-1), target[test], hard=True))


def compare(seeds: int, epochs: int) -> dict[tuple[str, str], list[float]]:
    """Scores by target and loss."""
    features, target = data()
    targets = {"as measured": target, "exp(2 z)": standardised((2 * target).exp())}
    return {
        (scale, name): [train(loss, features, y, seed, epochs) for seed in range(seeds)]
        for scale, y in targets.items()
        for name, loss in losses().items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args()
    print(f"Spearman's correlation on test data, mean and deviation of {options.seeds} seeds")
    for (scale, name), scores in compare(options.seeds, options.epochs).items():
        deviation = stdev(scores) if len(scores) > 1 else 0.0
        print(f"{scale:12} {name:20} {mean(scores):.3f} ± {deviation:.3f}")


if __name__ == "__main__":
    main()
