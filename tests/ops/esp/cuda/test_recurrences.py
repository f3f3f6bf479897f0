"""Recurrences against dense kernel matrices in float64, on a GPU or by emulation."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import espformer
from espformer.ops.common import triton as launches
from espformer.ops.common.cuda import CudaError, CudaLaunch, Limits
from espformer.ops.esp.cuda import recurrences
from espformer.ops.esp.cuda.recurrences import RecurrencePlanKernels, Tiling, fits
from espformer.ops.esp.cuda.trial import try_kernels
from espformer.ops.esp.triton.soft_plan import Plan, PlanGradients
from tests.ops.esp.cuda.emulation import H200, emulate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _somewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a GPU, or in the emulation; also where there are fewer slices than it takes."""
    if DEVICE == "cpu":
        emulate(monkeypatch)
    monkeypatch.setattr(recurrences, "LEAST_PAIRS", 1)
    launches.forget()
    yield
    launches.forget()


class Side:
    """Sorted points, some of them tied; tokens in their order; rows, and scales by rank."""

    def __init__(self, batch: int, slices: int, ranks: int, width: int, grid: float, scales: bool):
        points = torch.randn(batch, slices, ranks, device=DEVICE)
        points = points if grid == 0 else (points / grid).round() * grid
        self.points = points.sort(-1).values
        self.order = torch.rand_like(self.points).argsort(-1)
        self.rows = torch.randn(batch, ranks, width, device=DEVICE)
        self.scale = torch.rand_like(self.points) + 0.5 if scales else None


