"""What would run and be another attention than its user thinks: converted, saved, or refused."""

import copy

import pytest
import torch
from torch import nn

import espformer
from espformer.integrations import conversion_report
from espformer.nn import ESP, Softmax
from tests.integrations.families import MASK, make, run

transformers = pytest.importorskip("transformers")
integration = pytest.importorskip("espformer.integrations.pretrained")

TEXT = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 20,
}  # fmt: skip
IMAGE = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip


def disturbed(model: nn.Module) -> nn.Module:
    """Weights that are not the first ones: attention shall matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def siglip() -> nn.Module:
    text = TEXT | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.SiglipModel(
        transformers.SiglipConfig(text_config=text, vision_config=IMAGE)
    )


@pytest.mark.parametrize("cross", [None, True])
@torch.no_grad()
def test_the_pooling_head_of_siglip(cross, tmp_path):
    """One learnt query over all patches: cross-attention, in an ``nn.MultiheadAttention``."""
    model = disturbed(siglip())
    espformer.convert(model, ESP(), cross=cross)
    rows = {row.module: row for row in conversion_report(model).rows}
    head = rows["vision_model.head.attention"]
    assert head.action == ("converted" if cross else "left")
    assert "cross=True" in head.reason or cross
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16), "input_ids": torch.randint(3, 50, (2, 6))}
    expected = model(**inputs)
    model.save_pretrained(tmp_path)
    loaded = integration.load_pretrained(transformers.AutoModel, str(tmp_path)).eval()
    assert conversion_report(loaded).converted == conversion_report(model).converted
    found = loaded(**inputs)
    assert torch.equal(found.image_embeds, expected.image_embeds)
    assert torch.equal(found.text_embeds, expected.text_embeds)
    espformer.revert(loaded)
    assert not torch.allclose(loaded(**inputs).image_embeds, expected.image_embeds)


@pytest.mark.parametrize("widths", [{}, {"kdim": 5, "vdim": 7}], ids=["same", "kdim"])
@torch.no_grad()
def test_queries_of_cross_attention_do_not_share_the_padding_of_keys(widths):
    """As many queries as keys, and only the keys are padded."""
    module = nn.MultiheadAttention(12, 3, batch_first=True, **widths).eval()
    query = torch.randn(3, 7, 12)
    key, value = (torch.randn(3, 7, widths.get(name, 12)) for name in ("kdim", "vdim"))
    expected = module(query, key, value, key_padding_mask=~MASK)[0]
    espformer.convert(module, Softmax(), cross=True)
    found = module(query, key, value, key_padding_mask=~MASK)[0]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    espformer.convert(module, ESP(), cross=True)
    found = module(query, key, value, key_padding_mask=~MASK)[0]
    for row, length in enumerate(MASK.sum(1).tolist()):
        one = slice(row, row + 1)
        alone = module(query[one], key[one, :length], value[one, :length])[0]
        torch.testing.assert_close(found[one], alone, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_self_or_cross_is_asked_where_it_is_not_known():
    module = espformer.convert(nn.MultiheadAttention(12, 3, batch_first=True).eval(), ESP())
    x, y = torch.randn(3, 7, 12), torch.randn(3, 7, 12)
    module(x, y, y)  # without padding it makes no difference
    with pytest.raises(ValueError, match=r"cross=True.*cross=False"):
        module(x, y, y, key_padding_mask=~MASK)
    with pytest.raises(ValueError, match="cross=True"):
        module(x[:, :1], y, y)
    shared = espformer.convert(nn.MultiheadAttention(12, 3, batch_first=True), ESP(), cross=False)
    output = shared(x, y, y, key_padding_mask=~MASK)[0]
    padded = shared.out_proj.bias.expand_as(output)
    torch.testing.assert_close(output[~MASK], padded[~MASK])


class Layer(nn.Module):
    """Calls its attention as it is told."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.latents = nn.Parameter(torch.randn(1, 7, 8))


class OneExpression(Layer):
    def forward(self, x):
        q = k = x + 1
        return self.attention(q, k, value=x, key_padding_mask=~MASK)[0]


class TwoExpressions(Layer):
    def forward(self, x):
        latents = self.latents.expand(len(x), -1, -1)
        return self.attention(latents, x, x, key_padding_mask=~MASK)[0]


