"""``backend="triton"`` against the dense reference in float64: values and every gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import espformer
from espformer.ops.esp.triton import (
    normalise,
    short_columns,
    short_plan,
    soft_plan,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow: without a GPU, chunks of eight ranks make two from few tokens."""
    if DEVICE == "cpu":
        monkeypatch.setattr(soft_plan, "CHUNK", {2: 8, 4: 8})
        monkeypatch.setattr(soft_plan, "LEAST", 2)
        monkeypatch.setattr(soft_plan, "AHEAD", (2, 2))
        monkeypatch.setattr(soft_plan, "segment_length", lambda chunks, ahead, scans: ahead)


def gradients(
    tensors: list[Tensor], upstream: Tensor, masks: dict[str, Tensor], learnt: bool, **options: Any
) -> list[Tensor]:
    """The output and the gradient of every tensor; of the temperature if it is learnt."""
    query, key, value, temperature = (x.detach().requires_grad_() for x in tensors)
    temperature.requires_grad_(learnt)
    out = espformer.esp_attention(
        query, key, value, sort_temperature=temperature, **masks, **options
    )
    leaves = [x for x in (query, key, value, temperature) if x.requires_grad]
    found = torch.autograd.grad(out, leaves, upstream.to(out), allow_unused=True)
    found = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
    return [out.detach(), *found]


def compare(
    queries: int, keys: int, dtype: torch.dtype, tolerance: float, *, batch: int = 2,
    heads: int = 1, width: int = 2, value_width: int = 3, t: float = 0.2,
    masked: bool = False, learnt: bool = True, **options: Any,
) -> None:  # fmt: skip
    def tokens(count: int, columns: int) -> Tensor:
        return torch.randn(batch, heads, count, columns, device=DEVICE).to(dtype)

    tensors = [tokens(queries, width), tokens(keys, width), tokens(keys, value_width)]
    temperature = t * torch.linspace(1, 2, heads, device=DEVICE)
    upstream = tokens(queries, value_width)
    masks = {}
    if masked:
        lengths = torch.tensor([max(1, keys - 3)] + [keys] * (batch - 1), device=DEVICE)
        masks["key_mask"] = torch.arange(keys, device=DEVICE) < lengths[:, None]
        if queries != keys:
            lengths = torch.tensor([queries] * (batch - 1) + [max(1, queries - 2)], device=DEVICE)
            masks["query_mask"] = torch.arange(queries, device=DEVICE) < lengths[:, None]
        else:
            masks = {"mask": masks["key_mask"]}
    got = gradients([*tensors, temperature], upstream, masks, learnt, backend="triton", **options)
    exact = [x.double() for x in (*tensors, temperature)]
    expected = gradients(exact, upstream, masks, learnt, backend="dense", **options)
    assert got[0].dtype == dtype
    names = ("out", "query", "key", "value", "temperature")[: len(got)]
    for name, a, b in zip(names, got, expected, strict=True):
        error = (a.double() - b).norm() / b.norm().clamp(min=1e-2)
        # The temperature's gradient is a sum over pairs of either sign.
        bound = 20 * tolerance if name == "temperature" else tolerance
        assert error <= bound, f"{name}: relative error {error:.1e}"


