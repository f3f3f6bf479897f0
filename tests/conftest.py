"""What every test has: fixed seeds, and operators whose uninitialised buffers hold NaN."""

import functools
import os
import random
from collections.abc import Callable

import hypothesis
import numpy as np
import pytest
import torch

# Without a GPU the kernels run in Triton's interpreter, which must be told before they are defined.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The same examples every time: what fails on one machine fails on all of them.
hypothesis.settings.register_profile("espformer", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("espformer")

# torch notes once and for all which functions ``with torch.device(...)`` minds: let it see the true
# ones, not those that tests put in their place.
with torch.device("cpu"):
    torch.empty(0)

# Where a buffer that nobody wrote to must not go unnoticed.
OPERATORS = {"ops", "functional", "gpu"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none here"))


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poisoned_buffers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.empty`` and its kin return NaN (integers: their lowest value) in operator tests."""
    if OPERATORS & set(request.path.parts):
        monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
        monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
        monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def wrapper(*args: object, **options: object) -> torch.Tensor:
        buffer = make(*args, **options)
        with torch.no_grad():
            if buffer.is_floating_point() or buffer.is_complex():
                buffer.fill_(torch.nan)
            elif buffer.dtype != torch.bool:
                buffer.fill_(torch.iinfo(buffer.dtype).min)
        return buffer

    return wrapper
