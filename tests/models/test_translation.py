"""Translation: against torch's own layers, step by step, and what a decoder may not do."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from espformer.models import (
    CausalSoftmax,
    DecoderBlock,
    TranslationTransformer,
    beam_search,
    record_attention,
)
from espformer.nn import ESP, Differential, Sinkhorn, Softmax
from tests.models.cases import MECHANISMS, count_parameters

PAD, START, END = 0, 2, 3


def make(mechanism="softmax", **options):
    torch.manual_seed(0)
    sizes = {"vocabulary": 13, "target_vocabulary": 11, "dim": 16, "heads": 2, "mlp_dim": 24}
    sizes |= {"encoder_depth": 2, "decoder_depth": 2, "dropout": 0.0, "max_length": 40}
    model = TranslationTransformer(mechanism=MECHANISMS[mechanism](), **{**sizes, **options})
    with torch.no_grad():
        for parameter in model.parameters():  # far enough from the start to prefer some words
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def draw(batch=3, source=7, target=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(4, 13, (batch, source), generator=generator)
    target = torch.randint(4, 11, (batch, target), generator=generator)
    target[:, 0] = START
    return source, target


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_learns_to_copy_a_few_sentences(mechanism):
    model = make(mechanism)
    source, target = draw()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        logits = model(source, target[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("mechanism", [m for m in MECHANISMS if m != "esp-hard"])
def test_gradients_reach_every_parameter(mechanism):
    model = make(mechanism, decoder_mechanism=Differential(CausalSoftmax()))
    model(*draw()).square().sum().backward()
    for label, parameter in model.named_parameters():
        assert parameter.grad is not None, label
        assert parameter.grad.isfinite().all(), label
        if parameter.ndim > 1:
            assert parameter.grad.abs().max() > 1e-9, label


def torch_decoder_layer(block, heads):
    layer = nn.TransformerDecoderLayer(
        block.self_attn.dim, heads, block.mlp.fc1.out_features, dropout=0.0, batch_first=True
    )
    layer.self_attn.in_proj_weight = block.self_attn.qkv.weight
    layer.self_attn.in_proj_bias = block.self_attn.qkv.bias
    layer.self_attn.out_proj = block.self_attn.proj
    cross = block.cross_attn
    layer.multihead_attn.in_proj_weight = nn.Parameter(torch.cat([cross.q.weight, cross.kv.weight]))
    layer.multihead_attn.in_proj_bias = nn.Parameter(torch.cat([cross.q.bias, cross.kv.bias]))
    layer.multihead_attn.out_proj = cross.proj
    layer.linear1, layer.linear2 = block.mlp.fc1, block.mlp.fc2
    layer.norm1, layer.norm2, layer.norm3 = block.norm1, block.norm2, block.norm3
    return layer


@pytest.mark.parametrize("source", [5, 7])
def test_decoder_against_the_layers_of_torch(source):
    model = make()
    source, target = draw(source=source)
    source[1, 3:] = PAD
    present = source != PAD
    memory = model.encode(source)
    x = model.target_embedding(target) * 16**0.5 + model.positions[:5]
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    for block in model.decoder:
        x = torch_decoder_layer(block, 2)(
            x, memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=~present
        )
    expected = x @ model.target_embedding.weight.T
    torch.testing.assert_close(model(source, target), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_changes_nothing(mechanism, side):
    model = make(mechanism).eval()
    source, target = draw()
    source[:, -1] = END
    padded = source.clone()
    padded[1] = PAD
    where = slice(None, 4) if side == "right" else slice(3, None)
    padded[1, where] = source[1, :4]
    alone = source[1:2, :4], target[1:2]
    torch.testing.assert_close(model(padded, target)[1:2], model(*alone), rtol=1e-4, atol=1e-4)
    # Targets are padded at their end, where no position before it looks.
    longer = torch.cat([target, torch.full_like(target, PAD)], dim=1)
    torch.testing.assert_close(
        model(source, longer)[:, :5], model(source, target), rtol=1e-4, atol=1e-4
    )
    together = model.translate(padded, beam=3)
    single = model.translate(alone[0], beam=3)[0]
    assert together[1, : len(single)].tolist() == single.tolist()
    assert (together[1, len(single) :] == PAD).all()


def greedy(model, source, limit):
    """Word by word, without a cache: the whole prefix goes through the model every time."""
    tokens = torch.full((len(source), 1), START)
    open_ = torch.ones(len(source), dtype=torch.bool)
    for length in range(1, limit + 1):
        logits = model(source, tokens)[:, -1]
        logits[:, PAD] = -torch.inf
        if length == 1:
            logits[:, END] = -torch.inf
        token = logits.argmax(-1)
        if length == limit:
            token[:] = END
        token[~open_] = PAD
        open_ &= token != END
        tokens = torch.cat([tokens, token[:, None]], dim=1)
        if not open_.any():
            break
    return tokens[:, 1:]


VARIANTS = {
    "softmax": {},
    "esp": {"mechanism": "esp"},
    "differential": {
        "mechanism": "differential-softmax",
        "decoder_mechanism": Differential(CausalSoftmax()),
        "cross_mechanism": Differential(Softmax(), lambda_init="depth"),
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_a_beam_of_one_is_greedy(variant):
    model = make(**VARIANTS[variant]).eval()
    source, _ = draw(batch=5)
    source[2, 5:] = PAD
    expected = greedy(model, source, limit=12)
    assert torch.equal(model.translate(source, beam=1, max_length=12), expected)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_a_wide_beam_is_exhaustive(variant):
    model = make(target_vocabulary=7, **VARIANTS[variant]).eval()
    source, _ = draw(batch=2)
    source[1, 4:] = PAD
    # The start token and the unknown one are words like any other to a search.
    words = [token for token in range(7) if token not in (PAD, END)]
    texts = [(a, END) for a in words] + [(a, b, END) for a in words for b in words]
    best = []
    for index in range(2):
        scores = []
        for text in texts:
            given = torch.tensor([[START, *text[:-1]]])
            logits = model(source[index : index + 1], given).log_softmax(-1)[0]
            chosen = logits.gather(-1, torch.tensor(text).unsqueeze(-1))
            scores.append(chosen.sum().item() / len(text) ** 0.8)
        best.append(texts[max(range(len(texts)), key=lambda i: scores[i])])
    found = model.translate(source, beam=60, length_penalty=0.8, max_length=3)
    assert [tuple(token for token in row if token != PAD) for row in found.tolist()] == best


class WholePrefixes:
    """What a beam search asks for, without a cache; counts how often hypotheses changed place."""

    def __init__(self, model, source, beam):
        self.model, self.source = model, source.repeat_interleave(beam, dim=0)
        self.prefixes = torch.empty(len(source), beam, 0, dtype=torch.long)
        self.moves = 0

    def advance(self, last, parents):
        if parents is not None:
            self.moves += int((parents != torch.arange(parents.shape[1])).sum())
            index = parents.unsqueeze(-1).expand_as(self.prefixes)
            self.prefixes = self.prefixes.gather(1, index)
        self.prefixes = torch.cat([self.prefixes, last.unsqueeze(-1)], dim=-1)
        logits = self.model(self.source, self.prefixes.flatten(0, 1))[:, -1]
        return logits.log_softmax(-1).view(*last.shape, -1)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_a_beam_with_a_cache_is_one_without(variant):
    model = make(**VARIANTS[variant]).eval()
    source, _ = draw(batch=5)
    source[2, 5:] = PAD
    uncached = WholePrefixes(model, source, beam=4)
    expected, _ = beam_search(
        uncached.advance, torch.full((5,), 12), beam=4, start_id=START, end_id=END, pad_id=PAD
    )
    assert uncached.moves > 50
    assert torch.equal(model.translate(source, beam=4, max_length=12), expected)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_one_position_at_a_time_is_all_at_once(variant):
    model = make(**VARIANTS[variant]).eval()
    source, target = draw()
    source[1, 4:] = PAD
    memory, mask = model.encode(source), source != PAD
    whole = x = model.target_embedding(target)
    states = [block.start(memory) for block in model.decoder]
    for block in model.decoder:
        whole = block(whole, memory, mask)
    steps = []
    for part in (x[:, :1], x[:, 1:3], x[:, 3:]):  # one, and several
        for block, state in zip(model.decoder, states, strict=True):
            part = block.step(part, state, mask)
        steps.append(part)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-4, atol=1e-5)


def test_translate_keeps_the_mode_and_draws_no_dropout():
    model = make(dropout=0.5)
    source, _ = draw()
    model.decoder[0].norm1.eval()
    assert torch.equal(model.translate(source), model.translate(source))
    assert model.training
    assert not model.decoder[0].norm1.training


def test_the_limit_follows_each_source():
    model = make().eval()
    with torch.no_grad():  # never ends by itself
        model.target_embedding.weight[END] = 0
        model.target_embedding.weight[5] = 3 * model.target_embedding.weight[6]
        model.decoder[-1].norm3.weight.zero_()
        model.decoder[-1].norm3.bias.copy_(model.target_embedding.weight[5])
    source, _ = draw(batch=2, source=10)
    source[1, 5:] = PAD
    lengths = (model.translate(source) != PAD).sum(1)
    assert lengths.tolist() == [12 + 10, 6 + 10]
    assert model.translate(source, max_length=4).shape == (2, 4)
    assert model.translate(source, max_length=100).shape == (2, 40)  # as long as the model


def test_decoders_refuse_to_look_ahead():
    for mechanism in (ESP(), ESP(hard=True), Sinkhorn(5), Differential(ESP())):
        with pytest.raises(ValueError, match=r"cross_mechanism=.* would see later"):
            DecoderBlock(16, 2, mlp_dim=8, cross_mechanism=mechanism)
        with pytest.raises(ValueError, match=r"decoder_mechanism=.* would see later"):
            DecoderBlock(16, 2, mlp_dim=8, decoder_mechanism=mechanism)
    with pytest.raises(ValueError, match="decoder_mechanism=Softmax a position would see later"):
        DecoderBlock(16, 2, mlp_dim=8, decoder_mechanism=Softmax())
    DecoderBlock(16, 2, mlp_dim=8, cross_mechanism=Softmax(dropout=0.5))


def test_that_check_draws_no_random_numbers(monkeypatch):
    weights = []
    for checked in (True, False):
        if not checked:
            monkeypatch.setattr("espformer.models.decoder._refuse_looking_ahead", lambda *_: None)
        torch.manual_seed(1)
        block = DecoderBlock(16, 2, mlp_dim=8, cross_mechanism=Softmax(dropout=0.5))
        weights.append([*block.parameters(), torch.rand(3)])
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_causal_softmax():
    q, k, v = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64).unbind()
    mechanism = CausalSoftmax()
    matrix = mechanism.matrix(q, k)
    assert torch.equal(matrix, matrix.tril())
    torch.testing.assert_close(matrix @ v, mechanism(q, k, v))
    for n in (1, 3):
        torch.testing.assert_close(mechanism.matrix(q[:, :, -n:], k), matrix[:, :, -n:])
        torch.testing.assert_close(mechanism(q[:, :, -n:], k, v), (matrix @ v)[:, :, -n:])
    with pytest.raises(ValueError, match="pad targets at their end"):
        mechanism(q, k, v, key_mask=torch.ones(2, 6, dtype=torch.bool))


def test_size_of_fairseq():
    """transformer_iwslt_de_en with the dictionaries of its example: 39,469,056 parameters."""
    dim, hidden, source, target = 512, 1024, 8848, 6632
    attention = 4 * (dim + 1) * dim
    feed_forward = (dim + 1) * hidden + (hidden + 1) * dim
    encoder = 6 * (attention + feed_forward + 2 * 2 * dim)
    decoder = 6 * (2 * attention + feed_forward + 3 * 2 * dim)
    expected = (source + target) * dim + encoder + decoder
    with torch.device("meta"):
        model = TranslationTransformer(vocabulary=source, target_vocabulary=target)
        counts = {
            name: count_parameters(
                TranslationTransformer(
                    vocabulary=source, target_vocabulary=target, mechanism=mechanism
                )
            )
            for name, mechanism in (
                ("softmax", Softmax()),
                ("sinkhorn", Sinkhorn()),
                ("differential", Differential(Softmax())),
            )
        }
    assert count_parameters(model) == expected == 39_469_056
    assert counts["softmax"] == counts["sinkhorn"] == expected
    assert counts["differential"] == expected + 6 * 6 * 128


def test_first_weights_are_those_of_fairseq():
    torch.manual_seed(0)
    model = TranslationTransformer(vocabulary=50, encoder_depth=1, decoder_depth=1)
    dim = 512
    block = model.decoder[0]
    for linear in (model.encoder[0].attn.qkv, block.cross_attn.q, block.cross_attn.kv):
        assert linear.weight.std().item() == pytest.approx((2 * dim) ** -0.5, rel=0.02)
        assert (linear.bias == 0).all()
    assert block.self_attn.proj.weight.std().item() == pytest.approx(dim**-0.5, rel=0.02)
    embedding = model.target_embedding.weight
    assert embedding[1:].std().item() == pytest.approx(dim**-0.5, rel=0.02)
    assert (embedding[PAD] == 0).all()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_state_dict_round_trip(mechanism):
    model = make(mechanism).eval()
    state = copy.deepcopy(model.state_dict())
    other = make(mechanism, max_length=30).eval()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(state)
    assert torch.equal(other(*draw()), model(*draw()))


def test_matrices_can_be_recorded():
    model = make("esp-hard")
    with record_attention(model) as matrices:
        model(*draw())
    shapes = [tuple(matrix.shape) for matrix in matrices]
    assert shapes == 2 * [(3, 2, 7, 7)] + 2 * [(3, 2, 5, 5), (3, 2, 5, 7)]
    torch.testing.assert_close(matrices[0].sum(-2), torch.ones(3, 2, 7))
    assert torch.equal(matrices[2], matrices[2].tril())


def test_longer_than_the_model():
    model = make(max_length=6)
    with pytest.raises(ValueError, match="longer than max_length=6"):
        model(*draw(source=7))