OPTIONS = [
    pytest.param({}, id="rows"),
    pytest.param({"inverse_temperature": 0.0}, id="mean"),
    pytest.param({"balance": "both"}, id="both", marks=pytest.mark.slow),
    pytest.param({"metric": "squared"}, id="squared", marks=pytest.mark.slow),
    pytest.param({"hard": True, "inverse_temperature": 1.0}, id="hard"),
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("masked", [False, True], ids=["full", "padded"])
def test_self_attention(options: dict[str, Any], masked: bool) -> None:
    compare(11, 11, torch.float32, 2e-5, masked=masked, **options)


@pytest.mark.parametrize(
    "masked", [pytest.param(False, marks=pytest.mark.slow), True], ids=["full", "padded"]
)
@pytest.mark.parametrize("coupling", ["quantile", pytest.param("identity", marks=pytest.mark.slow)])
def test_cross_attention(coupling: str, masked: bool) -> None:
    compare(6, 11, torch.float32, 2e-5, masked=masked, coupling=coupling, inverse_temperature=1.0)


@pytest.mark.parametrize("options", OPTIONS[:2] + OPTIONS[-1:])
def test_padded_half_precision(options: dict[str, Any]) -> None:
    """float16, whose tokens are sorted as packed words; also with a mask that is a strided view."""
    compare(11, 11, torch.float16, 5e-3, masked=True, **options)
    compare(9, 9, torch.float16, 5e-3, batch=1, heads=2, masked=True, **options)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"inverse_temperature": 0.0}, id="mean"),
        pytest.param({"inverse_temperature": 1.0}, id="costs"),
        pytest.param(
            {"inverse_temperature": 0.0, "balance": "both"}, id="both", marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.parametrize("queries", [9, 6], ids=["self", "cross"])
def test_short_narrow_rows_of_many_heads(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], queries: int
) -> None:
    """Sequences in registers, as four groups of ranks, and columns in two blocks."""
    launched: list[str] = []
    apply = short_plan.ShortPlanKernels._apply

    def counted(self: Any, plan: Any, x: Any, weight: Any, out: Any, g: Any, *args: Any) -> None:
        launched.append("rows" if g is None else "totals" if weight is None else "gradients")
        apply(self, plan, x, weight, out, g, *args)

    monkeypatch.setattr(short_plan, "LEAST_PAIRS", 1)
    monkeypatch.setattr(short_plan, "LANES", 4)
    monkeypatch.setattr(short_plan, "MOST_COLUMNS", 4)
    monkeypatch.setattr(short_plan.ShortPlanKernels, "_apply", counted)
    sizes = {"width": 4, "value_width": 8, "masked": queries == 6}
    compare(queries, 9, torch.float16, 5e-3, learnt=False, **sizes, **options)
    costs = bool(options["inverse_temperature"])
    gradients = ["gradients", "gradients"]  # of queries and keys
    assert launched == ["totals"] * costs + ["rows", *gradients] + gradients * costs


def test_where_sequences_stay_in_registers() -> None:
    def fits(ranks: int, **options: Any) -> bool:
        return short_plan.fits((4096, 8, ranks), 8, torch.bfloat16, "absolute", **options)

    assert fits(197)
    assert fits(256)
    assert not fits(257)
    assert not fits(197, with_inv_bandwidth=True)
    torch.use_deterministic_algorithms(True)
    try:
        assert not fits(197)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not short_plan.fits((4096, 8, 197), 8, torch.float32, "absolute")
    assert not short_plan.fits((64, 8, 197), 8, torch.bfloat16, "absolute"), "few slices"
    assert not short_plan.fits((4096, 8, 197), 12, torch.bfloat16, "absolute"), "no power of two"
    sizes = [short_plan.config(ranks, 8)["R"] for ranks in (0, 1, 33, 65, 129, 197, 225, 256)]
    assert sizes == [1, 1, 2, 4, 7, 7, 8, 8]


def test_columns_of_float32_rows_do_not_stay_in_registers() -> None:
    """Where errors of single steps would matter."""
    kernels = [normalise.columns((4096, 8, 197), 4096, "absolute", fp32).kernel for fp32 in (0, 1)]
    assert kernels == [short_columns.short_column_kernel, normalise.column_kernel]


