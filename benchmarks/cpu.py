"""ESP attention on the CPU, forward and backward: ``python -m benchmarks.cpu``.

One table: how much memory a long sequence takes, how much faster the linear-time operator is than
the dense formula, how its time grows with the number of tokens, and what other attentions take.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import espformer
from benchmarks.measure import (
    Company,
    Row,
    conditions,
    print_table,
    verdict,
    write_results,
)
from benchmarks.memory import peak_memory
from espformer import functional
from espformer.lab.bench.cases import largest_error
from espformer.lab.clock import interleaved_seconds

METRICS, BALANCES = ("absolute", "squared"), ("rows", "both")
WIDTH = 64
SPEED_UP, GROWTH, MEMORY = 15.0, 2.3, 2.0  # at least, at most, at most (GB)


@dataclass(frozen=True)
class Setting:
    """One head of random tokens, and how they attend."""

    tokens: int
    slices: int
    width: int = WIDTH
    metric: str = "absolute"
    balance: str = "rows"
    seed: int = 0
    sort_temperature: float = 0.1
    inverse_temperature: float = 0.1

    def inputs(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Queries, keys and values, then the slices: the first axes."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (1, 1, self.tokens, self.width)
        tokens = [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]
        theta = torch.eye(self.width, dtype=dtype)[: self.slices]
        return [*(x.requires_grad_() for x in tokens), theta]

    def run(self, backend: str, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The output and its three gradients."""
        attention = partial(
            espformer.esp_attention, backend=backend, metric=self.metric, balance=self.balance,
            slices=None if self.slices == self.width else inputs[3],
            sort_temperature=self.sort_temperature, inverse_temperature=self.inverse_temperature,
        )  # fmt: skip
        return forward_backward(attention, inputs)

    def result(self, backend: str, dtype: torch.dtype) -> list[Tensor]:
        return self.run(backend, self.inputs(dtype))


def forward_backward(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Sequence[Tensor]
) -> list[Tensor]:
    """The output and its gradients in queries, keys and values, for a fixed upstream one."""
    tokens = inputs[:3]
    out = attention(*tokens)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out).sin()
    return [out, *torch.autograd.grad(out, tokens, upstream)]


PEERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "softmax": functional.softmax_attention,
    "Sinkhorn, 3 steps": partial(functional.sinkhorn_attention, iterations=3),
    "Sinkhorn, 21 steps": partial(functional.sinkhorn_attention, iterations=21),
    "ESP, soft": functional.esp_attention,
    "ESP, soft, balanced": partial(functional.esp_attention, balance="both"),
    "ESP, hard": partial(functional.esp_attention, hard=True),
}


def peers(repeats: int) -> list[Row]:
    """Other attentions at the same sizes; each is checked against itself in float64."""
    rows = []
    for tokens in (1024, 4096):
        setting = Setting(tokens, 64)
        inputs, exact = setting.inputs(), setting.inputs(torch.float64)
        runs = {name: partial(forward_backward, peer, inputs) for name, peer in PEERS.items()}
        times = interleaved_seconds(list(runs.values()), repeats)
        for (name, run), seconds in zip(runs.items(), times, strict=True):
            error = largest_error(run(), forward_backward(PEERS[name], exact))
            slices = setting.slices if name.startswith("ESP") else "–"
            rows.append(
                Row(
                    name, tokens, slices, "–", "–", _time(seconds), f"softmax: {_time(times[0])}",
                    f"{seconds / times[0]:.1f}×", f"{error:.1e}", "–", verdict(True, error),
                )
            )  # fmt: skip
            progress(rows[-1])
    return rows


