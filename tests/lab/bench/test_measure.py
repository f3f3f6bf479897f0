"""Rows of the benchmark: right results are timed, everything else says what it is."""

import math
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from espformer.functional import sinkhorn_attention
from espformer.lab.bench import attentions, measure
from espformer.lab.bench.attentions import OPERATORS, Operator
from espformer.lab.bench.cases import MODES, Case, Measurement, largest_error
from espformer.lab.bench.exact import Oracle, sinkhorn_in_blocks

CPU = torch.device("cpu")


def run_cases(cases: list[Case], device: torch.device, **options: float) -> list[Measurement]:
    return list(measure.run_cases(cases, device, **options))


SMALL = Case("esp-default", "linear", tokens=9, heads=4, width=8, dtype="float32")


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Adds an operator named `esp-default` with the backend `test`."""

    def add(attention: Any, **options: Any) -> Case:
        one = Operator("esp-default", "test", lambda case, device: attention, 1, **options)
        monkeypatch.setattr(
            attentions, "OPERATORS", MappingProxyType({**OPERATORS, ("esp-default", "test"): one})
        )
        return replace(SMALL, backend="test")

    return add


HERE = [pair for pair, one in OPERATORS.items() if one.device != "cuda" and pair[1] != "compiled"]


@pytest.mark.parametrize("pair", HERE, ids="/".join)
def test_operators_are_right_here(pair: tuple[str, str]) -> None:
    dtype = "bfloat16" if pair[1] in ("linear", "sdpa") else "float32"
    cases = [
        replace(SMALL, operator=pair[0], backend=pair[1], mode=mode, dtype=dtype) for mode in MODES
    ]
    for row in run_cases(cases, CPU, row_seconds=0.01):
        assert row.status == "ok", row
        assert 0 < row.milliseconds < 10_000
        assert row.error <= OPERATORS[pair].tolerance(dtype)


def test_slices_are_given_to_oracle_and_operator_alike() -> None:
    few = replace(SMALL, slices=5, mode=MODES[1])
    for case in (few, replace(few, learnt=True), replace(SMALL, qk_width=3, mode=MODES[1])):
        (row,) = run_cases([case], CPU, row_seconds=0.02)
        assert row.ok, row


def wrong_output(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from espformer import esp_attention

    return esp_attention(query, key, value) * 1.001


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 1.001


def wrong_gradient(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from espformer import esp_attention

    return _WrongGradient.apply(esp_attention(query, key, value))


def test_a_wrong_result_has_no_time(register: Any) -> None:
    case = register(wrong_output, ours=True)
    (row,) = run_cases([case], CPU)
    assert row.status.startswith("FAILED: error above 2e-05")
    assert math.isnan(row.milliseconds)
    assert row.error == pytest.approx(1e-3, rel=0.01)


def test_a_wrong_gradient_has_no_time_either(register: Any) -> None:
    case = register(wrong_gradient, ours=True)
    rows = run_cases([case, replace(case, mode=MODES[1])], CPU, row_seconds=0.02)
    assert rows[0].ok
    assert rows[1].status.startswith("FAILED")
    assert math.isnan(rows[1].milliseconds)


def test_nan_is_wrong(register: Any) -> None:
    (row,) = run_cases([register(lambda q, k, v: v * math.nan)], CPU)
    assert row.status.startswith("FAILED")


def test_obstacles_are_told_and_the_next_row_runs(register: Any) -> None:
    def full(*_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("too much")

    def broken(*_: Tensor) -> Tensor:
        raise RuntimeError("\nillegal\nsomewhere")

    rows = run_cases([register(full), SMALL], CPU, row_seconds=0.02)
    assert [row.status for row in rows] == ["out of memory", "ok"]
    rows = run_cases([register(broken), SMALL], CPU, row_seconds=0.02)
    assert [row.status for row in rows] == ["error: RuntimeError: illegal", "ok"]


def test_what_cannot_run_here_is_skipped(register: Any) -> None:
    (row,) = run_cases([register(wrong_output, package="no_such_package")], CPU)
    assert row.status == "skipped: no_such_package is not installed"
    (row,) = run_cases([replace(register(wrong_output, forward_only=True), mode=MODES[1])], CPU)
    assert row.status == "skipped: has no gradients"
    (row,) = run_cases([replace(SMALL, backend="triton")], CPU)
    assert row.status == "skipped: needs a CUDA device"


def test_too_slow_is_foretold() -> None:
    known = Measurement(replace(SMALL, operator="softmax", backend="sdpa"), milliseconds=500.0)
    larger = replace(known.case, tokens=90, heads=2)
    assert measure._predicted_seconds(larger, [known]) == pytest.approx(0.5 * 100 / 2)
    linear = Measurement(SMALL, milliseconds=500.0)
    assert measure._predicted_seconds(replace(SMALL, tokens=90), [linear]) == pytest.approx(5.0)
    rows = run_cases([SMALL, replace(SMALL, tokens=900)], CPU, row_seconds=1e-3)
    assert rows[0].ok
    assert rows[1].status.startswith("too slow: about")


def test_errors_are_relative_and_keep_nan() -> None:
    want = [torch.tensor([3.0, 4.0]), torch.tensor([1.0])]
    got = [torch.tensor([3.0, 4.5]), torch.tensor([1.05])]
    assert largest_error(got, want) == pytest.approx(0.1)
    assert math.isnan(largest_error([torch.tensor([math.nan])], [torch.tensor([1.0])]))


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_sinkhorn_in_blocks_is_sinkhorn(iterations: int) -> None:
    leaves = [torch.randn(1, 2, n, 4, dtype=torch.float64).requires_grad_() for n in (7, 5, 5)]
    upstream = torch.randn(1, 2, 7, 4, dtype=torch.float64)
    results = []
    for out in (
        sinkhorn_in_blocks(*leaves, iterations, block_elements=2 * 5 * 3),
        sinkhorn_attention(*leaves, iterations=iterations, backend="torch"),
    ):
        results.append([out, *torch.autograd.grad(out, leaves, upstream)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_oracle_is_computed_once_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [SMALL, replace(SMALL, mode=MODES[1]), replace(SMALL, backend="dense")]
    oracle = Oracle(cases, CPU)
    first = oracle(cases[0])
    assert len(first) == 1
    assert len(oracle(cases[1])) == 4
    assert oracle(cases[2])[0] is first[0]
    for case in cases:
        oracle.done_with(case)
    assert not oracle._found
