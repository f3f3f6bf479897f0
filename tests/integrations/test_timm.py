"""Attention modules built like timm's, with a mechanism."""

import pytest
import torch
from torch import nn

import espformer
from espformer.nn import ESP, ClassToken, Packed, Softmax
from tests.integrations.families import MASK, TimmAttention


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_softmax_is_the_original(qk_norm, masked):
    module = TimmAttention(12, 3, qk_norm)
    nn.init.normal_(module.qkv.weight)
    mask = MASK[:, None, None] if masked else None
    x = torch.randn(3, 7, 12)
    before = module(x, attn_mask=mask)
    after = espformer.convert(module, Softmax())(x, attn_mask=mask)
    rows = MASK if masked else slice(None)
    torch.testing.assert_close(after[rows], before[rows], atol=1e-6, rtol=1e-5)


def test_the_scale_of_the_module_is_kept():
    module = TimmAttention(12, 3, qk_norm=False)
    module.scale = 0.05
    assert espformer.convert(module, ESP()).mechanism.scale == 0.05
    assert espformer.convert(module, ESP(scale=0.3)).mechanism.scale == 0.3


@pytest.mark.parametrize(
    "wrapper",
    [Packed, ClassToken, lambda base: Packed(ClassToken(base))],
    ids=["packed", "class-token", "both"],
)
@torch.no_grad()
def test_the_scale_of_the_module_reaches_what_is_wrapped(wrapper):
    module = TimmAttention(12, 3, qk_norm=False)
    module.scale = 3.0
    x = torch.randn(3, 7, 12)
    before = module(x)
    converted = espformer.convert(module, wrapper(Softmax()))
    # The class token, which is the first one, reads from all tokens by softmax.
    rows = slice(None) if wrapper is Packed else slice(1)
    torch.testing.assert_close(converted(x)[:, rows], before[:, rows], atol=1e-6, rtol=1e-5)
    softmaxes = [part for part in module.mechanism.modules() if isinstance(part, Softmax)]
    assert all(part.scale == 3.0 for part in softmaxes)
    espformer.convert(module, wrapper(Softmax(scale=0.3)))
    assert any(getattr(part, "scale", None) == 0.3 for part in module.mechanism.modules())


def test_causal_and_pairwise_masks_are_refused():
    module, x = espformer.convert(TimmAttention(12, 3), ESP()), torch.randn(3, 7, 12)
    with pytest.raises(ValueError, match="identity"):
        module(x, is_causal=True)
    with pytest.raises(ValueError, match="which tokens take part"):
        module(x, attn_mask=torch.ones(3, 1, 7, 7, dtype=torch.bool))


class WindowAttention(TimmAttention):
    def __init__(self) -> None:
        super().__init__(12, 3)
        self.relative_position_bias_table = nn.Parameter(torch.zeros(9, 3))


class RotaryAttention(TimmAttention):
    def forward(self, x, rope=None):
        return super().forward(x)


@pytest.mark.parametrize(
    ("module", "reason"),
    [(WindowAttention(), "relative_position_bias_table"), (RotaryAttention(12, 3), "rope")],
    ids=["window", "rotary"],
)
def test_more_than_plain_attention_is_left(module, reason):
    with pytest.raises(ValueError, match=f"more than plain attention.*{reason}"):
        espformer.convert(module, ESP())


class ClassAttention(TimmAttention):
    """Only the first token looks at the others."""

    def forward(self, x):
        return torch.cat([super().forward(x)[:, :1], x[:, 1:]], dim=1)


class InterleavedAttention(TimmAttention):
    """The columns of ``qkv`` in another order."""

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (self.num_heads, 3, -1)).permute(3, 0, 2, 1, 4)
        q, k = self.q_norm(q), self.k_norm(k)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).flatten(2))


class GridAttention(TimmAttention):
    def forward(self, x):
        return super().forward(x.flatten(1, 2)).view_as(x)


@pytest.mark.parametrize("kind", [ClassAttention, InterleavedAttention, GridAttention])
def test_what_computes_something_else_is_left(kind):
    module = kind(12, 3)
    with pytest.raises(ValueError, match="something else than plain softmax attention"):
        espformer.convert(module, ESP())
    assert module.training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    module = espformer.convert(TimmAttention(12, 3).to(dtype), ESP())
    x = torch.randn(3, 7, 12, dtype=dtype)
    found, exact = module(x), module.double()(x.double())
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=16 * torch.finfo(dtype).eps)


def test_a_model_without_data():
    with torch.device("meta"):
        module = TimmAttention(12, 3)
    mechanism = espformer.convert(module, ESP(learn_temperature=True)).mechanism
    assert mechanism.log_sort_temperature.is_meta


def test_real_timm_models():
    timm = pytest.importorskip("timm", reason="timm is not installed")
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False).eval()
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        before = model(images)
        after = espformer.convert(model, Softmax())(images)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)
    assert len(espformer.harden(espformer.convert(model, ESP()))) == 12
