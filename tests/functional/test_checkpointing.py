"""Attention inside activation checkpoints, which recompute what the backward looks at."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import espformer
from tests.compare import BACKENDS


def has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


EVERY_BACKEND = [*BACKENDS] + ["triton"] * has_triton()


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_same_gradients(backend: str, hard: bool, reentrant: bool) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    leaves = [torch.randn(1, 2, 5, 4, device=device, requires_grad=True) for _ in range(3)]

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return espformer.esp_attention(
            query, key, value, hard=hard, inverse_temperature=1.0, backend=backend
        )

    expected = torch.autograd.grad(attention(*leaves).square().sum(), leaves)
    for x in leaves:
        x.grad = None
    out: Tensor = checkpoint(attention, *leaves, use_reentrant=reentrant)
    out.square().sum().backward()
    for x, gradient in zip(leaves, expected, strict=True):
        assert x.grad is not None
        torch.testing.assert_close(x.grad, gradient)