def speed(repeats: int) -> list[Row]:
    """The linear-time operator against the dense formula, in the same run."""
    rows = []
    for metric in METRICS:
        for balance in BALANCES:
            setting = Setting(1024, 64, metric=metric, balance=balance)
            oracle = setting.result("dense", torch.float64)
            error = largest_error(setting.result("linear", torch.float32), oracle)
            del oracle
            inputs = setting.inputs()
            linear, dense = interleaved_seconds(
                [partial(setting.run, backend, inputs) for backend in ("linear", "dense")], repeats
            )
            rows.append(
                Row(
                    "forward + backward", setting.tokens, setting.slices, metric, balance,
                    _time(linear), f"dense: {_time(dense)}", f"{dense / linear:.1f}×",
                    f"{error:.1e}", f"≥ {SPEED_UP:g}×", verdict(dense / linear >= SPEED_UP, error),
                )
            )  # fmt: skip
            progress(rows[-1])
    return rows


def growth(repeats: int) -> list[Row]:
    """Time for twice as many tokens, again and again. The oracle is linear time in float64."""
    lengths = [512 << i for i in range(6)]
    settings = [Setting(n, 64) for n in lengths]
    inputs = [setting.inputs() for setting in settings]
    runs = [partial(s.run, "linear", i) for s, i in zip(settings, inputs, strict=True)]
    times = interleaved_seconds(runs, repeats)
    rows = []
    for i, setting in enumerate(settings):
        got = setting.run("linear", inputs[i])
        error = largest_error(got, setting.result("linear", torch.float64))
        ratio = times[i] / times[i - 1] if i else 0.0
        rows.append(
            Row(
                "growth", setting.tokens, setting.slices, setting.metric, setting.balance,
                _time(times[i]), f"N = {lengths[i - 1]}: {_time(times[i - 1])}" if i else "–",
                f"{ratio:.2f}×" if i else "–", f"{error:.1e}", f"≤ {GROWTH:g}×",
                verdict(ratio <= GROWTH, error),
            )
        )  # fmt: skip
        progress(rows[-1])
    return rows


def memory(repeats: int) -> list[Row]:
    """Peak memory of a long sequence."""
    rows = []
    for metric in METRICS:
        for balance in BALANCES:
            tokens, slices = 32_768, 16
            found = peak_memory(tokens, slices, WIDTH, metric=metric, balance=balance)
            rows.append(
                Row(
                    "peak memory", tokens, slices, metric, balance, f"{found.peak:.2f} GB",
                    f"before the call: {found.baseline:.2f} GB", f"+{found.added:.2f} GB", "–",
                    f"< {MEMORY:g} GB in all", verdict(found.peak < MEMORY),
                )
            )  # fmt: skip
            progress(rows[-1])
    return rows


PARTS = {"memory": memory, "speed": speed, "growth": growth, "peers": peers}


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"


def progress(row: Row) -> None:
    setting = f"N = {row.tokens}, {row.metric}, {row.balance}"
    print(f"{row.measurement}, {setting}: {row.result} {row.ratio} {row.verdict}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__)
    parser.add_argument(
        "--only", choices=PARTS, help="one of the questions; nothing is written to results/"
    )
    parser.add_argument("--repeats", type=int, default=5, help="times are medians of this many")
    options = parser.parse_args()

    company = Company()
    parts = [options.only] if options.only else list(PARTS)
    rows = [row for part in parts for row in PARTS[part](options.repeats)]
    stated = conditions(
        "benchmarks.cpu",
        dtype="float32",
        shapes=f"1 head, N tokens, queries, keys and values of width {WIDTH}, axis slices",
        temperatures="sort temperature 0.1, inverse temperature 0.1",
        seeds="0",
        company=company,
        repeats=f"median of {options.repeats}, after one that does not count",
        error="largest ‖difference‖ / ‖exact‖ of output and gradients, against the dense "
        "formula in float64 (growth and other attentions: against themselves in float64)",
        memory="resident memory of a process of its own, its peak, in 10⁹ bytes",
    )
    print_table(rows, stated)
    if not options.only:
        for path in write_results("cpu", "ESP attention on a CPU", rows, stated):
            print(f"written: {path}")
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
