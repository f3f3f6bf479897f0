"""Time of one attention layer: the paper's wall-clock comparison."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from espformer.lab.training.callbacks import attention_statistics
from espformer.lab.training.config import TimingRun
from espformer.lab.training.errors import RunError
from espformer.lab.training.records import device_name
from espformer.lab.training.specs import build_mechanism
from espformer.nn import Attention

__all__ = ["time_mechanism"]


def time_mechanism(run: TimingRun) -> dict[str, Any]:
    """Milliseconds of an attention layer in self-attention, and how its sums come out.

    The error of the row and column sums stands beside the time: a faster layer that computes
    something else shows there.
    """
    torch.manual_seed(run.seed)
    if run.accelerator == "gpu" and not torch.cuda.is_available():
        raise RunError(
            "accelerator=gpu: there is no GPU here; accelerator=auto takes what there is"
        )
    on_gpu = run.accelerator == "gpu" or (run.accelerator == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if run.precision == "bf16-true" else torch.float32
    layer = Attention(run.dim, run.heads, build_mechanism(run.mechanism)).to(device, dtype)
    x = torch.randn(run.batch_size, run.tokens, run.dim, device=device, dtype=dtype)

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def both() -> None:
        layer.zero_grad()
        layer(x).sum().backward()

    call = both if run.backward else forward
    for _ in range(3):
        call()
    times = [_time(call, device) for _ in range(run.repeats)]
    with torch.no_grad():
        _, matrix = layer(x[:1], return_matrix=True)
    return {
        "score": "milliseconds",
        "scores": {"mean": statistics.fmean(times), "median": statistics.median(times)},
        "best": min(times),
        "repeats": run.repeats,
        "check": attention_statistics([matrix]),
        "device": device_name(device),
        "seconds": sum(times) / 1000,
    }


def _time(call: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1000 * (time.perf_counter() - began)
