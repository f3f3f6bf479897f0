"""ESP attention on the CPU, forward and backward: ``python -m benchmarks.cpu``.

The table compares the compiled kernels with the operator in torch, and that operator with the dense
formula. It shows the effect of metrics, balancing and threads, how time grows with the number of
tokens, the memory of long sequences, and from which length on ESP is faster than softmax.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

import espformer
from benchmarks.arguments import make_parser
from benchmarks.measure import (
    ENOUGH,
    Company,
    Row,
    conditions,
    least_seconds,
    print_table,
    verdict,
    write_results,
)
from benchmarks.memory import peak_memory
from espformer import functional
from espformer.lab.bench.cases import largest_error

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
METRICS, BALANCES = ("absolute", "squared"), ("rows", "both")
WIDTH = 64
SPEED_UP, GROWTH, MEMORY = 15.0, 2.3, 2.0  # at least, at most, at most (GB)
KERNELS = {"forward": 6.0, "forward + backward": 8.0}  # times the operator in torch, at least
OPTIONS, THREADS = 3.0, 1.7  # other options against absolute rows, at most; two threads, at least
# Heads, tokens, width: a layer of MiniLM on tweets and on sentences, ViTs, long sequences.
SIZES = ((384, 19, 32), (192, 64, 32), (8, 197, 64), (64, 197, 64), (1, 1024, 64), (1, 16_384, 64))
FEW_SLICES = 8  # as ESP() has
TEMPERATURES: dict[str, Any] = {"sort_temperature": 0.1, "inverse_temperature": 0.1}
EXACT = 16_384  # tokens up to which the torch operator in float64 is the oracle
CHECKED = 8  # heads, the first, whose outputs and gradients are compared with the oracle


@dataclass(frozen=True)
class Setting:
    """Random tokens of one head, or of several, and how they attend."""

    tokens: int
    slices: int
    width: int = WIDTH
    metric: str = "absolute"
    balance: str = "rows"
    seed: int = 0
    heads: int = 1

    def inputs(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Queries, keys and values, then the slices: the first axes."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (1, self.heads, self.tokens, self.width)
        tokens = [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]
        theta = torch.eye(self.width, dtype=dtype)[: self.slices]
        return [*(x.requires_grad_() for x in tokens), theta]

    def attention(self, backend: str, inputs: Sequence[Tensor]) -> Callable[..., Tensor]:
        return partial(
            espformer.esp_attention, backend=backend, metric=self.metric, balance=self.balance,
            slices=None if self.slices == self.width else inputs[3],
            **TEMPERATURES,
        )  # fmt: skip

    def run(self, backend: str, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The output and its three gradients."""
        return forward_backward(self.attention(backend, inputs), inputs)

    def forward(self, backend: str, inputs: Sequence[Tensor]) -> Tensor:
        """The output alone."""
        with torch.no_grad():
            return self.attention(backend, inputs)(*inputs[:3])

    def error(self, got: Sequence[Tensor]) -> float:
        """The error of output and gradients of the first heads, against linear time in float64."""
        return largest_error([x[:, :CHECKED] for x in got], exact(self))


@cache
def exact(setting: Setting) -> list[Tensor]:
    """Output and gradients of the first heads in float64; heads are independent."""
    inputs = setting.inputs(torch.float64)
    few = [x.detach()[:, :CHECKED].requires_grad_() for x in inputs[:3]] + inputs[3:]
    oracle = "linear" if setting.tokens <= EXACT else "cpu"
    upstream = upstream_of(inputs[2])[:, :CHECKED]
    return forward_backward(setting.attention(oracle, inputs), few, upstream)