@torch.no_grad()
def test_self_or_cross_is_read_from_the_call():
    x = torch.randn(3, 7, 8)
    model = espformer.convert(OneExpression(), ESP())
    padded = model.attention.out_proj.bias.expand(3, 7, 8)
    torch.testing.assert_close(model(x)[~MASK], padded[~MASK])
    with pytest.raises(ValueError, match="not seen to be the same tokens"):
        espformer.convert(TwoExpressions(), ESP())
    model = TwoExpressions()
    expected = model(x)
    torch.testing.assert_close(espformer.convert(model, Softmax(), cross=True)(x), expected)


OWN_ATTENTION = {
    "MPNet": TEXT,
    "DebertaV2": TEXT,
    "Perceiver": {"num_latents": 4, "d_latents": 16, "d_model": 8, "num_self_attention_heads": 2},
    "XLM": {"vocab_size": 50, "emb_dim": 16, "n_layers": 1, "n_heads": 2},
    "RoFormer": TEXT | {"embedding_size": 16},
    "SqueezeBert": TEXT | {"embedding_size": 16},
    "XLNet": {"vocab_size": 50, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32},
    "Longformer": TEXT | {"attention_window": 4},
}


@pytest.mark.parametrize("family", OWN_ATTENTION)
def test_a_model_that_would_ignore_the_attention_is_refused(family):
    config = getattr(transformers, f"{family}Config")(**OWN_ATTENTION[family])
    with pytest.raises(ValueError, match=f"{family}.* computes its attention itself"):
        transformers.AutoModel.from_config(config, attn_implementation="espformer")
    config = getattr(transformers, f"{family}Config")(**OWN_ATTENTION[family])
    transformers.AutoModel.from_config(config)  # the others are built as always


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_another_attention_after_a_conversion_is_an_error(implementation):
    model = espformer.convert(make("bert"), ESP())
    expected = run("bert", model, MASK)
    model.set_attn_implementation(implementation)
    with pytest.raises(ValueError, match=rf"{implementation}.*espformer\.revert"):
        run("bert", model, MASK)
    model.set_attn_implementation("espformer")
    assert torch.equal(run("bert", model, MASK), expected)
    model.set_attn_implementation(implementation)
    espformer.revert(model)
    torch.testing.assert_close(run("bert", model, MASK), run("bert", make("bert"), MASK))


@torch.no_grad()
def test_a_converted_model_is_not_built_with_softmax(tmp_path):
    model = espformer.convert(make("bert"), ESP())
    expected = run("bert", model, MASK)
    model.save_pretrained(tmp_path)
    with pytest.raises(OSError, match="nowhere"):  # an error does not end the refusals
        integration.load_pretrained(transformers.AutoModel, str(tmp_path / "nowhere"))
    for kind in (transformers.AutoModel, transformers.AutoModelForSequenceClassification):
        for options in ({}, {"attn_implementation": "sdpa"}, {"attn_implementation": "espformer"}):
            with pytest.raises(ValueError, match=r"softmax\..*load_pretrained.*revert"):
                kind.from_pretrained(tmp_path, **options)
        with pytest.raises(ValueError, match=r"copy\.deepcopy"):
            kind.from_config(model.config)
        loaded = integration.load_pretrained(kind, str(tmp_path)).eval()
        assert torch.equal(run("bert", getattr(loaded, "bert", loaded), MASK), expected)
    assert torch.equal(run("bert", copy.deepcopy(model), MASK), expected)

    original = espformer.revert(model)
    transformers.AutoModel.from_config(original.config)
    original.save_pretrained(tmp_path / "original")
    again = transformers.AutoModel.from_pretrained(tmp_path / "original").eval()
    assert torch.equal(run("bert", again, MASK), run("bert", original, MASK))


@torch.no_grad()
def test_the_mechanism_of_a_configuration_is_not_forgotten(tmp_path):
    model = make("bert")
    model.config.espformer = {"name": "Sinkhorn", "iterations": 5}
    model.set_attn_implementation("espformer")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match='attn_implementation="espformer"'):
        transformers.AutoModel.from_pretrained(tmp_path)
    for kind in (transformers.AutoModel, transformers.AutoModelForSequenceClassification):
        again = kind.from_pretrained(tmp_path, attn_implementation="espformer").eval()
        bare = getattr(again, "bert", again)
        assert torch.equal(run("bert", bare, MASK), run("bert", model, MASK))
    transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="sdpa")  # said aloud