@pytest.mark.parametrize("metric", ["absolute", "squared"])
def test_close_numbers_beside_one_far_away(metric: str) -> None:
    """Differences are measured where floats are dense: what is far does not round what is near."""
    t = 5e-5 if metric == "absolute" else 2.5e-9  # half the way between two of them
    x = torch.arange(8.0).mul(1e-4).repeat(2, 1).mT.contiguous()
    x[0] = -1000
    x = x[[3, 0, 7, 5, 1, 6, 2, 4]].view(1, 1, 8, 2).to(DEVICE, torch.float16)
    value = torch.randn(1, 1, 8, 4, device=DEVICE).half()
    options = {"sort_temperature": t, "metric": metric, "balance": "both", "scale": 1.0}
    found = espformer.esp_attention(x, x, value, backend="triton", **options)
    exact = [y.double() for y in (x, x, value)]
    expected = espformer.esp_attention(*exact, backend="dense", **options)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-3)


def test_one_mask_for_both_sides_needs_no_coupling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("espformer.ops.esp.triton.attention.couple", None)
    mask = torch.arange(5, device=DEVICE) < torch.tensor([[5], [3]], device=DEVICE)
    x = torch.randn(2, 1, 5, 2, device=DEVICE)
    masks = {"query_mask": mask, "key_mask": mask}
    found = espformer.esp_attention(x, x, x, backend="triton", **masks)
    expected = espformer.esp_attention(x, x, x, backend="linear", **masks)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("keys", [7, 5], ids=["self", "cross"])
def test_plans_of_padded_tokens(options: dict[str, Any], keys: int) -> None:
    query, key = (torch.randn(2, 1, n, 3, device=DEVICE) for n in (7, keys))
    mask = torch.arange(keys, device=DEVICE) < torch.tensor([[keys], [3]], device=DEVICE)
    masks = {"mask" if keys == 7 else "key_mask": mask}
    found = espformer.esp_plan(query, key, backend="triton", **masks, **options)
    expected = espformer.esp_plan(query, key, backend="dense", **masks, **options)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    assert not found[1, :, :, 3:].any(), "padding takes nothing"


@pytest.mark.parametrize("metric", ["absolute", "squared"])
def test_equal_keys_do_not_push_each_other(metric: str) -> None:
    query, value = (torch.randn(1, 1, 40, n, device=DEVICE).half() for n in (1, 2))
    key = query.new_full((1, 1, 40, 1), 0.3).requires_grad_()
    options = {"metric": metric, "sort_temperature": 0.1, "temperature_unit": "absolute"}
    out = espformer.esp_attention(query.requires_grad_(), key, value, backend="triton", **options)
    d_query, d_key = torch.autograd.grad(out, (query, key), torch.randn_like(out))
    assert d_query.abs().max() > 0.02, "queries do push each other"
    assert d_key.abs().max() <= 2e-4 * d_query.abs().max()


def test_half_precision_with_more_keys() -> None:
    compare(6, 11, torch.float16, 5e-3, masked=True)


@pytest.mark.parametrize("t", [1e-37, float("inf")], ids=["none", "infinite"])
def test_extreme_temperatures(t: float) -> None:
    query, key, value = torch.randn(3, 1, 1, 6, 4, device=DEVICE).unbind()
    expected = espformer.esp_attention(query, key, value, sort_temperature=t, backend="dense")
    found = espformer.esp_attention(query, key, value, sort_temperature=t, backend="triton")
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("balance", ["rows", "both"])
@pytest.mark.parametrize("metric", ["absolute", "squared"])
def test_a_hard_soft_sort_exerts_no_force(metric: str, balance: str) -> None:
    """Numbers a thousand widths apart, or a hundred thousand: nothing of the poles is left."""
    numbers = torch.stack([torch.randperm(9) for _ in range(4)], -1).float().to(DEVICE)
    query, key = (x.view(1, 1, 9, 4).requires_grad_() for x in (numbers, numbers.flip(0)))
    temperature = torch.tensor([1e-6], device=DEVICE, requires_grad=True)
    value = torch.randn(1, 1, 9, 4, device=DEVICE)
    out = espformer.esp_attention(
        query, key, value, sort_temperature=temperature, metric=metric, balance=balance,
        inverse_temperature=0.0, backend="triton",
    )  # fmt: skip
    leaves = (query, key, temperature)
    for gradient in torch.autograd.grad(out, leaves, torch.randn_like(out)):
        assert not gradient.any(), gradient