def upstream_of(out: Tensor) -> Tensor:
    """A fixed upstream gradient that varies from token to token.

    With a nearly constant one, the gradients of queries would be small differences of large
    numbers, with four correct digits in float32.
    """
    period = torch.arange(1009, dtype=torch.float64).mul(0.7).sin().to(out.dtype)
    return period.repeat(-(-out.numel() // len(period)))[: out.numel()].view_as(out)


def forward_backward(
    attention: Attention, inputs: Sequence[Tensor], upstream: Tensor | None = None
) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values for a fixed upstream gradient."""
    tokens = inputs[:3]
    out = attention(*tokens)
    upstream = upstream_of(out) if upstream is None else upstream
    return [out, *torch.autograd.grad(out, tokens, upstream)]


PEERS: dict[str, Attention] = {
    "softmax": functional.softmax_attention,
    "Sinkhorn, 3 steps": partial(functional.sinkhorn_attention, iterations=3),
    "Sinkhorn, 21 steps": partial(functional.sinkhorn_attention, iterations=21),
    "ESP, soft": partial(functional.esp_attention, **TEMPERATURES),
    "ESP, soft, balanced": partial(functional.esp_attention, balance="both", **TEMPERATURES),
    "ESP, hard": partial(functional.esp_attention, hard=True, **TEMPERATURES),
}


def peers(repeats: int) -> list[Row]:
    """Other attentions at the same sizes; each is checked against itself in float64."""
    rows = []
    for tokens in (1024, 4096):
        setting = Setting(tokens, 64)
        inputs, exact = setting.inputs(), setting.inputs(torch.float64)
        runs = {name: partial(forward_backward, peer, inputs) for name, peer in PEERS.items()}
        times = least_seconds(list(runs.values()), repeats, time.perf_counter)
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
            setting = Setting(1024, 16, metric=metric, balance=balance)
            inputs, exact = setting.inputs(), setting.inputs(torch.float64)
            error = largest_error(setting.run("linear", inputs), setting.run("dense", exact))
            runs = [partial(setting.run, backend, inputs) for backend in ("linear", "dense")]
            linear, dense = least_seconds(runs, repeats, time.perf_counter)
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
    times = [least_seconds([run], repeats, time.perf_counter)[0] for run in runs]
    rows = []
    for i, setting in enumerate(settings):
        error = setting.error(setting.run("linear", inputs[i]))
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
    for metric, balance in zip(METRICS, BALANCES, strict=True):  # least, most
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


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compile_kernels() -> None:
    """Compiles the kernels of every metric and balance before timing starts."""
    for metric, balance, tokens in product(METRICS, BALANCES, (16, 1024)):
        setting = Setting(tokens, FEW_SLICES, metric=metric, balance=balance)
        setting.run("cpu", setting.inputs())
    forward_backward(PEERS["ESP, hard"], setting.inputs())


def kernels(repeats: int) -> list[Row]:
    """The compiled kernels against the operator in torch, on one thread, in the same run."""
    rows = []
    for heads, tokens, width in SIZES:
        setting = Setting(tokens, width, width, heads=heads)
        inputs = setting.inputs()
        with threads(1):
            error = setting.error(setting.run("cpu", inputs))
            for name, run in (("forward", setting.forward), ("forward + backward", setting.run)):
                ours, torchs = least_seconds(
                    [partial(run, backend, inputs) for backend in ("cpu", "linear")], repeats
                )
                target = KERNELS[name]
                rows.append(
                    Row(
                        f"kernels, {name}, {heads} × {width}", tokens, width, setting.metric,
                        setting.balance, _time(ours), f"torch: {_time(torchs)}",
                        f"{torchs / ours:.1f}×", f"{error:.1e}", f"≥ {target:g}×",
                        verdict(torchs / ours >= target, error),
                    )
                )  # fmt: skip
                progress(rows[-1])
    return rows


def options(repeats: int) -> list[Row]:
    """The squared metric and balance against absolute rows, forward and backward."""
    rows = []
    for heads, tokens, width in SIZES[:3]:
        plain = Setting(tokens, width, width, heads=heads)
        chosen = product(METRICS, BALANCES)
        settings = [replace(plain, metric=metric, balance=balance) for metric, balance in chosen]
        inputs = plain.inputs()
        with threads(1):
            times = least_seconds([partial(s.run, "cpu", inputs) for s in settings], repeats)
            for setting, seconds in zip(settings[1:], times[1:], strict=True):
                error = setting.error(setting.run("cpu", inputs))
                ratio = seconds / times[0]
                rows.append(
                    Row(
                        f"options, {heads} × {width}", tokens, width, setting.metric,
                        setting.balance, _time(seconds), f"absolute, rows: {_time(times[0])}",
                        f"{ratio:.1f}×", f"{error:.1e}", f"≤ {OPTIONS:g}×",
                        verdict(ratio <= OPTIONS, error),
                    )
                )  # fmt: skip
                progress(rows[-1])
    return rows


def two_threads(repeats: int) -> list[Row]:
    """Forward and backward on two threads against one."""
    rows = []
    for heads, tokens, width in SIZES:
        setting = Setting(tokens, width, width, heads=heads)
        inputs = setting.inputs()

        def run(count: int, setting: Setting = setting, inputs: list[Tensor] = inputs) -> None:
            with threads(count):
                setting.run("cpu", inputs)

        runs = [partial(run, 2), partial(run, 1)]
        two, one = least_seconds(runs, 4 * repeats, clock=time.perf_counter)
        with threads(2):
            error = setting.error(setting.run("cpu", inputs))
        rows.append(
            Row(
                f"two threads, {heads} × {width}", tokens, width, setting.metric, setting.balance,
                _time(two), f"one: {_time(one)}", f"{one / two:.2f}×", f"{error:.1e}",
                f"≥ {THREADS:g}×", verdict(one / two >= THREADS, error),
            )
        )  # fmt: skip
        progress(rows[-1])
    return rows


def crossover(repeats: int) -> list[Row]:
    """Softmax attention beside ESP with 64 slices and with 8, for longer and longer sequences."""
    rows = []
    for tokens in (1024, 4096, 8192, 16_384):
        for slices in (WIDTH, FEW_SLICES):
            setting = Setting(tokens, slices)
            inputs = setting.inputs()
            with threads(1):
                error = setting.error(setting.run("cpu", inputs))
                softmax = partial(forward_backward, functional.softmax_attention, inputs)
                runs = [partial(setting.run, "cpu", inputs), softmax]
                ours, theirs = least_seconds(runs, repeats)
                forward, softmax_forward = least_seconds(
                    [
                        partial(setting.forward, "cpu", inputs),
                        partial(torch.no_grad()(functional.softmax_attention), *inputs[:3]),
                    ],
                    repeats,
                )
            for name, own, other in (
                ("forward", forward, softmax_forward), ("forward + backward", ours, theirs),
            ):  # fmt: skip
                rows.append(
                    Row(
                        f"softmax beside it, {name}", tokens, slices, setting.metric,
                        setting.balance, _time(own), f"softmax: {_time(other)}",
                        f"{other / own:.2f}×", f"{error:.1e}", "–", verdict(True, error),
                    )
                )  # fmt: skip
                progress(rows[-1])
    return rows


def million(repeats: int) -> list[Row]:
    """Time of the kernels for twice as many tokens, up to a million, with eight slices."""
    rows: list[Row] = []
    before = 0.0
    for tokens in [1024 << i for i in range(11)]:
        setting = Setting(tokens, FEW_SLICES)
        inputs = setting.inputs()
        with threads(1):
            got: list[Tensor] = []

            def run(
                got: list[Tensor] = got, s: Setting = setting, i: list[Tensor] = inputs
            ) -> None:
                got[:] = s.run("cpu", i)

            (seconds,) = least_seconds([run], repeats)
            error = setting.error(got)
            exact.cache_clear()  # a million tokens are much
        ratio = seconds / before if before else 0.0
        rows.append(
            Row(
                "growth of the kernels", tokens, setting.slices, setting.metric, setting.balance,
                _time(seconds), f"N = {tokens // 2}: {_time(before)}" if before else "–",
                f"{ratio:.2f}×" if before else "–", f"{error:.1e}", f"≤ {GROWTH:g}×",
                verdict(ratio <= GROWTH, error),
            )
        )  # fmt: skip
        before = seconds
        progress(rows[-1])
    return rows


def long_memory(repeats: int) -> list[Row]:
    """Peak memory of the kernels for 131,072 tokens."""
    rows = []
    for metric in METRICS:
        for slices in (WIDTH, FEW_SLICES) if metric == "absolute" else (FEW_SLICES,):
            tokens = 131_072
            found = peak_memory(tokens, slices, WIDTH, metric=metric, backend="cpu")
            rows.append(
                Row(
                    "peak memory of the kernels", tokens, slices, metric, "rows",
                    f"{found.peak:.2f} GB", f"before the call: {found.baseline:.2f} GB",
                    f"+{found.added:.2f} GB", "–", f"< {MEMORY:g} GB in all",
                    verdict(found.peak < MEMORY),
                )
            )  # fmt: skip
            progress(rows[-1])
    return rows


PARTS: dict[str, Callable[[int], list[Row]]] = {
    "kernels": kernels,
    "options": options,
    "threads": two_threads,
    "crossover": crossover,
    "million": million,
    "long-memory": long_memory,
    "memory": memory,
    "speed": speed,
    "growth": growth,
    "peers": peers,
}


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"


def progress(row: Row) -> None:
    setting = f"N = {row.tokens}, {row.metric}, {row.balance}"
    print(f"{row.measurement}, {setting}: {row.result} {row.ratio} {row.verdict}", file=sys.stderr)


def main() -> int:
    parser = make_parser("cpu", __doc__)
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, help="some questions; nothing is written to results/"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        help="turns of every measurement, after one that is not counted",
    )
    options = parser.parse_args()

    compile_kernels()
    company = Company()
    parts = options.only or list(PARTS)
    rows = [row for part in parts for row in PARTS[part](options.repeats)]
    stated = conditions(
        "benchmarks.cpu",
        dtype="float32",
        shapes=f"1 head, or heads × width; N tokens, of width {WIDTH} unless said, axis slices",
        temperatures="sort temperature 0.1 of the spread, inverse temperature 0.1",
        seeds="0",
        company=company,
        repeats=f"least of {options.repeats + 1}, or of as many as fit in {ENOUGH:g} s, one at "
        "least, in turn; kernels on one thread: CPU time, others: time that passed",
        error=f"largest ‖difference‖ / ‖exact‖ of output and gradients of the first {CHECKED} "
        "heads, against the torch operator in float64 (that one: against the dense formula in "
        f"float64; over {EXACT:,} tokens, and other attentions: against themselves in float64)",
        memory="resident memory of a process of its own, its peak, in 10⁹ bytes",
    )
    print_table(rows, stated)
    if not options.only:
        for path in write_results("cpu", "ESP attention on a CPU", rows, stated):
            print(f"written: {path}")
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
