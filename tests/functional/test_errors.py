"""Mistakes are named: what was wrong, what is expected, what to do."""

import math
import re

import pytest
import torch

from espformer import (
    esp_attention,
    esp_attention_varlen,
    esp_plan,
    sinkhorn_attention,
    sinkhorn_attention_varlen,
    sorting,
)
from espformer.functional import sinkhorn_plan, softmax_attention, softmax_plan
from espformer.nn import ESP, Sinkhorn, Softmax, Uniform
from tests.compare import tokens

QUERY, KEY, VALUE = (x.float() for x in tokens(2, 3, n=5, m=4))
SELF = torch.randn(3, 2, 3, 5, 4).unbind()
MASK = torch.ones(2, 4, dtype=torch.bool)


def refuses(text: str, query=QUERY, key=KEY, value=VALUE, **options):
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        esp_attention(query, key, value, **options)
    assert str(caught.value).startswith("esp_attention: ")


@pytest.mark.parametrize(
    ("option", "wrong", "choices"),
    [
        ("metric", "euclidean", "'absolute', 'squared'"),
        ("balance", "columns", "'rows', 'both'"),
        ("ties", "random", "'stable', 'average'"),
        ("coupling", "nearest", "'quantile', 'interpolate', 'identity'"),
        ("backend", "cuda", "'auto', 'dense', 'linear'"),
    ],
)
def test_unknown_names(option, wrong, choices):
    refuses(f"{option} must be one of {choices}", **{option: wrong})
    refuses(f"got {wrong!r}", **{option: wrong})


@pytest.mark.parametrize(
    ("option", "wrong", "wanted"),
    [
        ("sort_temperature", "0.3", "a number"),
        ("sort_temperature", True, "a number"),
        ("sort_temperature", None, "a number"),
        ("sort_temperature", [0.3], "a number"),
        ("hard", "yes", "True or False"),
        ("hard", 0.5, "True or False"),
        ("hard", None, "True or False"),
        ("inverse_temperature", "high", "a number"),
        ("straight_through", "yes", "True, False or a number"),
        ("slice_dropout", False, "a number"),
    ],
)
def test_wrong_types(option, wrong, wanted):
    expected = re.escape(f"esp_attention: {option} must be {wanted}, got {wrong!r}")
    with pytest.raises(TypeError, match=expected):
        esp_attention(QUERY, KEY, VALUE, **{option: wrong})


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("masks", "did you mean 'mask'?"),
        ("causal", "did you mean 'is_causal'?"),
        ("query_masks", "did you mean 'query_mask'?"),
        ("temprature", "did you mean 'sort_temperature'?"),
        ("learn_temperature", "it belongs to espformer.nn.ESP"),
        ("iterations", "it belongs to espformer.nn.Sinkhorn"),
        ("nonsense", "choose from sort_temperature, "),
    ],
)
def test_options_of_others(option, hint):
    for call, given in ((esp_attention, SELF), (esp_plan, SELF[:2])):
        expected = re.escape(f"{call.__name__}: there is no option {option!r}; {hint}")
        with pytest.raises(TypeError, match=expected):
            call(*given, **{option: True})


def test_the_epsilon_of_sinkhorn_is_a_number():
    for wrong in (None, "1", True):
        with pytest.raises(TypeError, match=f"epsilon must be a number, got {wrong!r}"):
            sinkhorn_attention(*SELF, epsilon=wrong)


ATTENTIONS = [esp_attention, sinkhorn_attention, softmax_attention]
PLANS = [esp_plan, sinkhorn_plan, softmax_plan]


def packed(attention):
    """Attention of packed sequences, of (batch, heads, tokens, width)."""

    def call(*tokens, **options):
        rows = [x[0].transpose(0, 1) if isinstance(x, torch.Tensor) else x for x in tokens]
        lengths = [[0, len(x)] for x in rows[:2]]
        return attention(*rows, *lengths, **options)

    call.__name__ = attention.__name__
    return call


PACKED = [packed(esp_attention_varlen), packed(sinkhorn_attention_varlen)]


@pytest.mark.parametrize("scale", [0.0, 0, -0.5, math.inf, math.nan])
def test_scales_that_are_not_positive(scale):
    wanted = re.escape(f"scale must be > 0 and finite, got {scale} (leave it out for head_dim")
    for attention in ATTENTIONS + PACKED:
        with pytest.raises(
            ValueError, match=f"^{attention.__name__.removesuffix('_varlen')}: {wanted}"
        ):
            attention(*SELF, scale=scale)
    for plan in PLANS:
        with pytest.raises(ValueError, match=f"^{plan.__name__}: {wanted}"):
            plan(*SELF[:2], scale=scale)
    for mechanism in (ESP, Sinkhorn, Softmax):
        with pytest.raises(ValueError, match=f"^{mechanism.__name__}: {wanted}"):
            mechanism(scale=scale)


