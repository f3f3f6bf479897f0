"""Parts of models, and models whose parts differ: BART's halves, CLIP's towers, DETR's decoder."""

import copy
import pickle

import pytest
import torch
from torch import nn

import espformer
from espformer.integrations import conversion_report
from espformer.nn import ESP, Sinkhorn, Softmax
from tests.integrations.families import MASK, make, run

transformers = pytest.importorskip("transformers")
integration = pytest.importorskip("espformer.integrations.pretrained")


@torch.no_grad()
def test_part_of_a_model_is_converted():
    """The decoder shares the encoder's configuration, and keeps its attention."""
    expected = run("bart", espformer.convert(make("bart"), ESP(), where="encoder"), MASK)
    model = make("bart")
    espformer.convert(model.encoder, ESP())
    torch.testing.assert_close(run("bart", model, MASK), expected)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(run("bart", other, MASK), expected)
    espformer.revert(model.encoder)
    assert torch.equal(run("bart", model, MASK), run("bart", make("bart"), MASK))
    assert model.config._attn_implementation == make("bart").config._attn_implementation


@pytest.mark.parametrize("order", ["encoder-first", "whole-first"])
@torch.no_grad()
def test_parts_are_saved_and_loaded(order, tmp_path):
    """Two halves with mechanisms of their own, whose layers have the same names."""
    model = make("bart")
    if order == "whole-first":
        espformer.convert(model, Sinkhorn(7), cross=True)
    espformer.convert(model.encoder, ESP(sort_temperature=0.2, learn_temperature=True))
    espformer.convert(model.decoder, Sinkhorn(4), cross=True, where="*encoder_attn")
    for layer in model.encoder.layers:
        layer.self_attn.mechanism.log_sort_temperature.normal_(-1.0)
    expected = run("bart", model, MASK)
    model.save_pretrained(tmp_path)
    loaded = integration.load_pretrained(transformers.AutoModel, str(tmp_path)).eval()
    assert torch.equal(run("bart", loaded, MASK), expected)
    kinds = [
        type(getattr(loaded.get_submodule(name), "mechanism", None)).__name__
        for name in (
            "encoder.layers.1.self_attn",
            "decoder.layers.1.self_attn",
            "decoder.layers.1.encoder_attn",
        )
    ]
    assert kinds == ["ESP", "NoneType", "Sinkhorn"]


@torch.no_grad()
def test_what_was_reverted_is_not_saved(tmp_path):
    model = espformer.convert(make("bart"), ESP(), cross=True)
    espformer.revert(model.encoder)
    model.save_pretrained(tmp_path)
    loaded = integration.load_pretrained(transformers.AutoModel, str(tmp_path)).eval()
    assert torch.equal(run("bart", loaded, MASK), run("bart", model, MASK))
    assert not hasattr(loaded.encoder.layers[0].self_attn, "mechanism")


@torch.no_grad()
def test_an_encoder_alone_is_loaded_into_itself_only(tmp_path):
    model = make("bart")
    espformer.convert(model.encoder, ESP(sort_temperature=0.3))
    model.encoder.save_pretrained(tmp_path)
    ids = torch.randint(3, 50, (2, 6))
    kind = type(model.encoder)
    loaded = integration.load_pretrained(kind, str(tmp_path)).eval()
    assert torch.equal(loaded(ids)[0], model.encoder(ids)[0])


def clip() -> nn.Module:
    sizes = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "projection_dim": 8,
    }  # fmt: skip
    config = transformers.CLIPConfig(
        text_config=sizes | {"vocab_size": 50, "max_position_embeddings": 20},
        vision_config=sizes | {"image_size": 16, "patch_size": 4},
        projection_dim=8,
    )
    torch.manual_seed(0)
    return transformers.CLIPModel(config).eval()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_the_causal_tower_of_clip_is_left(implementation):
    model = clip()
    model.set_attn_implementation(implementation)
    inputs = {
        "input_ids": torch.randint(3, 49, (2, 7)),
        "pixel_values": torch.randn(2, 3, 16, 16),
        "attention_mask": torch.ones(2, 7, dtype=torch.long),
    }
    before = model(**inputs)
    espformer.convert(model, Softmax())
    report = conversion_report(model)
    assert len(report.converted) == len(report.left) == 2
    assert all(name.startswith("vision_model") for name in report.converted)
    assert all("identity" in row.reason for row in report.rows if row.action == "left")
    after = model(**inputs)
    torch.testing.assert_close(after.logits_per_image, before.logits_per_image)
    assert torch.equal(after.text_embeds, before.text_embeds)
    espformer.convert(model, ESP())
    changed = model(**inputs)
    assert not torch.allclose(changed.image_embeds, before.image_embeds)
    assert torch.equal(changed.text_embeds, before.text_embeds)
    with pytest.raises(ValueError, match=r"identity"):
        espformer.convert(clip().text_model, ESP())


def detr(decoder_heads: int = 4) -> nn.Module:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], out_features=["stage2"],
        layer_type="basic",
    )  # fmt: skip
    config = transformers.DetrConfig(
        use_timm_backbone=False, backbone=None, backbone_config=backbone, d_model=16,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=decoder_heads, encoder_ffn_dim=32, decoder_ffn_dim=32,
        num_queries=5, dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.DetrModel(config).eval()


@torch.no_grad()
def test_the_decoder_of_detr_sees_all_queries_at_once():
    model = detr()
    images = torch.randn(2, 3, 32, 32)
    pixels = torch.ones(2, 32, 32, dtype=torch.long)
    pixels[1, :, 16:] = 0  # the second picture is narrower: padding
    before = model(images, pixel_mask=pixels)[0]
    espformer.convert(model, Softmax(), cross=True)
    rows = {row.module: row for row in conversion_report(model).rows}
    assert [row.action for row in rows.values()] == ["converted"] * 3
    assert {name: row.heads for name, row in rows.items()} == {
        "encoder.layers.0.self_attn": 2,
        "decoder.layers.0.self_attn": 4,
        "decoder.layers.0.encoder_attn": 4,
    }
    torch.testing.assert_close(model(images, pixel_mask=pixels)[0], before, atol=1e-5, rtol=1e-5)
    espformer.convert(model, ESP())
    assert conversion_report(model).left == ["decoder.layers.0.encoder_attn"]
    after = model(images, pixel_mask=pixels)[0]
    assert after.isfinite().all()
    assert not torch.allclose(after, before)


@torch.no_grad()
def test_torch_decoders_without_a_causal_mask():
    """As in DETR: queries are a set, and torch's layer cannot know."""
    layer = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerDecoder(layer, 2).eval()
    queries, memory = torch.randn(3, 5, 16), torch.randn(3, 7, 16)
    before = model(queries, memory, memory_key_padding_mask=~MASK)
    with pytest.raises(ValueError, match="causal=False"):
        espformer.convert(model, Softmax())
    espformer.convert(model, Softmax(), cross=True, causal=False)
    assert len(conversion_report(model).converted) == 4
    after = model(queries, memory, memory_key_padding_mask=~MASK)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)
    espformer.convert(model, ESP(), causal=False)
    model(queries, memory)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    with pytest.raises(ValueError, match="identity"):
        model(queries, memory, tgt_mask=causal)


def test_cross_attention_of_other_decoders_is_known_by_its_name():
    class DecoderLayer(nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attn = nn.MultiheadAttention(8, 2)
            self.multihead_attn = nn.MultiheadAttention(8, 2)

    model = espformer.convert(DecoderLayer(), ESP())
    assert conversion_report(model).converted == ["self_attn"]
    assert conversion_report(model).left == ["multihead_attn"]
