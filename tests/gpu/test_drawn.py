"""Problems drawn at random, from a printed seed: output and every gradient against float64.

By default one problem is drawn. For many,

    ESPFORMER_DRAWN_SECONDS=400 python -m pytest -s tests/gpu/test_drawn.py

draws until the seconds are over, and prints how many there were. ESPFORMER_DRAWN_SEED is another
seed, ESPFORMER_DRAWN_ONLY the number of the one problem that is wanted. Most of the time goes to
compiling, so problems come in families of `FAMILY`: widths, dtype and options are drawn once for
each, lengths, heads and temperatures anew for every problem.

In a third of the families some inputs need no gradient, which leaves parts of the kernels out. A
quarter drop slices: the seed of a problem decides which, for the kernels and for the oracle. Where
costs weigh slices, a third take another power of them. A fifth ask torch for deterministic
algorithms; their kernels are called twice, and must give the same bits.

A quarter of the families have narrow rows that stay in registers (`short_plan.py`). That is meant
for a thousand slices, more than a problem here has, so they are told to do so with any number.
"""

import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import espformer

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
launches = pytest.importorskip("espformer.ops.common.triton")
short_columns = pytest.importorskip("espformer.ops.esp.triton.short_columns")
short_plan = pytest.importorskip("espformer.ops.esp.triton.short_plan")

SEED = int(os.environ.get("ESPFORMER_DRAWN_SEED", "0"))
SECONDS = float(os.environ.get("ESPFORMER_DRAWN_SECONDS", "0"))
ONLY = os.environ.get("ESPFORMER_DRAWN_ONLY")

# Relative error of the gradient of t that is too much for any number of tokens: zero is off by 1.
MOST_OF_TEMPERATURE = 0.5
MOST_TIED = 16  # tokens whose points float32 may make equal to others'
MOST_TOKENS, WIDTHS = 3000, range(8, 257, 8)
FAMILY = 8
NARROW, PARTIAL, DROPPED, POWERS, REPEATED = 0.25, 0.33, 0.25, 0.33, 0.2  # of the families
# Elements of (heads, slices, N, M): what the dense oracle makes; and of (heads, slices, N, width),
# which bounds the time and memory of the linear one.
MOST_DENSE, MOST_ELEMENTS = 1 << 22, 1 << 25


@dataclass
class Drawn:
    """One problem: sizes, and the options of the call."""

    number: int
    batch: int
    heads: int
    queries: int
    keys: int
    width: int
    value_width: int
    dtype: torch.dtype
    slices: int | None  # how many are given
    masks: str  # "none", "keys" or "both"
    learnt_temperature: bool
    slice_logits: bool
    options: dict[str, Any] = field(default_factory=dict)
    narrow: bool = False  # rows stay in registers
    constants: tuple[str, ...] = ()  # inputs that need no gradient
    deterministic: bool = False  # torch is asked for deterministic algorithms

    @property
    def hard(self) -> bool:
        """Whether a hard sort decides the output, or part of it."""
        return bool(self.options.get("hard") or self.options.get("straight_through"))

    @property
    def elements(self) -> int:
        widest = max(self.width, self.value_width)
        ranks = max(self.queries, self.keys)
        return self.batch * self.heads * (self.slices or self.width) * ranks * widest

    @property
    def oracle(self) -> str:
        pairs = self.batch * self.heads * (self.slices or self.width) * self.queries * self.keys
        return "dense" if pairs <= MOST_DENSE else "linear"

    def tolerance(self, name: str) -> float:
        """Allowed relative error: rounding, with room; a lost block of columns is far more."""
        halves = self.dtype != torch.float32
        bound = 1.5e-2 if halves else 2e-4
        # Forces of both signs nearly cancel, and few tokens do not average their rounding.
        bound *= max(1.0, 8 / min(self.queries, self.keys) ** 0.5)
        if self.options["metric"] == "squared":  # its sum of exponentials (docs/mathematics.md)
            bound += (4e-6 if halves else 6e-8) * max(self.queries, self.keys)
        if self.slices is not None and not halves:
            bound = max(bound, 3e-3)  # projections that tie in float32 only have no slope
        if name == "slices" and not halves:
            bound = max(bound, 1e-2)  # a pair of tied projections far out, see `tolerance_of_ties`
        if name in ("slices", "slice_logits"):
            bound *= 3
        if name == "sort_temperature":  # forces of both signs add up
            bound = min(20 * bound, MOST_OF_TEMPERATURE)
        return bound

    def tolerance_of_ties(self, name: str) -> float:
        """The same with all tokens; without the worst few, gradients must be within `tolerance`.

        Two points that are equal in float32 only and stand far out hold on to each other alone:
        one pair of 736 tokens beyond two spreads, made equal, moves the gradient of the queries in
        float64 by 3e-4 to 7e-3.
        """
        if name not in ("query", "key") or self.dtype != torch.float32:
            return self.tolerance(name)
        few = self.slices is not None or "slice_dropout" in self.options
        return max(self.tolerance(name), 1e-2 if few else 2e-3)


