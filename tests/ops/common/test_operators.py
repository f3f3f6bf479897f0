"""Private names of torch: each exists, means what it is taken for, and stands in one file."""

import re
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import espformer
from espformer.ops.common import operators
from espformer.ops.common.operators import (
    autograd_inside_an_operator,
    can_decide_by,
    can_read,
    has_dispatch_modes,
    is_exporting,
    is_transformed,
    tree_leaves,
)

PRIVATE = re.compile(r"\btorch(?:\.\w+)*\.(?:_(?!_)|_C\b)\w*|from torch\.?[\w.]*\b_\w+ import")


class Told(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 2 if is_exporting() else x + 1


def test_compilation_is_no_export() -> None:
    assert not is_exporting()
    compiled = torch.compile(Told(), fullgraph=True, backend="eager")
    assert compiled(torch.zeros(1)) == 1


def test_export_is() -> None:
    for strict in (True, False):
        program = torch.export.export(Told(), (torch.zeros(1),), strict=strict)
        assert program.module()(torch.zeros(1)) == 2


def test_modes_are_seen() -> None:
    assert not has_dispatch_modes()
    with FlopCounterMode(display=False):
        assert has_dispatch_modes()
    assert not has_dispatch_modes()


def test_transforms_are_seen() -> None:
    assert not is_transformed()
    seen = []
    torch.func.vmap(lambda x: seen.append(is_transformed()) or x)(torch.zeros(2))
    assert seen == [True]
    assert hasattr(torch._C, "_are_functorch_transforms_active")


def test_values_that_can_be_read() -> None:
    x, seen = torch.ones(2), []

    def look(*tensors: Tensor) -> Tensor:
        seen.append(can_read(*tensors))
        return tensors[0].sum()

    look(x, x)
    torch.func.grad(look)(x)
    torch.func.vmap(lambda _: look(x))(x)  # vmap does not batch it
    assert seen == [True, True, True]
    seen.clear()
    torch.func.vmap(look)(x.expand(3, 2))
    torch.func.vmap(torch.func.grad(look))(x.expand(3, 2))
    torch.func.grad(lambda y: torch.func.vmap(look)(y).sum())(x.expand(3, 2))
    look(x, x.to("meta"))
    with FakeTensorMode():
        look(torch.ones(2))
    assert not any(seen)
    assert len(seen) >= 5


def test_a_trace_can_look_but_not_decide() -> None:
    x, seen = torch.ones(2), []

    def look(y: Tensor) -> Tensor:
        seen.append((can_read(y), can_decide_by(y)))
        return y.sum()

    look(x)
    torch.jit.trace(look, x, check_trace=False)
    assert seen == [(True, True), (True, False)]


class Reads(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 2 if can_read(x) else x + 1


def test_values_are_not_read_where_a_call_is_recorded() -> None:
    assert Reads()(torch.zeros(1)) == 2
    assert torch.compile(Reads(), fullgraph=True, backend="eager")(torch.zeros(1)) == 1
    assert torch.export.export(Reads(), (torch.zeros(1),)).module()(torch.zeros(1)) == 1


def test_gradients_are_recorded_inside_an_operator() -> None:
    seen = []

    @torch.library.custom_op("espformer_tests::inside", mutates_args=())
    def inside(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        seen.append((leaf * 2).requires_grad)
        with autograd_inside_an_operator():
            seen.append((leaf * 2).requires_grad)
        return x.clone()

    inside(torch.ones(2, requires_grad=True))
    assert seen == [False, True]


def test_leaves_of_outputs() -> None:
    assert tree_leaves({"a": [1, (2, 3)], "b": 4}) == [1, 2, 3, 4]


def test_no_other_file_reaches_into_torch() -> None:
    home = Path(operators.__file__)
    assert len(PRIVATE.findall(home.read_text("utf-8"))) >= 5
    for path in sorted(Path(espformer.__file__).parent.rglob("*.py")):
        found = PRIVATE.findall(path.read_text("utf-8"))
        assert path == home or not found, f"{path}: {found} belongs into {home.name}"
