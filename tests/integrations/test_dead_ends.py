"""Where users got stuck: composite models, refusals for a wrong reason, late errors."""

import pytest
import torch
from torch import nn

import espformer
from espformer.integrations import conversion_report
from espformer.integrations.convert import find_attention
from espformer.nn import ESP
from tests.integrations.test_parts import clip
from tests.integrations.test_silent import IMAGE, TEXT, disturbed, siglip

transformers = pytest.importorskip("transformers")
integration = pytest.importorskip("espformer.integrations.pretrained")


def clip_classifier() -> nn.Module:
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=IMAGE)
    config.num_labels = 3
    return transformers.CLIPForImageClassification(config)


def vision_encoder_decoder() -> nn.Module:
    encoder = transformers.ViTConfig(**IMAGE)
    decoder = transformers.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    return transformers.VisionEncoderDecoderModel(config=config)


def encoder_decoder() -> nn.Module:
    encoder = transformers.BertConfig(**TEXT)
    decoder = transformers.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    return transformers.EncoderDecoderModel(config=config)


IDS, IMAGES = torch.arange(3, 15).view(2, 6), torch.linspace(-1, 1, 1536).view(2, 3, 16, 16).sin()
COMPOSITES = {
    "clip": (clip, {"input_ids": IDS, "pixel_values": IMAGES}),
    "clip-classifier": (clip_classifier, {"pixel_values": IMAGES}),
    "siglip": (siglip, {"input_ids": IDS, "pixel_values": IMAGES}),
    "images-to-text": (vision_encoder_decoder, {"pixel_values": IMAGES, "decoder_input_ids": IDS}),
    "text-to-text": (encoder_decoder, {"input_ids": IDS, "decoder_input_ids": IDS}),
}


@pytest.mark.parametrize("family", COMPOSITES)
@torch.no_grad()
def test_composite_models_are_saved_and_loaded(family, tmp_path):
    """What was converted stands in the configuration of a part."""
    make, inputs = COMPOSITES[family]
    model = disturbed(make())
    softmax = model(**inputs)[0]
    espformer.convert(model, ESP(sort_temperature=0.2, learn_temperature=True))
    for name, parameter in model.named_parameters():
        if name.endswith("log_sort_temperature"):
            parameter.normal_(-1.0)
    expected = model(**inputs)[0]
    assert not torch.allclose(expected, softmax)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="load_pretrained"):
        type(model).from_pretrained(tmp_path)
    loaded = integration.load_pretrained(type(model), str(tmp_path)).eval()
    assert conversion_report(loaded).converted == conversion_report(model).converted
    assert torch.equal(loaded(**inputs)[0], expected)


def reasons(model: nn.Module) -> set[str]:
    return {str(candidate.refusal) for candidate in find_attention(model)}


@pytest.mark.parametrize("family", ["LayoutLM", "Splinter", "MarkupLM", "ClapText"])
@torch.no_grad()
def test_encoders_that_do_not_say_that_they_are_not_causal(family):
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{family}Config")(**TEXT | special)
    kind = getattr(transformers, f"{family}Model")
    model = disturbed(kind(config))
    espformer.convert(model, ESP())
    mask = torch.ones_like(IDS)
    mask[1, 3:] = 0
    padded = model(input_ids=IDS, attention_mask=mask)[0]
    alone = model(input_ids=IDS[1:, :3], attention_mask=mask[1:, :3])[0]
    torch.testing.assert_close(padded[1:, :3], alone, atol=1e-5, rtol=1e-4)
    # What a later token says reaches the first one: it is no causal model.
    changed = IDS.clone()
    changed[:, -1] = 30
    assert not torch.allclose(model(input_ids=changed)[0][:, 0], model(input_ids=IDS)[0][:, 0])


def test_refusals_give_the_true_reason():
    t5 = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    assert all("bias of positions" in reason for reason in reasons(transformers.T5EncoderModel(t5)))
    sizes = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "conv_depthwise_kernel_size": 3,
    }  # fmt: skip
    bert = transformers.Wav2Vec2BertConfig(**sizes, feature_projection_input_dim=16)
    conformer = transformers.Wav2Vec2ConformerConfig(
        **sizes, conv_dim=[16], conv_kernel=[3], conv_stride=[2], num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    for model in (
        transformers.Wav2Vec2BertModel(bert),
        transformers.Wav2Vec2ConformerModel(conformer),
    ):
        assert not any("number of heads" in reason for reason in reasons(model))


def test_what_cannot_run_is_not_called_converted():
    """A bias in the mask of BEiT, and Pixtral's several images in one sequence."""
    for options in (
        {"use_relative_position_bias": True},
        {"use_shared_relative_position_bias": True},
    ):
        beit = transformers.BeitModel(transformers.BeitConfig(**IMAGE, **options))
        assert all("bias of positions" in reason for reason in reasons(beit))
    plain = transformers.BeitModel(transformers.BeitConfig(**IMAGE)).eval()
    espformer.convert(plain, ESP())(IMAGES)
    pixtral = transformers.PixtralVisionModel(transformers.PixtralVisionConfig(**IMAGE))
    assert all("masks (query, key) pairs" in reason for reason in reasons(pixtral))


def test_a_module_that_asks_the_registry_in_vain_is_not_converted():
    """``getattr(ALL_ATTENTION_FUNCTIONS, ...)`` finds nothing there, whatever the name."""
    module = pytest.importorskip("transformers.models.kosmos2_5.modeling_kosmos2_5")
    config = transformers.Kosmos2_5Config().vision_config
    for name, value in {
        "hidden_size": 16, "head_dim": 8, "num_attention_heads": 2, "num_hidden_layers": 1,
        "intermediate_size": 32,
    }.items():  # fmt: skip
        setattr(config, name, value)
    with pytest.raises(ValueError, match="nothing to convert"):
        espformer.convert(module.Kosmos2_5VisionEncoder(config), ESP())


@torch.no_grad()
def test_queries_and_keys_of_esm_are_scaled_alike():
    config = transformers.EsmConfig(
        vocab_size=30, hidden_size=24, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, pad_token_id=1, mask_token_id=2,
    )  # fmt: skip
    model = disturbed(transformers.EsmModel(config))
    attention = model.encoder.layer[0].attention.self
    espformer.convert(model, ESP(scale=None))
    seen = {}

    def look(_module, args, options):
        query, key = args[:2]
        seen["ratio"] = query / attention.query(seen["x"]).view(2, 9, 2, 12).transpose(1, 2)
        seen["key"] = key
        assert options

    attention.register_forward_pre_hook(lambda _m, args: seen.update(x=args[0]))
    attention.mechanism.register_forward_pre_hook(look, with_kwargs=True)
    config.position_embedding_type = "absolute"
    attention.position_embedding_type = "absolute"
    model(torch.randint(3, 30, (2, 9)))
    torch.testing.assert_close(seen["ratio"], torch.ones_like(seen["ratio"]), atol=1e-4, rtol=1e-4)
    assert attention.mechanism.scale is None  # head_dim ** -0.5, for both
