"""Every mechanism against one contract: matrix, masks, equivariance, dtypes, compilation."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from espformer import functional
from espformer.nn import (
    ESP,
    Attention,
    Differential,
    FrozenSlicer,
    Mechanism,
    Sinkhorn,
    Softmax,
)

HEADS, WIDTH = 4, 6

MECHANISMS = {
    "softmax": lambda: Softmax(),
    "sinkhorn3": lambda: Sinkhorn(3),
    "sinkhorn4": lambda: Sinkhorn(4, epsilon=0.3),
    "esp": lambda: ESP(),
    "esp-squared-balanced": lambda: ESP(1e-2, metric="squared", balance="both"),
    "esp-hard": lambda: ESP(hard=True, ties="average", inverse_temperature=0.1),
    "esp-straight-through": lambda: ESP(straight_through=0.3),
    "esp-learnt": lambda: ESP(learn_temperature=True, slicer="learnable", slices=3),
    "esp-frozen": lambda: ESP(slicer="frozen", slices=5, inverse_temperature=0.0),
    "differential-softmax": lambda: Differential(Softmax()),
    "differential-esp": lambda: Differential(ESP(learn_temperature=True), lambda_init=0.3),
}
PLAIN = [name for name in MECHANISMS if not name.startswith("differential")]


def make(name: str, dtype: torch.dtype = torch.float64) -> Mechanism:
    torch.manual_seed(0)
    mechanism = MECHANISMS[name]().bind(HEADS, WIDTH).to(dtype)
    with torch.no_grad():  # no parameter at a value that makes it invisible
        for parameter in mechanism.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return mechanism.eval()


def draw(*sizes: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, HEADS, n, WIDTH) for n in sizes]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(("n", "m"), [(7, 7), (5, 8)])
def test_matrix_times_value_is_the_output(name, n, m):
    mechanism = make(name)
    q, k, v = draw(n, m, m)
    masks = {
        "query_mask": torch.arange(n) < torch.tensor([[n], [2], [3]]),
        "key_mask": torch.arange(m) < torch.tensor([[m], [4], [1]]),
    }
    for options in ({}, masks):
        matrix = mechanism.matrix(q, k, **options)
        assert matrix.shape == (3, HEADS, n, m)
        torch.testing.assert_close(matrix @ v, mechanism(q, k, v, **options), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("padding_value", [1e3, math.nan])
def test_padded_batch_is_each_sequence_alone(name, padding_value):
    mechanism = make(name)
    lengths = [7, 4, 1]
    q, k, v = draw(7, 7, 7)
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    padded = [
        x.masked_fill(~mask[:, None, :, None], padding_value).requires_grad_() for x in (q, k, v)
    ]
    out = mechanism(*padded, query_mask=mask, key_mask=mask)
    out.square().sum().backward()
    for b, n in enumerate(lengths):
        leaves = [x[b : b + 1, :, :n].clone().requires_grad_() for x in (q, k, v)]
        alone = mechanism(*leaves)
        torch.testing.assert_close(out[b : b + 1, :, :n], alone, rtol=1e-7, atol=1e-9)
        assert (out[b, :, n:] == 0).all()
        wanted = torch.autograd.grad(
            alone.square().sum(), leaves, allow_unused=True, materialize_grads=True
        )
        for x, want in zip(padded, wanted, strict=True):
            grad = torch.zeros_like(x) if x.grad is None else x.grad
            torch.testing.assert_close(grad[b : b + 1, :, :n], want, rtol=1e-6, atol=1e-8)
            assert (grad[b, :, n:] == 0).all()


@pytest.mark.parametrize("name", MECHANISMS)
def test_padded_cross_attention_is_each_pair_alone(name):
    mechanism = make(name)
    lengths = [(5, 8), (3, 2), (5, 1)]
    q, k, v = draw(5, 8, 8)
    out = mechanism(
        q,
        k,
        v,
        query_mask=torch.arange(5) < torch.tensor([n for n, _ in lengths])[:, None],
        key_mask=torch.arange(8) < torch.tensor([m for _, m in lengths])[:, None],
    )
    for b, (n, m) in enumerate(lengths):
        one = slice(b, b + 1)
        alone = mechanism(q[one, :, :n], k[one, :, :m], v[one, :, :m])
        torch.testing.assert_close(out[one, :, :n], alone, rtol=1e-7, atol=1e-9)
        assert (out[b, :, n:] == 0).all()


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_sequence_without_tokens_gives_zeros(name):
    mechanism = make(name)
    q, k, v = (x.requires_grad_() for x in draw(4, 4, 4))
    mask = torch.tensor([True, False, True])[:, None].expand(3, 4)
    out = mechanism(q, k, v, query_mask=mask, key_mask=mask)
    assert (out[1] == 0).all()
    others = mechanism(*(x[[0, 2]] for x in (q, k, v)))
    torch.testing.assert_close(out[[0, 2]], others)
    found, wanted = (
        torch.autograd.grad(y.square().sum(), (q, k, v), allow_unused=True, materialize_grads=True)
        for y in (out, others)
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", MECHANISMS)
def test_permutation_equivariance(name):
    mechanism = make(name)
    q, k, v = draw(7, 7, 7)
    queries, keys = torch.randperm(7), torch.randperm(7)
    expected = mechanism(q, k, v)
    got = mechanism(q[:, :, queries], k[:, :, keys], v[:, :, keys])
    torch.testing.assert_close(got, expected[:, :, queries], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", MECHANISMS)
def test_autocast_to_bfloat16(name):
    mechanism = make(name, torch.float32)
    q, k, v = (x.bfloat16() for x in draw(9, 9, 9))
    expected = mechanism(q.float(), k.float(), v.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = mechanism(q, k, v)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_parameter_gets_a_gradient(name):
    mechanism = make(name).train()
    q, k, v = (x.requires_grad_() for x in draw(7, 7, 7))
    mechanism(q, k, v).square().sum().backward()
    for parameter_name, parameter in mechanism.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert (parameter.grad != 0).all(), parameter_name
    assert all(x.grad.abs().sum() > 0 for x in (q, k, v))


class NoWaiting(TorchDispatchMode):
    """Refuses the operators that make the host wait for a device: their results depend on data."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in (
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.nonzero,
            torch.ops.aten.equal,
            torch.ops.aten.masked_select,
        ), f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["softmax", "sinkhorn3", "sinkhorn4", "esp", "esp-hard"])
