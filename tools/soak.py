"""Train for a long time over lengths that change: does memory grow, does anything become NaN?

    python tools/soak.py --minutes 10

Layers of ESP, alone and inside other mechanisms, and of Sinkhorn take one step after another on
batches of random length, padding and dtype, soft and hard, with every metric and balance. Resident
memory is looked at after the first tenth and at the end, each time as the least of several looks;
it may grow by a tenth. Numbers that are not finite, in outputs, gradients or weights, end it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import sys
import time
from pathlib import Path

import torch
from torch import nn

from espformer.nn import (
    ESP,
    Attention,
    ClassToken,
    Differential,
    Mechanism,
    Sinkhorn,
    harden,
    soften,
)

DIM, HEADS = 32, 4
LARGEST = 4, 300  # sequences, tokens
# On a CPU torch keeps what it compiled for every shape of a 16-bit product, about a thousand of
# them in some 600 MB, with softmax attention too. With few shapes, memory that grows is ours.
HALF_LENGTHS = 7, 64, 197, 300
ALLOWED_GROWTH = 0.10


def mechanisms() -> list[Mechanism]:
    """The mechanisms that people use, and likely combinations."""
    found: list[Mechanism] = [
        ESP(metric=metric, balance=balance, inverse_temperature=tau, learn_temperature=True)
        for metric, balance, tau in itertools.product(
            ("absolute", "squared"), ("rows", "both"), (0.0, 0.1)
        )
    ]
    found += [
        ESP(straight_through=True),
        ESP(slicer="learnable", slices=4, learn_slice_weights=True),
        ESP(slice_dropout=0.2, temperature_unit="absolute"),
        ClassToken(ESP()),
        Differential(ESP()),
        Sinkhorn(iterations=3),
    ]
    return found


def resident_megabytes(device: str) -> float:
    """Memory of this process; on a GPU, what tensors hold there."""
    gc.collect()
    if device == "cuda":
        return torch.cuda.memory_allocated() / 1e6
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def step(
    layer: nn.Module,
    optimiser: torch.optim.Optimizer,
    chance: random.Random,
    device: str,
    smallest: tuple[int, int] = (1, 1),
) -> int:
    """One step on a batch of random length; returns its number of tokens."""
    batch, tokens = (chance.randint(*range_) for range_ in zip(smallest, LARGEST, strict=True))
    dtype = chance.choice((torch.float32, torch.float32, torch.bfloat16))
    if dtype is torch.bfloat16 and device == "cpu":
        batch, tokens = 2, chance.choice(HALF_LENGTHS)
    x = torch.randn(batch, tokens, DIM, device=device)
    lengths = torch.tensor([chance.randint(1, tokens) for _ in range(batch)], device=device)
    mask = torch.arange(tokens, device=device) < lengths[:, None]
    with torch.autocast(device, dtype, enabled=dtype is not torch.float32):
        output = layer(x, mask=mask if chance.random() < 0.7 else None)
    loss = (output.float() - x.roll(1, -1)).square().mean()
    optimiser.zero_grad()
    loss.backward()
    for name, parameter in layer.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            raise FloatingPointError(f"the gradient of {name} is not finite")
    nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    optimiser.step()
    if not output.isfinite().all():
        raise FloatingPointError("the output is not finite")
    return batch * tokens


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10, help="how long (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    chance = random.Random(options.seed)
    layers = [Attention(DIM, heads=HEADS, mechanism=m).to(options.device) for m in mechanisms()]
    optimisers = [torch.optim.AdamW(layer.parameters(), lr=1e-3) for layer in layers]
    for layer, optimiser in zip(layers, optimisers, strict=True):  # what the largest batches take
        for _ in range(2):
            step(layer, optimiser, chance, options.device, smallest=LARGEST)
    began, limit = time.monotonic(), 60 * options.minutes
    steps = tokens = 0
    early: list[float] = []
    late: list[float] = []
    while (passed := time.monotonic() - began) < limit:
        number = steps % len(layers)
        layer = layers[number]
        sorts = isinstance(layer.mechanism, ESP) and not layer.mechanism.options.straight_through
        if sorts and chance.random() < 0.1:
            harden(layer)
        fewest = 2 if isinstance(layer.mechanism, ClassToken) else 1  # it reads other tokens
        done = step(layer, optimisers[number], chance, options.device, smallest=(1, fewest))
        if sorts:
            soften(layer)
        steps, tokens = steps + 1, tokens + done
        if steps % len(layers) == 0:
            if 0.1 * limit <= passed < 0.2 * limit:
                early.append(resident_megabytes(options.device))
            elif passed >= 0.9 * limit:
                late.append(resident_megabytes(options.device))
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if not parameter.isfinite().all():
                raise FloatingPointError(f"{name} is not finite after {steps} steps")
    if not early or not late:
        print("too short to say anything about memory; --minutes 1 at least")
        return 2
    growth = min(late) / min(early) - 1
    print(
        f"{options.minutes:g} minutes on {options.device}, seed {options.seed}: {steps:,} steps of "
        f"{len(layers)} layers, {tokens:,} tokens, all numbers finite"
    )
    before, after = min(early), min(late)
    print(f"memory {before:.0f} MB in the second tenth, {after:.0f} MB in the last: {growth:+.1%}")
    return 0 if growth <= ALLOWED_GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