def dense_plans(
    queries: Side, keys: Side, mid_scale: Tensor, rates: Tensor, weight: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """``Σ_l weight_l ⟨g, plan_l x⟩``, what it is made of, and its gradients, in float64."""

    def kappa(points: Tensor) -> Tensor:
        gap = points.unsqueeze(-1) - points.unsqueeze(-2)
        gap = torch.where(gap == 0, 0.0, gap)  # no force between ties
        return torch.exp(-gap.abs() * rates.double().view(-1, 1, 1, 1))

    leaves = {
        "query_points": queries.points, "key_points": keys.points, "mid_scale": mid_scale,
        "query_scale": queries.scale, "key_scale": keys.scale, "g": queries.rows, "x": keys.rows,
    }  # fmt: skip
    exact = {
        name: x.double().detach().requires_grad_() for name, x in leaves.items() if x is not None
    }

    def ranked(name: str, side: str, order: Tensor) -> Tensor:
        rows = exact[name].unsqueeze(1).expand(-1, order.shape[1], -1, -1)
        rows = rows.gather(2, order.unsqueeze(-1).expand(*order.shape, rows.shape[-1]))
        scale = exact.get(f"{side}_scale")
        return rows if scale is None else rows * scale.unsqueeze(-1)

    x, g = ranked("x", "key", keys.order), ranked("g", "query", queries.order)
    w = exact["mid_scale"].unsqueeze(-1) * (kappa(exact["key_points"]) @ x)
    y = kappa(exact["query_points"]) @ w
    totals = (y * g).sum((-2, -1))
    (totals * weight).sum().backward()
    if queries.scale is not None:
        y = y * queries.scale.double().unsqueeze(-1)
    tokens = torch.zeros_like(y).scatter_(2, queries.order.unsqueeze(-1).expand_as(y), y)
    out = (tokens * weight.view(*weight.shape, 1, 1)).sum(1)
    grads = {name: x.grad for name, x in exact.items() if x.grad is not None}
    return {"out": out.detach(), "totals": totals.detach()}, grads


def close(got: Tensor | None, expected: Tensor, what: str) -> None:
    assert got is not None
    error = (got.double() - expected).norm() / expected.norm().clamp(min=1e-3)
    assert error <= 1e-5, f"{what}: relative error {float(error):.1e}"


# Segments past the end, one rank; several warps and several segments in a warp; two blocks of
# columns, the second of which is not full; ties within and across segments, and nothing but ties.
CASES = [
    pytest.param(1, 4, 0.0, True, id="N1-D4"),
    pytest.param(5, 8, 0.5, True, id="N5-D8-ties"),
    pytest.param(40, 16, 0.5, False, id="N40-D16-rows-ties"),
    pytest.param(70, 64, 0.0, False, id="N70-D64-rows"),
    pytest.param(70, 64, 0.3, False, id="N70-D64-rows-ties"),
    pytest.param(130, 8, 0.3, True, id="N130-D8-ties"),
    pytest.param(150, 16, 0.3, False, id="N150-D16-rows-ties"),
    pytest.param(50, 10, 0.0, False, id="N50-D10-rows"),
    pytest.param(80, 64, 10.0, False, id="N80-D64-rows-all-tied"),
    pytest.param(300, 40, 0.05, True, id="N300-D40-ties", marks=pytest.mark.slow),
    pytest.param(1000, 6, 0.01, True, id="N1000-D6-ties", marks=pytest.mark.slow),
    pytest.param(197, 100, 0.1, True, id="N197-D100-ties", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("ranks", "width", "grid", "scales"), CASES)
def test_plans(ranks: int, width: int, grid: float, scales: bool) -> None:
    torch.manual_seed(ranks)
    batch, slices = 2, 3
    queries, keys = (Side(batch, slices, ranks, width, grid, scales) for _ in range(2))
    mid_scale = torch.rand_like(keys.points)
    mid_scale[0, 0, -1] = 0  # padding
    rates, weight = 1 + torch.rand(batch, device=DEVICE), torch.rand(batch, slices, device=DEVICE)
    found, grads = dense_plans(queries, keys, mid_scale, rates, weight)
    plan = Plan(
        queries.points, keys.points, queries.order.int(), keys.order.int(), rates, mid_scale,
        keys.scale, queries.scale, "absolute",
    )  # fmt: skip
    plans = RecurrencePlanKernels(plan, torch.float32)

    out = torch.zeros_like(queries.rows)
    plans.apply(keys.rows, weight, out)
    close(out, found["out"], "plans applied")
    totals = torch.full_like(weight, torch.nan)
    plans.cross(queries.rows, keys.rows, totals)
    close(totals, found["totals"], "totals")

    for with_queries in (True, False):
        dx = torch.ones_like(keys.rows)
        dg = torch.zeros_like(queries.rows) if with_queries else None
        unset = torch.full((5, batch, slices, ranks), torch.nan, device=DEVICE).unbind()
        of_scales = (unset[3], unset[4]) if scales else (None, None)
        into = PlanGradients(torch.full_like(weight, torch.nan), None, *unset[:3], *of_scales)
        plans.grad(queries.rows, keys.rows, weight, dx, dg, into)
        close(dx - 1, grads["x"], "dx")
        if dg is not None:
            close(dg, grads["g"], "dg")
        close(into.weight, found["totals"], "gradient of the weight")
        for name in ("query_points", "key_points", "query_scale", "key_scale"):
            if name in grads:
                close(getattr(into, name), grads[name], name)
        close(into.mid_scale, grads["mid_scale"].where(mid_scale != 0, 0), "mid_scale")


def attend(q: Tensor, k: Tensor, v: Tensor, backend: str, **options: Any) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = espformer.esp_attention(*leaves, backend=backend, **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"inverse_temperature": 0.5}, id="costs"),
        pytest.param({"balance": "both", "inverse_temperature": 0.5}, id="both"),
    ],
)
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (6, 11)], ids=["self", "cross"])
def test_attention(
    monkeypatch: pytest.MonkeyPatch, queries: int, keys: int, options: dict[str, Any]
) -> None:
    """As part of the whole operator, with padding; with pieces, ranks share a token."""
    names: list[str] = []
    launch = RecurrencePlanKernels._launch

    def counted(self: RecurrencePlanKernels, name: str, *args: Any) -> Any:
        names.append(name)
        return launch(self, name, *args)

    monkeypatch.setattr(RecurrencePlanKernels, "_launch", counted)
    sizes = (queries, 2), (keys, 2), (keys, 4)
    q, k, v = (torch.randn(2, 1, *size, device=DEVICE) for size in sizes)
    key_mask = torch.arange(keys, device=DEVICE) < torch.tensor([[keys - 2], [keys]], device=DEVICE)
    if queries == keys:
        masks = {"mask": key_mask}
    else:
        masks = {"key_mask": key_mask, "query_mask": torch.ones(2, queries, device=DEVICE).bool()}
    got = attend(q, k, v, "triton", **masks, **options)
    expected = attend(q.double(), k.double(), v.double(), "dense", **masks, **options)
    for x, y in zip(got, expected, strict=True):
        assert (x.double() - y).norm() <= 2e-5 * y.norm()
    gradients = ["plan_gradients"] * 2  # of values, and of costs
    assert names == ["cross_plans", "apply_plans", *gradients]


