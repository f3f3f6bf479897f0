"""How time grows with the number of tokens: ``python examples/long_sequences.py``.

Softmax attention compares every query with every key: twice the tokens take four times the work.
ESP attention sorts: twice the tokens take about twice the work. The table shows forward and
backward times on your device, with the default number of slices (eight per head).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import espformer
from espformer.nn import ESP

HEADS, WIDTH = 4, 16
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def attentions() -> dict[str, Attention]:
    """The attentions to compare; hard ESP has no gradient through the sort, only to the values."""
    return {
        "softmax": scaled_dot_product_attention,
        "Sinkhorn, 3 steps": lambda q, k, v: espformer.sinkhorn_attention(q, k, v, iterations=3),
        "ESP, soft": ESP().bind(HEADS, WIDTH),
        "ESP, hard": ESP(hard=True).bind(HEADS, WIDTH),
    }


def seconds(attention: Attention, tokens: int, device: str, repeats: int = 2) -> float:
    """The fastest of a few forward and backward calls."""
    shape, generator = (1, HEADS, tokens, WIDTH), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator).to(device) for _ in range(3))
    for x in (q, k, v):
        x.requires_grad_()
    best = float("inf")
    for _ in range(repeats + 1):  # the first call may compile
        began = time.perf_counter()
        attention(q, k, v).sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    print(f"milliseconds, forward and backward, {HEADS} heads of width {WIDTH}, {options.device}")
    print(f"{'tokens':20}" + "".join(f"{n:>10,}" for n in options.tokens) + "   last / first")
    for name, attention in attentions().items():
        times = [1000 * seconds(attention, n, options.device) for n in options.tokens]
        growth = f"{times[-1] / times[0]:.0f}×"
        print(f"{name:20}" + "".join(f"{t:10.1f}" for t in times) + f"   {growth:>6}")
    times = options.tokens[-1] / options.tokens[0]
    print(f"{times:.0f} times the tokens: linear time is {times:.0f}×, quadratic {times**2:.0f}×")


if __name__ == "__main__":
    main()
