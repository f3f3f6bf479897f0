"""Cost of Python in a call of the fused kernels, measured without a GPU.

    python tools/launch_cost.py          # microseconds and launches of some attentions
    python tools/launch_cost.py --profile mean   # where the time of one goes

Tensors are on the CPU, Triton's driver is made up, and a kernel that is launched does nothing: the
numbers that come out are no attention. Everything else is as on a GPU: checks, operators, autograd,
launches. Problems are small, so that torch's own operators, which do run, take little time.
`python -m benchmarks.host_time` measures the same on a GPU.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton.compiler
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import espformer
from espformer.functional import baselines, esp

HEADS, TOKENS, WIDTH = 1, 192, 64


class Driver:
    """A Hopper GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Counter:
    launches = 0
    by_triton = 0


class Compiled(triton.compiler.CompiledKernel):
    """A kernel that is counted and does nothing."""

    module, function, packed_metadata = "module", 1, (1, 1, 0)

    def __init__(self, src: Any) -> None:
        self.src, self.name, self.hash = src, src.fn.__name__, ""
        self.metadata = SimpleNamespace()
        self._run = self.count

    def count(self, *arguments: Any) -> None:
        Counter.launches += 1
        metadata, enter, leave = arguments[6:9]
        for hook in (enter, leave):
            if hook is not None:
                hook(metadata)


def pretend() -> None:
    """Puts the driver in place, and lets kernels take tensors of the CPU."""
    driver.set_active(Driver())
    triton.compiler.compile = lambda src, **_: Compiled(src)
    run = JITFunction.run

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        Counter.by_triton += 1
        return run(self, *args, **options)

    JITFunction.run = counted
    for module in (esp, baselines):
        module.runs_kernels = lambda *_: None  # type: ignore[attr-defined]


def cases() -> dict[str, Callable[[], object]]:
    """Calls by name: eight axes, forward and backward unless the name says otherwise."""

    def call(attention: Callable[..., Any], width: int = 8, **options: Any) -> Callable[[], object]:
        shapes = [(1, HEADS, TOKENS, w) for w in (width, width, WIDTH)]
        leaves = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
        upstream = torch.randn(shapes[2]).bfloat16()

        def both() -> object:
            out = attention(*leaves, backend="triton", **options)
            return torch.autograd.grad(out, leaves, upstream)

        return both

    def forward(both: Callable[..., Any], **options: Any) -> Callable[[], object]:
        leaves = [torch.randn(1, HEADS, TOKENS, w).bfloat16() for w in (8, 8, WIDTH)]
        return lambda: both(*leaves, backend="triton", **options)

    return {
        "mean": call(espformer.esp_attention),
        "costs": call(espformer.esp_attention, inverse_temperature=0.1),
        "balanced": call(espformer.esp_attention, balance="both"),
        "squared": call(espformer.esp_attention, metric="squared"),
        "hard, forward": forward(espformer.esp_attention, hard=True),
        "sinkhorn": call(espformer.sinkhorn_attention, WIDTH),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", metavar="NAME", help="one attention, function by function")
    parser.add_argument("--counts", action="store_true", help="only launches, as JSON")
    parser.add_argument("--rounds", type=int, default=200, help="calls of each (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pretend()
    found, known = {}, cases()
    if options.profile not in (None, *known):
        parser.error(f"--profile: no {options.profile!r}; there are: {'; '.join(known)}")
    for name, call in known.items():
        for _ in range(3):
            call()
        Counter.launches = Counter.by_triton = 0
        call()
        found[name] = {"launches": Counter.launches, "by Triton": Counter.by_triton}
        if options.profile == name:
            with cProfile.Profile() as profile:
                for _ in range(options.rounds):
                    call()
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        elif not (options.counts or options.profile):
            least = min(_seconds(call) for _ in range(options.rounds))
            print(f"{name:14s} {1e6 * least:6.0f} µs  {Counter.launches // (options.rounds + 1)}")
    if options.counts:
        print(json.dumps(found))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
