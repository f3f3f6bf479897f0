"""Float32 rows, which kernels in CUDA C++ compute, on a GPU."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import espformer

pytestmark = pytest.mark.gpu
recurrences = pytest.importorskip("espformer.ops.esp.cuda.recurrences")


def attend(tensors: list[Tensor], backend: str = "auto", **options: Any) -> list[Tensor]:
    """The output and the gradient of queries, keys and values."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = espformer.esp_attention(*leaves, backend=backend, **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def random_tokens(heads: int, tokens: int, width: int) -> list[Tensor]:
    return list(torch.randn(3, 1, heads, tokens, width, device="cuda").unbind())


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float = 2e-5) -> None:
    for x, y in zip(found, expected, strict=True):
        assert (x.double() - y).norm() <= tolerance * y.norm()


def test_the_kernels_are_used_here() -> None:
    """They compile, and agree with float64."""
    assert recurrences.limits(torch.zeros(1, device="cuda")) is not None


@pytest.mark.parametrize(
    "options",
    [{}, {"inverse_temperature": 0.5}, {"balance": "both", "inverse_temperature": 0.5}],
    ids=["mean", "costs", "both"],
)
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (33, 8), (197, 64), (600, 48), (2000, 16)])
def test_against_float64(tokens: int, width: int, options: dict[str, Any]) -> None:
    tensors = random_tokens(16, tokens, width)
    found = attend(tensors, **options)
    expected = attend([x.double() for x in tensors], "linear", **options)
    if tokens == 1:  # one token's plan does not move: no gradient to compare
        found, expected = found[::3], expected[::3]
    assert_close(found, expected)


def test_lengths_one_after_another() -> None:
    """Of one kernel, with more shared memory, with less, and with more again."""
    for tokens in (208, 193, 208):
        tensors = random_tokens(4, tokens, 64)
        assert_close(attend(tensors), attend([x.double() for x in tensors], "linear"))


def test_a_thread_that_torch_has_not_used_the_gpu_in() -> None:
    tensors = random_tokens(8, 40, 16)
    expected, found = attend(tensors), []
    thread = threading.Thread(target=lambda: found.append(attend(tensors)))
    thread.start()
    thread.join()
    assert_close(found[0], [x.double() for x in expected], 1e-5)


def test_mostly_padding() -> None:
    """All padding has one point, and with it ties; the result is that of the sequence alone."""
    tensors = random_tokens(16, 1000, 64)
    mask = torch.arange(1000, device="cuda").unsqueeze(0) < 100
    padded = attend(tensors, mask=mask)
    alone = attend([x[:, :, :100] for x in tensors])
    assert_close([x[:, :, :100] for x in padded], [x.double() for x in alone], 1e-5)
