"""Memory grows with N, not with N²: no tensor the size of an attention matrix, in either pass."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from espformer import esp_attention
from espformer.ops.esp import linear
from tests.compare import COUPLINGS, VARIANTS, differentiate

TOKENS = 2048
VARIANTS = {**VARIANTS, "squared-both": {"metric": "squared", "balance": "both"}}


class Sizes(TorchDispatchMode):
    """Notes the largest tensor that any operator returns, and how many bytes all of them take."""

    def __init__(self):
        super().__init__()
        self.largest, self.total, self.by = 0, 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                # What an expanded tensor takes, not what it shows.
                size = x.untyped_storage().nbytes() // x.element_size()
                self.total += size
                if size > self.largest:
                    self.largest, self.by = size, f"{func} {tuple(x.shape)}"
        return result


def sizes(n, m=None, **options):
    m = n if m is None else m
    query, key, value = torch.randn(1, n, 3), torch.randn(1, m, 3), torch.randn(1, m, 5)
    options.setdefault("sort_temperature", torch.tensor(0.1))
    with Sizes() as seen:
        differentiate(query, key, value, **options)
    return seen


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("masked", [False, True])
def test_no_tensor_of_n_squared_elements(options, masked):
    if masked:
        options = {**options, "mask": torch.rand(1, TOKENS) < 0.8}
    seen = sizes(TOKENS, **options)
    assert seen.largest < TOKENS * TOKENS / 8, seen.by


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
def test_nor_in_cross_attention(coupling, hard):
    seen = sizes(TOKENS, TOKENS - 300, coupling=coupling, hard=hard)
    assert seen.largest < TOKENS * TOKENS / 8, seen.by


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_twice_the_tokens_take_twice_the_room(options, monkeypatch):
    monkeypatch.setattr(linear, "GROUP_ELEMENTS", 1 << 40)
    small, large = sizes(TOKENS // 2, **options), sizes(TOKENS, **options)
    assert large.largest <= 2.1 * small.largest, large.by
    # All tensors ever made stand for time: states are handed on in log2(N / 32) steps.
    assert large.total <= 2.3 * small.total


def test_the_guard_sees_a_dense_matrix():
    assert sizes(256, backend="dense").largest >= 3 * 256 * 256


def test_slices_are_worked_on_in_groups(monkeypatch):
    """Eight times the slices, and no tensor but those of one number per rank grows with them."""
    monkeypatch.setattr(linear, "GROUP_ELEMENTS", 1 << 12)
    few = sizes(512, slices=torch.randn(2, 3))
    many = sizes(512, slices=torch.randn(16, 3))
    assert many.largest <= max(few.largest, 2 * 16 * 512), many.by


def test_a_long_sequence_runs():
    query, key, value = torch.randn(3, 1, 30_000, 2).unbind()
    out = esp_attention(query, key, value)  # 900 million pairs a slice
    exact = esp_attention(*(x.double() for x in (query, key, value)), backend="linear")
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-5)