def test_the_host_never_waits(name):
    mechanism = make(name)
    q, k, v = (x.requires_grad_() for x in draw(6, 6, 6))
    mask = torch.arange(6) < torch.tensor([6, 3, 2])[:, None]
    with NoWaiting():
        mechanism(q, k, v, query_mask=mask, key_mask=mask).sum().backward()
    with NoWaiting(), pytest.raises(AssertionError, match="waits for the device"):
        q.sum().item()


@pytest.mark.parametrize("name", ["softmax", "sinkhorn3", "esp", "differential-esp"])
def test_compiles_without_graph_breaks(name):
    torch._dynamo.reset()
    mechanism = make(name)
    q, k, v = draw(6, 6, 6)
    mask = torch.arange(6) < torch.tensor([6, 3, 2])[:, None]
    compiled = torch.compile(mechanism, backend="eager", fullgraph=True)
    for options in ({}, {"query_mask": mask, "key_mask": mask}):
        torch.testing.assert_close(compiled(q, k, v, **options), mechanism(q, k, v, **options))


@pytest.mark.parametrize(
    ("mechanism", "expected"),
    [
        (Softmax(), lambda heads, width: 0),
        (Sinkhorn(), lambda heads, width: 0),
        (ESP(), lambda heads, width: 0),
        (ESP(learn_temperature=True), lambda heads, width: heads),
        (ESP(slicer="frozen"), lambda heads, width: 0),
        (ESP(slicer="learnable"), lambda heads, width: heads * width * width),
        (ESP(slicer="learnable", slices=3), lambda heads, width: heads * 3 * width),
        (ESP(slicer=FrozenSlicer(3, 8)), lambda heads, width: 0),
        (Differential(Softmax()), lambda heads, width: 6 * width),
        (Differential(ESP(learn_temperature=True)), lambda heads, width: 6 * width + heads),
    ],
)
@pytest.mark.parametrize("heads", [2, 6])
def test_parameters_that_a_mechanism_adds(mechanism, expected, heads):
    generator = torch.get_rng_state()
    assert mechanism.extra_parameters(heads, 8) == expected(heads, 8)
    assert torch.equal(generator, torch.get_rng_state())
    bound = mechanism.bind(heads, 8)
    assert sum(p.numel() for p in bound.parameters()) == expected(heads, 8)
    assert not any(p.is_meta for p in bound.parameters())


