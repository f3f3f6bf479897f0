"""Export and compilation are told apart."""

import torch
from torch import Tensor

from espformer.ops.common.exporting import is_exporting


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