@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
def test_transposed_tokens(hard: bool) -> None:
    """Heads split off a wide matrix: (batch, tokens, heads, width) seen as (batch, heads, ...)."""
    split = [torch.randn(1, 6, 2, 4, device=DEVICE).transpose(1, 2) for _ in range(3)]
    found = espformer.esp_attention(*split, hard=hard, backend="triton")
    expected = espformer.esp_attention(*split, hard=hard, backend="linear")
    torch.testing.assert_close(found, expected)


def test_one_token() -> None:
    compare(1, 1, torch.float32, 2e-5)


@pytest.mark.slow
def test_deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        compare(11, 11, torch.float32, 2e-5)
        compare(6, 11, torch.float32, 2e-5)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [1, 2, 4], ids=["a slice", "some slices", "a head"])
def test_slices_are_worked_on_in_groups(monkeypatch: pytest.MonkeyPatch, pairs: int) -> None:
    """Of the three slices of two heads, as many at a time as scratch memory holds."""
    monkeypatch.setattr(soft_plan.Chunks, "scratch_bytes", lambda *_: 1)
    monkeypatch.setattr(soft_plan, "SCRATCH_BYTES", {"absolute": pairs})
    compare(11, 11, torch.float32, 2e-5, width=3, inverse_temperature=1.0)


@pytest.mark.parametrize("needed", [{2}, {0, 1}, {1}], ids=["value", "query and key", "key"])
@pytest.mark.parametrize("keys", [11, 6], ids=["self", "cross"])
def test_gradients_of_some_operands(needed: set[int], keys: int) -> None:
    """What is not asked for is not computed, and changes no other gradient."""
    found = []
    query, upstream = torch.randn(2, 1, 2, 11, 3, device=DEVICE).unbind()
    key, value = torch.randn(2, 1, 2, keys, 3, device=DEVICE).unbind()
    for backend, dtype in (("triton", torch.float32), ("dense", torch.float64)):
        tensors = [
            x.to(dtype).requires_grad_(i in needed) for i, x in enumerate((query, key, value))
        ]
        out = espformer.esp_attention(*tensors, inverse_temperature=1.0, backend=backend)
        leaves = [x for x in tensors if x.requires_grad]
        found.append(torch.autograd.grad(out, leaves, upstream.to(dtype)))
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 2e-5 * b.norm()