@torch.no_grad()
def test_a_bias_on_scores_is_not_padding():
    model = espformer.convert(make("bert"), ESP())
    ids = torch.randint(3, 50, (3, 7))
    expected = model(ids, attention_mask=MASK.long())[0]
    for least in (-torch.inf, torch.finfo(torch.float32).min, -1e9, -1e4):
        mask = torch.zeros(3, 1, 1, 7).masked_fill(~MASK[:, None, None], least)
        assert torch.equal(model(ids, attention_mask=mask)[0][MASK], expected[MASK])
    for bias in (-1.5, -20.0, -9990.0, 0.5, torch.nan):
        mask = torch.zeros(3, 1, 1, 7).masked_fill(~MASK[:, None, None], bias)
        with pytest.raises(ValueError, match="numbers other than 0"):
            model(ids, attention_mask=mask)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traced_calls_are_checked_and_decided_like_others():
    layer = nn.MultiheadAttention(8, 2, batch_first=True).requires_grad_(False)
    espformer.convert(layer, ESP(backend="dense"))
    x, padding = torch.randn(2, 5, 8), torch.zeros(2, 5)

    def attend(x, padding):
        return layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]

    padding[:, 4] = -1.5
    with pytest.raises(ValueError, match="holds numbers other than 0 and -inf"):
        torch.jit.trace(attend, (x, padding), check_trace=False)
    padding[:, 4] = -torch.inf
    traced = torch.jit.trace(attend, (x, padding), check_trace=False)
    torch.testing.assert_close(traced(x, padding), attend(x, padding))

    def attend_copies(x, padding):  # self-attention, as their values say
        return layer(x + 1, x + 1, x, key_padding_mask=padding, need_weights=False)[0]

    traced = torch.jit.trace(attend_copies, (x, padding), check_trace=False)
    torch.testing.assert_close(traced(x, padding), attend_copies(x, padding))


def test_finite_padding_in_torch_nn():
    module = espformer.convert(nn.MultiheadAttention(12, 3, batch_first=True), ESP())
    x = torch.randn(3, 7, 12)
    expected = module(x, x, x, key_padding_mask=~MASK)[0]
    for least in (-torch.inf, torch.finfo(torch.float32).min, -1e9):
        mask = torch.zeros(3, 7).masked_fill(~MASK, least)
        for _ in range(2):
            assert torch.equal(module(x, x, x, key_padding_mask=mask)[0], expected)
        for bias in (-0.5, -20.0):
            mask[0, 0] = bias  # looked at again, since it was changed
            with pytest.raises(ValueError, match="numbers other than 0"):
                module(x, x, x, key_padding_mask=mask)


@torch.no_grad()
def test_matrices_of_models_that_do_not_ask_their_attention_for_them():
    yolos = transformers.YolosConfig(
        **IMAGE | {"image_size": [16, 16]},
        num_detection_tokens=3,
        use_mid_position_embeddings=False,
    )
    images = {"pixel_values": torch.randn(2, 3, 16, 16)}
    for model in (siglip().vision_model, transformers.YolosModel(yolos)):
        espformer.convert(model.eval(), ESP(hard=True))
        shown = model(**images, output_attentions=True).attentions
        assert len(shown) == 2
        for matrix in shown:
            sums = matrix.sum(-2)
            torch.testing.assert_close(sums, torch.ones_like(sums))
        assert not model(**images).get("attentions")


@torch.no_grad()
def test_by_configuration_alone_directions_are_the_same_in_every_model():
    """Heads of width 16, more than ESP has slices: it draws directions, which nothing saves."""
    config = transformers.BertConfig(**TEXT | {"hidden_size": 32})
    found = []
    for seed in (0, 1):
        torch.manual_seed(3)
        config.espformer = {"name": "ESP"}
        model = transformers.AutoModel.from_config(config, attn_implementation="espformer").eval()
        torch.manual_seed(seed)
        found.append(model(torch.arange(3, 15).view(2, 6))[0])
    assert torch.equal(*found)