def test_where_recurrences_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrences, "LEAST_PAIRS", 128)

    def fitting(ranks: int, width: int = 64, limits: Limits | None = H200, **other: bool) -> bool:
        conditions = {"learnt": False, "deterministic": False} | other
        return fits((16, 8, ranks), width, "absolute", device_limits=limits, **conditions)

    assert all(fitting(n) for n in (1, 197, 256, 1024, 2048))
    assert all(fitting(197, width) for width in (2, 4, 8, 48, 256))
    assert not fitting(2400), "two tiles of a head do not fit in shared memory"
    assert not fitting(0)
    assert not fitting(197, 7), "rows are loaded by two columns"
    assert not fitting(197, limits=None), "16-bit rows, or no GPU"
    assert not fitting(197, learnt=True)
    assert not fitting(197, deterministic=True)
    assert not fits((16, 8, 197), 64, "squared", False, False, H200)
    assert not fits((1, 8, 197), 64, "absolute", False, False, H200), "few slices"


def test_the_trial_notices_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device(DEVICE)
    try_kernels(device)
    apply = RecurrencePlanKernels.apply

    def forgetful(self: Any, x: Tensor, weight: Tensor, out: Tensor) -> None:
        apply(self, x[:, :, :8].repeat(1, 1, 2), weight, out)

    monkeypatch.setattr(RecurrencePlanKernels, "apply", forgetful)
    with pytest.raises(ArithmeticError, match="computes a wrong plan, off by"):
        try_kernels(device)
    monkeypatch.setattr(recurrences, "_tried", {})
    with pytest.warns(RuntimeWarning, match="wrong plan, off by .*; float32 attention runs in slo"):
        assert not recurrences._are_right(device)
    assert not recurrences._are_right(device), "without another warning"


def test_a_kernel_that_does_not_compile_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise CudaError("NVRTC does not know this GPU")

    monkeypatch.setattr(CudaLaunch, "__call__", fail)
    monkeypatch.setattr(recurrences, "_tried", {})
    with pytest.warns(RuntimeWarning, match="NVRTC does not know this GPU; float32"):
        assert not recurrences._are_right(torch.device(DEVICE))


def test_only_float32_rows_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert recurrences.limits(torch.zeros(1)) is None
    assert recurrences.limits(torch.zeros(1, device=DEVICE, dtype=torch.bfloat16)) is None


def test_tilings() -> None:
    """Columns at a time and warps; a smaller GPU has fewer columns, or none."""

    def tiling(ranks: int, width: int, most: int = H200.shared_bytes) -> tuple[int, int] | None:
        found = Tiling.of(ranks, width, False, True, (ranks,), most)
        return None if found is None else (found.columns, found.warps)

    assert tiling(197, 64) == (64, 13)
    assert tiling(256, 256) == (64, 16)
    assert tiling(257, 64) == (32, 9)
    assert tiling(197, 8) == (8, 2)
    assert tiling(1, 2) == (4, 1)
    assert tiling(197, 64, 99 << 10) == (32, 7)
    assert tiling(2048, 64, 99 << 10) is None


def test_heads_share_the_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    tiling = Tiling.of(197, 64, False, False, (197,), H200.shared_bytes)
    assert tiling is not None
    assert recurrences._blocks(512, 8, tiling, H200) == 1
    assert recurrences._blocks(64, 8, tiling, H200) == 2, "128 blocks, all at once"
    assert recurrences._blocks(1, 8, tiling, H200) == 8