def test_a_number_of_slices_is_not_their_directions():
    wanted = re.escape("(slices, head_dim) or (heads, slices, head_dim), got 8; espformer.nn.ESP(")
    with pytest.raises(TypeError, match=f"esp_attention: slices must be a tensor of .*{wanted}"):
        esp_attention(QUERY, KEY, VALUE, slices=8)


@pytest.mark.parametrize("attention", [*ATTENTIONS, *PLANS, *PACKED])
def test_arrays_are_no_tensors(attention):
    labels = ("query", "key") if attention in PLANS else ("query", "key", "value")
    for i, label in enumerate(labels):
        tokens = [QUERY, KEY, VALUE][: len(labels)]
        tokens[i] = tokens[i].numpy()
        expected = rf"^{attention.__name__}: {label} must be a torch\.Tensor, got ndarray; convert"
        with pytest.raises(TypeError, match=expected):
            attention(*tokens)


@pytest.mark.parametrize(
    "option", ["slices", "slice_logits", "query_mask", "key_mask", "attn_mask"]
)
def test_lists_are_no_tensors(option):
    attentions = [esp_attention]
    if option != "attn_mask":
        attentions += [esp_plan]
    if option.endswith("_mask") and option != "attn_mask":
        attentions += [sinkhorn_attention, softmax_attention, sinkhorn_plan, softmax_plan]
    for attention in attentions:
        tokens = [QUERY, KEY] if attention in PLANS else [QUERY, KEY, VALUE]
        expected = rf"^{attention.__name__}: {option} must be a torch\.Tensor, got list; convert"
        with pytest.raises(TypeError, match=expected):
            attention(*tokens, **{option: [[True]]})


@pytest.mark.parametrize("t", [0.0, -1.0, float("nan"), 0, -0.0])
def test_temperatures_that_are_not_positive(t):
    refuses("sort_temperature must be > 0", sort_temperature=t)
    refuses("(for hard sorting pass hard=True)", sort_temperature=t)
    one_wrong = torch.tensor([0.1, t, 0.1])
    refuses("sort_temperature must be > 0 everywhere", sort_temperature=one_wrong)
    refuses("(for hard sorting pass hard=True)", sort_temperature=one_wrong)


@pytest.mark.parametrize("shape", [(2,), (4,), (5,), (2, 3, 1), (7, 2, 3)], ids=str)
def test_temperatures_of_the_wrong_shape(shape):
    refuses(
        f"sort_temperature of shape {shape} does not broadcast to the leading dimensions (2, 3); "
        "for one temperature per head its shape is (heads,)",
        sort_temperature=torch.ones(shape),
    )


@pytest.mark.parametrize("tau", [-0.1, float("nan"), float("inf"), 1e39])
def test_inverse_temperatures(tau):
    refuses(f"inverse_temperature must be in [0, 1e+30], got {tau}", inverse_temperature=tau)


@pytest.mark.parametrize("probability", [-0.1, 1.0, 2.0, float("nan")])
def test_slice_dropout(probability):
    refuses(f"slice_dropout must be in [0, 1), got {probability}", slice_dropout=probability)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_straight_through(share):
    refuses("straight_through must be True, False or the share", straight_through=share)
    refuses(f"[0, 1], got {share}", straight_through=share)


@pytest.mark.parametrize("label", ["query", "key", "value"])
def test_too_few_dimensions(label):
    expected = f"{label} must have shape (batch, heads, tokens, head_dim) or at least "
    refuses(expected, **{label: torch.randn(4)})
    refuses("got (4,)", **{label: torch.randn(4)})
    refuses(expected, **{label: torch.tensor(1.0)})
    refuses(expected, **{label: torch.randn(4)}, attn_mask=MASK[:, None, None])