def draw_any(number: int) -> Drawn:
    family = random.Random(f"{SEED}/family/{number // FAMILY}")
    rng = random.Random(f"{SEED}/{number}")
    metric = family.choice(("absolute", "squared"))
    options: dict[str, Any] = {
        "metric": metric,
        "temperature_unit": family.choice(("spread", "absolute")),
        "balance": family.choice(("rows", "both")),
    }
    kind = family.random()
    if kind < 0.15:
        options["hard"] = True
    elif kind < 0.3:
        options["straight_through"] = family.choice((True, 0.5))
    cross = family.random() < 0.3
    coupling = family.choice(("quantile", "quantile", "identity", "interpolate"))
    weighted = family.random() < 0.6
    width, value_width = family.choice(WIDTHS), family.choice(WIDTHS)
    given = family.random() < 1 / 3
    drawn = Drawn(
        number=number,
        batch=rng.choice((1, 1, 2)),
        heads=rng.choice((1, 2, 3)),
        queries=round(MOST_TOKENS ** rng.random()),
        keys=round(MOST_TOKENS ** rng.random()),
        width=width,
        value_width=value_width,
        dtype=family.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)),
        slices=rng.randint(1, 64) if given else None,
        masks=family.choice(("none", "none", "keys", "both")),
        learnt_temperature=family.random() < 0.4 and kind >= 0.15,
        slice_logits=family.random() < 0.3,
        options=options,
    )
    if cross:
        options["coupling"] = coupling
    else:
        drawn.keys = drawn.queries
    t = 10 ** rng.uniform(-1.3, 0)
    in_squares = metric == "squared" and options["temperature_unit"] == "absolute"
    options["sort_temperature"] = t**2 if in_squares else t
    options["inverse_temperature"] = rng.choice((0.1, 1.0)) if weighted else 0.0
    while drawn.elements > MOST_ELEMENTS and drawn.batch * drawn.heads > 1:
        drawn.batch, drawn.heads = 1, max(1, drawn.heads - 1)
    if drawn.elements > MOST_ELEMENTS:  # then not along all axes
        slices = drawn.slices or drawn.width
        drawn.slices = max(1, slices * MOST_ELEMENTS // drawn.elements)
    if drawn.hard and drawn.slices is not None:  # projections that float32 can hold, or nearly
        drawn.dtype = torch.bfloat16
        options["scale"] = 0.25
    return drawn


def draw(number: int) -> Drawn:
    drawn = draw_any(number)
    family = random.Random(f"{SEED}/narrow/{number // FAMILY}")
    if family.random() < NARROW:
        make_narrow(drawn, family, random.Random(f"{SEED}/narrow/{number}"))
    family = random.Random(f"{SEED}/partial/{number // FAMILY}")
    if family.random() < PARTIAL:
        needing = family.choice((("value",), ("query",), ("key",), ("query", "key"), ()))
        drawn.constants = tuple({"query", "key", "value"} - {*needing})
        if not needing:  # only what is learnt beside the tokens
            drawn.learnt_temperature = not drawn.options.get("hard")
            drawn.slice_logits |= not drawn.learnt_temperature
    family = random.Random(f"{SEED}/dropped/{number // FAMILY}")
    if family.random() < DROPPED:
        drawn.options["slice_dropout"] = family.choice((0.2, 0.7))
    family = random.Random(f"{SEED}/powers/{number // FAMILY}")
    if family.random() < POWERS and drawn.options["inverse_temperature"]:
        drawn.options["cost_exponent"] = family.choice((1.0, 1.5))
    family = random.Random(f"{SEED}/repeated/{number // FAMILY}")
    # Rows that stay in registers add up in no certain order, and leave these problems to others.
    drawn.deterministic = family.random() < REPEATED and not drawn.narrow
    return drawn


def make_narrow(drawn: Drawn, family: random.Random, rng: random.Random) -> None:
    """Makes it one whose rows stay in registers, and that compiles what its family does."""
    drawn.narrow = True
    drawn.width, drawn.value_width = (family.choice(short_plan.WIDTHS) for _ in range(2))
    drawn.dtype = family.choice((torch.bfloat16, torch.float16))
    groups = family.choice(short_plan.GROUP_SIZES) * short_plan.LANES
    ranks = rng.randint(max(2, groups - short_plan.LANES + 1), groups)
    cross = drawn.options.get("coupling") is not None
    if cross or drawn.masks == "both":  # as many pieces as there are tokens
        drawn.queries = rng.randint(1, ranks - 1) if cross else ranks // 2
        drawn.keys = ranks - drawn.queries if cross else drawn.queries
    else:
        drawn.queries = drawn.keys = ranks
    for hard in ("hard", "straight_through", "scale"):
        drawn.options.pop(hard, None)
    if drawn.options.get("coupling") == "interpolate":
        drawn.options["coupling"] = "quantile"
    if drawn.options["metric"] == "squared" and drawn.options["temperature_unit"] == "absolute":
        drawn.options["sort_temperature"] **= 0.5
    drawn.options["metric"] = "absolute"


@contextmanager
def kernels_of(drawn: Drawn) -> Iterator[list[str]]:
    """With narrow rows in registers if it is such a problem; yields what they are launched for."""
    launched: list[str] = []
    if not drawn.narrow:
        yield launched
        return
    apply = short_plan.ShortPlanKernels._apply

    def counted(self: Any, plan: Any, x: Any, weight: Any, out: Any, g: Any, *found: Any) -> None:
        launched.append("rows" if g is None else "totals" if weight is None else "gradients")
        apply(self, plan, x, weight, out, g, *found)

    with pytest.MonkeyPatch.context() as patch:
        for module in (short_plan, short_columns):
            patch.setattr(module, "LEAST_PAIRS", 1)
        patch.setattr(short_plan.ShortPlanKernels, "_apply", counted)
        launches.forget()
        yield launched
    launches.forget()


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """What torch itself cannot promise (a product by cuBLAS, say) is no reason to stop."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def tensors(drawn: Drawn) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """What gradients flow to, the masks, and an upstream gradient."""
    torch.manual_seed(SEED << 32 | drawn.number)

    def tokens(count: int, width: int) -> Tensor:
        return torch.randn(drawn.batch, drawn.heads, count, width, device="cuda").to(drawn.dtype)

    leaves = {
        "query": tokens(drawn.queries, drawn.width),
        "key": tokens(drawn.keys, drawn.width),
        "value": tokens(drawn.keys, drawn.value_width),
    }
    slices = drawn.slices or drawn.width
    if drawn.slices is not None:
        directions = torch.randn(drawn.heads, slices, drawn.width, device="cuda")
        if drawn.hard:  # four columns each, by half: sums of 16-bit numbers that are not rounded
            four = torch.rand_like(directions).topk(4, -1).indices
            directions = torch.zeros_like(directions).scatter_(
                -1, four, directions.gather(-1, four).sign() / 2
            )
        leaves["slices"] = torch.nn.functional.normalize(directions, dim=-1)
    if drawn.slice_logits:
        leaves["slice_logits"] = torch.randn(drawn.heads, slices, device="cuda")
    if drawn.learnt_temperature:
        t = torch.full((drawn.heads,), drawn.options["sort_temperature"], device="cuda")
        leaves["sort_temperature"] = t * torch.linspace(1, 1.5, drawn.heads, device="cuda")
    masks = {}
    if drawn.masks != "none":
        masks["key_mask"] = some(drawn.batch, drawn.keys)
    if drawn.masks == "both":
        masks["query_mask"] = some(drawn.batch, drawn.queries)
    elif drawn.queries == drawn.keys:
        masks = {"mask": masks["key_mask"]} if masks else {}
    return leaves, masks, tokens(drawn.queries, drawn.value_width)


def some(*shape: int) -> Tensor:
    mask = torch.rand(*shape, device="cuda") < 0.8
    mask[..., 0] |= ~mask.any(-1)
    return mask


def differentiate(
    drawn: Drawn, leaves: dict[str, Tensor], masks: dict[str, Tensor], upstream: Tensor,
    backend: str, dtype: torch.dtype | None,
) -> dict[str, Tensor]:  # fmt: skip
    """The output and all gradients, by name; what has none counts as zero."""
    inputs = {
        name: (x if dtype is None else x.to(dtype))
        .detach()
        .requires_grad_(name not in drawn.constants)
        for name, x in leaves.items()
    }
    torch.manual_seed(drawn.number)  # decides which slices are dropped
    out = espformer.esp_attention(**(drawn.options | inputs), **masks, backend=backend)
    varied = {name: x for name, x in inputs.items() if x.requires_grad}
    if not out.requires_grad:  # a hard sort, of which only queries or keys need a gradient
        return {"out": out} | {name: torch.zeros_like(x) for name, x in varied.items()}
    grads = torch.autograd.grad(out, list(varied.values()), upstream.to(out), allow_unused=True)
    found = {
        name: torch.zeros_like(x) if grad is None else grad
        for (name, x), grad in zip(varied.items(), grads, strict=True)
    }
    return {"out": out.detach()} | found


def wrong_parts(drawn: Drawn) -> list[str]:
    """What is off by more than it may be, in words."""
    leaves, masks, upstream = tensors(drawn)
    with kernels_of(drawn) as launched, ExitStack() as stack:
        if drawn.deterministic:
            stack.enter_context(deterministic_algorithms())
        calls = [
            differentiate(drawn, leaves, masks, upstream, "triton", None)
            for _ in range(1 + drawn.deterministic)
        ]
    found = calls[0]
    expected = differentiate(drawn, leaves, masks, upstream, drawn.oracle, torch.float64)
    wrong = [
        f"{name} has other bits when it is repeated"
        for name, x in calls[-1].items()
        if not torch.equal(x, found[name])
    ]
    needed = {"rows", "gradients"}
    if drawn.learnt_temperature or drawn.constants:
        needed = {"rows"}
    if drawn.narrow and not needed <= set(launched):
        wrong.append(f"in registers were computed only {launched}")
    # Where a plan hardly moves (one token, equal weights) a gradient has no size of its own.
    least = dict.fromkeys(expected, 1e-3 * float(upstream.double().norm()))
    if "slice_logits" in expected:  # differences of products of the outputs of slices
        products = float((upstream.double() * expected["out"]).norm())
        least["slice_logits"] = products / expected["slice_logits"].shape[-1] ** 0.5
    for name, reference in expected.items():
        size = max(float(reference.norm()), least[name])
        difference = (found[name].double() - reference) / size
        checks = [(name, difference, drawn.tolerance_of_ties(name))]
        if name in ("query", "key"):
            rows = difference.norm(dim=-1).flatten().sort().values
            most = max(0, min(MOST_TIED, len(rows) - 1))
            checks.append(
                (f"{name} but for {most} tokens", rows[: -most or None], drawn.tolerance(name))
            )
        for what, off, allowed in checks:
            if not float(off.norm()) <= allowed:
                wrong.append(f"{what} is off by {float(off.norm()):.1e}, {allowed:.1e} allowed")
    return wrong


@pytest.mark.filterwarnings("ignore:.*deterministic")
def test_drawn_problems() -> None:
    end = time.monotonic() + SECONDS
    failures: list[str] = []
    count = 0
    numbers = range(1 << 30) if ONLY is None else [int(ONLY)]
    for number in numbers:
        drawn = draw(number)
        wrong = wrong_parts(drawn)
        count += 1
        if wrong:
            failures.append(f"{drawn}: {'; '.join(wrong)}")
            print(failures[-1], flush=True)
        if time.monotonic() >= end:
            break
    print(f"seed {SEED}: {count} problems, {len(failures)} of them wrong")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("value_width", [40, 48, 80, 96, 128])
@pytest.mark.parametrize("tokens", [64, 333])
def test_balanced_values_of_several_blocks_of_columns(tokens: int, value_width: int) -> None:
    """Gradients of balanced plans, whose scales have gradients of their own, block by block."""
    drawn = Drawn(
        number=0, batch=1, heads=2, queries=tokens, keys=tokens, width=48, value_width=value_width,
        dtype=torch.bfloat16, slices=None, masks="none", learnt_temperature=True,
        slice_logits=False,
        options={
            "metric": "absolute", "balance": "both", "sort_temperature": 0.3,
            "inverse_temperature": 0.1,
        },
    )  # fmt: skip
    assert not wrong_parts(drawn)