def test_a_description_is_not_shared():
    spec = Differential(ESP(learn_temperature=True, slicer="learnable"))
    first, second = spec.bind(4, 6), spec.bind(4, 6)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert a is not b
        assert a.data_ptr() != b.data_ptr()
    first.base.sort_temperature = 1e-5
    first.base.hard = True
    assert spec.base.sort_temperature == 0.3
    assert not second.base.hard
    assert spec.heads is None
    assert not list(spec.parameters())


@pytest.mark.parametrize("name", MECHANISMS)
def test_weights_do_not_depend_on_the_mechanism(name):
    def layers(mechanism: Mechanism) -> torch.nn.ModuleList:
        torch.manual_seed(3)
        return torch.nn.ModuleList(Attention(24, 4, mechanism=mechanism) for _ in range(2))

    plain, other = layers(Softmax()).state_dict(), layers(MECHANISMS[name]()).state_dict()
    assert all(torch.equal(tensor, other[key]) for key, tensor in plain.items())


def test_bound_again_for_other_sizes():
    bound = ESP(learn_temperature=True, slicer="learnable").bind(2, 6).bind(4, 8)
    assert bound.log_sort_temperature.shape == (4,)
    assert bound.slicer().shape == (4, 8, 8)


@pytest.mark.parametrize(
    "mechanism", [ESP(learn_temperature=True), ESP(slicer="frozen"), Differential(Softmax())]
)
def test_unbound_says_what_to_do(mechanism):
    q, k, v = draw(3, 3, 3)
    with pytest.raises(RuntimeError, match=r"sizes are not known yet.*\.bind\(heads, head_dim\)"):
        mechanism(q, k, v)
    with pytest.raises(RuntimeError, match=r"sizes are not known yet"):
        mechanism.matrix(q, k)


def test_wrong_sizes_are_named():
    q, k, v = draw(3, 3, 3)
    with pytest.raises(ValueError, match=r"ESP: bound to 2 heads of width 6.*has 4 of 6"):
        ESP().bind(2, 6)(q, k, v)
    for mechanism in (ESP(), Differential(ESP())):
        with pytest.raises(ValueError, match=r"at least \(heads, tokens, head_dim\), got \(3, 6\)"):
            mechanism.bind(1, 6)(q[0, 0], k[0, 0], v[0, 0])
    with pytest.raises(ValueError, match=r"bind: heads and head_dim must be at least 1, got 0"):
        ESP().bind(0, 6)


def test_dropout_of_softmax_is_for_training():
    q, k, v = draw(5, 5, 5)
    mechanism = Softmax(dropout=0.5)
    expected = functional.softmax_attention(q, k, v)
    assert not torch.allclose(mechanism.train()(q, k, v), expected)
    torch.testing.assert_close(mechanism.eval()(q, k, v), expected)


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: Softmax(dropout=1.0), r"Softmax: dropout must be in \[0, 1\), got 1\.0"),
        (lambda: Sinkhorn(-1), r"Sinkhorn: iterations must be an integer >= 0, got -1"),
        (lambda: Sinkhorn(2.5), r"Sinkhorn: iterations must be an integer >= 0, got 2.5"),
        (lambda: Sinkhorn(epsilon=0), r"Sinkhorn: epsilon must be > 0, got 0"),
    ],
)
def test_mistakes_are_named(make_it, message):
    with pytest.raises(ValueError, match=message):
        make_it()