@pytest.mark.parametrize("label", ["query", "key", "value"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_numbers_that_are_not_floating_point(label, dtype):
    wrong = {"query": QUERY, "key": KEY, "value": VALUE}[label].to(dtype)
    refuses(f"{label} must hold floating-point numbers, got {dtype}", **{label: wrong})


@pytest.mark.parametrize("label", ["query", "key", "value"])
@pytest.mark.parametrize("empty", ["tokens", "width"])
def test_no_tokens_or_no_width(label, empty):
    x = {"query": QUERY, "key": KEY, "value": VALUE}[label]
    wrong = x[..., :0, :] if empty == "tokens" else x[..., :0]
    refuses(f"{label} of shape {tuple(wrong.shape)} has no tokens or no width", **{label: wrong})
    refuses("at least one token is needed (for an empty sequence", **{label: wrong})


@pytest.mark.parametrize("label", ["key", "value"])
def test_devices_that_differ(label):
    wrong = {"key": KEY, "value": VALUE}[label].to("meta")
    refuses(f"query is on cpu but {label} on meta; use one device", **{label: wrong})


@pytest.mark.parametrize("label", ["key", "value"])
def test_dtypes_that_differ(label):
    wrong = {"key": KEY, "value": VALUE}[label].double()
    refuses(
        f"query is torch.float32 but {label} is torch.float64; cast them to one dtype",
        **{label: wrong},
    )


def test_head_dims_that_differ():
    refuses(
        "query and key must have the same head_dim, got query (2, 3, 5, 4) and key (2, 3, 4, 3)",
        key=KEY[..., :3],
    )


def test_keys_and_values_of_different_number():
    refuses(
        "key and value must have equally many tokens, got key (2, 3, 4, 4) and value (2, 3, 3, 3)",
        value=VALUE[..., :3, :],
    )


def test_leading_dimensions_that_do_not_broadcast():
    refuses(
        "leading dimensions do not agree: query (2, 3, 5, 4), key (2, 2, 4, 4), value (2, 3, 4, 3)",
        key=KEY[:, :2],
    )
    refuses("leading dimensions do not agree", value=VALUE[:1].expand(3, 3, 4, 3))


def test_grouped_queries():
    refuses(
        "value (2, 2, 4, 3) (for grouped queries repeat the other tensors: "
        "x.repeat_interleave(3, dim=-3))",
        query=torch.randn(2, 6, 5, 4),
        key=KEY[:, :2],
        value=VALUE[:, :2],
    )


@pytest.mark.parametrize("shape", [(4,), (5, 3), (5, 5), (0, 4), (3, 5, 1), ()], ids=str)
def test_slices_of_the_wrong_width(shape):
    refuses(
        "slices must have shape (L, head_dim) or (heads, L, head_dim) with head_dim 4 and L >= 1, "
        f"got {shape}",
        slices=torch.randn(shape),
    )


@pytest.mark.parametrize("shape", [(2, 5, 4), (5, 3, 5, 4), (7, 2, 3, 5, 4)], ids=str)
def test_slices_of_the_wrong_number_of_heads(shape):
    refuses(
        f"slices of shape {shape} do not broadcast to the leading dimensions (2, 3)",
        slices=torch.randn(shape),
    )


def test_causal_attention():
    refuses("causal attention is not possible", is_causal=True)
    refuses("rows and columns sum to one is the identity", is_causal=True)
    refuses("keep softmax attention (espformer.nn.Softmax)", is_causal=True)


@pytest.mark.parametrize(
    "attention", [esp_attention, sinkhorn_attention, esp_plan, sinkhorn_plan, *PACKED]
)
def test_no_doubly_stochastic_attention_is_causal(attention):
    tokens = [QUERY, KEY] if attention in PLANS else [QUERY, KEY, VALUE]
    torch.testing.assert_close(attention(*tokens, is_causal=False), attention(*tokens))
    expected = f"^{attention.__name__}: causal attention is not possible: a lower-triangular matrix"
    with pytest.raises(ValueError, match=expected):
        attention(*tokens, is_causal=True)


@pytest.mark.parametrize(
    "attn_mask",
    [
        torch.ones(5, 4, dtype=torch.bool),
        torch.ones(5, 4).tril().bool(),
        torch.ones(2, 1, 5, 4, dtype=torch.bool),
        torch.ones(2, 3, 1, 4, dtype=torch.bool),
        torch.zeros(2, 1, 1, 4),
        torch.ones(2, 1, 1, 5, dtype=torch.bool),
    ],
    ids=lambda mask: f"{mask.dtype}-{tuple(mask.shape)}",
)
def test_pairwise_and_additive_attn_masks(attn_mask):
    refuses("attn_mask can only say which keys are padding: boolean", attn_mask=attn_mask)
    refuses("of shape (2, 1, 1, 4)", attn_mask=attn_mask)
    refuses("Pairwise and causal masks are not possible", attn_mask=attn_mask)


def test_two_masks_for_the_same_keys():
    for name in ("mask", "query_mask", "key_mask"):
        refuses("without another mask", attn_mask=MASK[:, None, None], **{name: MASK})


def test_a_key_mask_alone_is_ambiguous_where_queries_are_as_many():
    tokens = torch.randn(2, 3, 4, 4)
    every = torch.ones_like(MASK)
    for attention in (esp_attention, sinkhorn_attention, softmax_attention):
        with pytest.raises(ValueError, match=r"key_mask alone.*as many queries as keys \(4\)"):
            attention(tokens, tokens, tokens, key_mask=MASK)
        attention(tokens, tokens, tokens, key_mask=MASK, query_mask=every)
        attention(tokens[:, :, :3], tokens, tokens, key_mask=MASK)


def test_one_mask_is_for_as_many_queries_as_keys():
    refuses("mask is for self-attention", mask=MASK)
    refuses("with 5 queries and 4 keys", mask=MASK)
    tokens = torch.randn(2, 3, 4, 4)
    for name in ("query_mask", "key_mask"):
        with pytest.raises(ValueError, match="pass query_mask and key_mask instead"):
            esp_attention(tokens, tokens, tokens, mask=MASK, **{name: MASK})


@pytest.mark.parametrize("shape", [(4,), (2, 5), (3, 4), (2, 4, 3), (1, 4)], ids=str)
def test_masks_of_the_wrong_shape(shape):
    refuses(
        f"key_mask must have shape (2, 4) or (2, 3, 4) to mask tokens of shape (2, 3, 4, 4), got "
        f"{shape}",
        key_mask=torch.ones(shape, dtype=torch.bool),
    )


def test_query_masks_of_the_wrong_shape():
    refuses("query_mask must have shape (2, 5) or (2, 3, 5)", query_mask=MASK)


@pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4), (2, 3, 5, 4)], ids=str)
def test_pairwise_masks(shape):
    mask = torch.ones(shape, dtype=torch.bool)
    refuses(f"key_mask of shape {shape} masks (query, key) pairs, but only padding", key_mask=mask)
    refuses("Say which tokens take part with mask", query_mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_masks_that_are_not_boolean(dtype):
    refuses(f"key_mask must be boolean (True = takes part), got {dtype}", key_mask=MASK.to(dtype))
    refuses("pass key_mask.bool()", key_mask=MASK.to(dtype))


def test_masks_on_another_device():
    refuses("key_mask is on meta but the tokens it masks are on cpu", key_mask=MASK.to("meta"))
    refuses("key_mask.to('cpu')", key_mask=MASK.to("meta"))


def test_plans_speak_for_themselves():
    with pytest.raises(ValueError, match=r"^esp_plan: metric must be one of"):
        esp_plan(QUERY, KEY, metric="euclidean")
    with pytest.raises(ValueError, match=r"^esp_plan: query and key must have the same head_dim"):
        esp_plan(QUERY, KEY[..., :3])


@pytest.mark.parametrize("attention", [*ATTENTIONS, *PLANS])
def test_mistakes_of_every_attention(attention):
    """The baselines refuse what ESP attention refuses, in the same words."""
    for wrong, words in [
        ((QUERY, KEY.double(), VALUE), "query is torch.float32 but key is torch.float64; cast"),
        ((QUERY, KEY.to("meta"), VALUE), "query is on cpu but key on meta; use one device"),
        ((QUERY.long(), KEY, VALUE), "query must hold floating-point numbers, got torch.int64"),
        ((QUERY, KEY[..., :0, :], VALUE), "has no tokens or no width"),
        ((QUERY, KEY[:, :2], VALUE), "leading dimensions do not agree"),
        ((QUERY, KEY[0, 0, 0], VALUE), "key must have shape (batch, heads, tokens, head_dim)"),
        ((QUERY, KEY[..., :3], VALUE), "query and key must have the same head_dim"),
    ]:
        with pytest.raises(ValueError, match=rf"^{attention.__name__}: .*{re.escape(words)}"):
            attention(*wrong[: 2 if attention in PLANS else 3])
    if attention in ATTENTIONS:
        with pytest.raises(ValueError, match="key and value must have equally many tokens"):
            attention(QUERY, KEY, VALUE[..., :3, :])


@pytest.mark.parametrize("attention", [*ATTENTIONS, *PLANS])
def test_autocast_mixes_dtypes(attention):
    mixed = (QUERY, KEY.bfloat16(), VALUE.bfloat16())[: 2 if attention in PLANS else 3]
    with torch.autocast("cpu", torch.bfloat16):
        found = attention(*mixed)
    assert found.shape == (2, 3, 5, 4 if attention in PLANS else 3)


def test_nested_tensors_are_padded_for_a_plan():
    rows, offsets = torch.randn(7, 2, 3), torch.tensor([0, 3, 7])
    nested = torch.nested.nested_tensor_from_jagged(rows, offsets).transpose(1, 2)
    for plan in PLANS:
        expected = rf"^{plan.__name__}: query is a nested tensor.*torch\.nested\.to_padded_tensor"
        with pytest.raises(ValueError, match=expected):
            plan(nested, nested)
    padded = torch.nested.to_padded_tensor(nested.transpose(1, 2), 0.0).transpose(1, 2)
    mask = torch.arange(padded.shape[-2]) < torch.tensor([[3], [4]])
    alone = rows[:3].transpose(0, 1)
    torch.testing.assert_close(
        esp_plan(padded, padded, mask=mask)[0, :, :3, :3], esp_plan(alone, alone)
    )
    with pytest.raises(ValueError, match="key is a nested tensor"):
        esp_attention(padded, nested, nested)


def test_mistakes_are_seen_before_anything_is_computed():
    """A wrong word in a hard or plan-free corner of the call is an error there too."""
    refuses("metric must be one of", hard=True, metric="euclidean")
    refuses("ties must be one of", ties="random")
    refuses("coupling must be one of", *SELF, coupling="nearest")
    refuses("sort_temperature must be > 0", *SELF, hard=True, sort_temperature=0.0)


def test_triton_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.randn(1, 1, 4, 3)
    with pytest.raises(ValueError, match="needs CUDA tensors, got tensors on cpu"):
        esp_attention(x, x, x, backend="triton")


@pytest.mark.parametrize("attention", [esp_attention, sinkhorn_attention])
def test_the_interpreter_has_no_bfloat16(attention, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = torch.randn(1, 1, 4, 3)
    expected = r"got torch.bfloat16, which Triton's interpreter .* pass float16 or float32"
    with pytest.raises(ValueError, match=expected):
        attention(*[x.bfloat16()] * 3, backend="triton")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=expected):
        attention(x, x, x.bfloat16(), backend="triton")


def test_options_that_were_right_do_not_excuse_equal_ones_that_are_wrong() -> None:
    """True equals 1.0, and options that were checked once are looked up."""
    x = torch.randn(1, 1, 4, 2)
    esp_attention(x, x, x, inverse_temperature=1.0)
    with pytest.raises(TypeError, match="inverse_temperature must be a number, got True"):
        esp_attention(x, x, x, inverse_temperature=True)


def test_the_default_scale_follows_the_width() -> None:
    """Heads of another width have another one, though their options are the same."""
    for width in (2, 8):
        x = torch.randn(1, 1, 4, width)
        expected = esp_attention(x, x, x, temperature_unit="absolute", scale=width**-0.5)
        assert torch.equal(esp_attention(x, x, x, temperature_unit="absolute"), expected)


def test_options_that_are_numbers_are_no_tensors():
    """They would have no gradient, and be kept alive by whoever looks options up."""
    q, k, v = torch.randn(3, 1, 1, 4, 2).unbind()
    for option in ("inverse_temperature", "cost_exponent", "scale"):
        with pytest.raises(TypeError, match=f"{option} must be a number, not a tensor"):
            esp_attention(q, k, v, **{option: torch.tensor(1.0, requires_grad=True)})


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x: esp_plan(None, x), "esp_plan: query must be a torch.Tensor"),
        (lambda x: esp_attention(x, x, None), "esp_attention: value must be"),
        (lambda x: sinkhorn_plan(x, None), "sinkhorn_plan: key must be"),
        (lambda x: softmax_attention(x, None, x), "softmax_attention: key must be"),
        (lambda x: Uniform()(x, x, None), "Uniform: value must be"),
        (lambda x: sorting.sliced_plan(None, x), "sliced_plan: x must be"),
        (lambda x: sorting.sliced_wasserstein(x, None), "sliced_wasserstein: y must be"),
    ],
)
def test_none_is_no_tensor(call, expected):
    with pytest.raises(TypeError, match=expected):
        call(torch.randn(1, 2, 5, 3))