def test_algorithms_that_become_deterministic_before_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They need more scratch memory: states that the forward pass kept are of all slices, and the
    backward pass has them in groups.
    """
    query, key, value, upstream = torch.randn(4, 1, 2, 20, 3, device=DEVICE).unbind()
    leaves = [x.requires_grad_() for x in (query, key, value)]
    room = soft_plan.Chunks(2, 3, 20, "absolute", torch.float32).scratch_bytes(3, True)
    monkeypatch.setattr(soft_plan, "SCRATCH_BYTES", {"absolute": 6 * room})
    found = []
    for deterministic in (False, True):
        out = espformer.esp_attention(*leaves, backend="triton")
        torch.use_deterministic_algorithms(deterministic)
        try:
            found.append(torch.autograd.grad(out, leaves, upstream))
        finally:
            torch.use_deterministic_algorithms(False)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_sums_that_leave_the_range_of_float16() -> None:
    """States are sums over tokens: of 20 values of 6,000 where float16 ends at 65,504."""
    query, key = torch.randn(2, 1, 1, 20, 2, device=DEVICE).half().unbind()
    value = torch.full((1, 1, 20, 2), 6000.0, device=DEVICE).half()
    found = espformer.esp_attention(query, key, value, sort_temperature=50.0, backend="triton")
    expected = espformer.esp_attention(query, key, value, sort_temperature=50.0, backend="linear")
    torch.testing.assert_close(found, expected, rtol=5e-3, atol=0)


@pytest.mark.parametrize("default", [torch.float64, torch.float16], ids=["float64", "float16"])
@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_default_dtype_does_not_matter(default: torch.dtype, tau: float) -> None:
    tensors = torch.randn(3, 1, 1, 9, 2, device=DEVICE).unbind()

    def attention() -> Tensor:
        return espformer.esp_attention(*tensors, inverse_temperature=tau, backend="triton")

    expected = attention()
    torch.set_default_dtype(default)
    try:
        torch.testing.assert_close(attention(), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_queries_and_keys_of_different_dtypes() -> None:
    """As autocast leaves them where one side was computed in float32."""
    half = torch.randn(1, 1, 9, 2, device=DEVICE).half().requires_grad_()
    key, value = torch.randn(2, 1, 1, 9, 2, device=DEVICE, requires_grad=True).unbind()
    with torch.autocast(DEVICE, torch.bfloat16):
        out = espformer.esp_attention(half, key, value, inverse_temperature=1.0, backend="triton")
        expected = espformer.esp_attention(
            half, key, value, inverse_temperature=1.0, backend="linear"
        )
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    for a, b in zip(
        torch.autograd.grad(out.sum(), (half, key)),
        torch.autograd.grad(expected.sum(), (half, key)),
        strict=True,
    ):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_what_torch_computes_has_the_dtype_of_the_values() -> None:
    query, key, value = (torch.randn(1, 1, n, 4, device=DEVICE).half() for n in (5, 7, 7))
    out = espformer.esp_attention(query, key, value, straight_through=0.5, backend="triton")
    assert out.dtype == torch.float16


def test_sizes_that_no_grid_and_no_offset_holds_are_left_to_torch() -> None:
    """Blocks of tokens are the second axis of a grid; offsets of a slice have 32 bits."""
    from espformer.ops.esp.problem import Problem
    from espformer.ops.esp.triton.attention import _supported

    def supported(queries: int, keys: int, width: int = 256, slices: int | None = None) -> bool:
        query, key = (torch.empty(1, n, width, device="meta") for n in (queries, keys))
        directions = None if slices is None else torch.empty(1, slices, width, device="meta")
        return _supported(Problem(query, key, slices=directions), key)

    assert supported(500_000, 500_000)
    assert supported(500_000, 300_000)
    assert not supported(600_000, 600_000)
    assert supported(2_000_000, 2_000_000, width=64)
    assert not supported(3_000_000, 3_000_000, width=64)
    assert supported(500_000, 500_000, width=8, slices=1000)
    assert not supported(500_000, 500_000, width=8, slices=5000)


@pytest.mark.parametrize("metric", ["absolute", pytest.param("squared", marks=pytest.mark.slow)])
def test_states_are_made_once_where_they_are_few(
    monkeypatch: pytest.MonkeyPatch, metric: str
) -> None:
    """The backward goes on from those of the forward, and finds what it would find without."""
    made: list[bool] = []
    chunk_states = soft_plan.chunk_states

    def counted(*args: Any, **options: Any) -> Any:
        made.append(options["ties"])
        return chunk_states(*args, **options)

    monkeypatch.setattr(soft_plan, "chunk_states", counted)
    q, k, v = torch.randn(3, 1, 1, 19, 2, device=DEVICE).round(decimals=1).unbind()
    upstream = torch.randn_like(v)
    found = []
    for scratch in (1 << 30, 1):
        monkeypatch.setattr(
            soft_plan, "SCRATCH_BYTES", dict.fromkeys(("absolute", "squared"), scratch)
        )
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = espformer.esp_attention(*leaves, metric=metric, backend="triton")
        found.append([out, *torch.autograd.grad(out, leaves, upstream)])
    assert made == [True] * 2 + [False, False] + [True, True] * 2  # two slices, one at a time
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    made.clear()
    with torch.no_grad():
        espformer.esp_attention(q, k, v, metric=metric, backend="triton")
    assert not any(made)
