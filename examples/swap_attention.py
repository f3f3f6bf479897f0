"""Swap the attention of a model, and back: ``python examples/swap_attention.py``.

`convert` swaps ESP attention into the upper layers of a torch.nn Transformer encoder and keeps its
weights. A report lists what was converted, and `revert` restores the original, bit for bit. In
between we look at how much attention the most popular token receives; one unit would be fair.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import espformer
from espformer.integrations import conversion_report
from espformer.nn import ESP


def encoder(layers: int = 4) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, nhead=4, dim_feedforward=128, batch_first=True)
    model = nn.TransformerEncoder(layer, num_layers=layers, enable_nested_tensor=False)
    with torch.no_grad():  # new weights attend almost uniformly; scale them, as training does
        for block in model.layers:
            block.self_attn.in_proj_weight[:128].mul_(4)
    return model.eval()


def most_popular(model: nn.TransformerEncoder, x: Tensor) -> list[float]:
    """For each layer, the largest column sum of an attention matrix: 1 is a fair share."""
    shares = []
    with torch.no_grad():
        for block in model.layers:
            _, matrix = block.self_attn(x, x, x, average_attn_weights=False)
            shares.append(float(matrix.sum(-2).max()))
            x = block(x)
    return shares


def main() -> None:
    model, x = encoder(), torch.randn(2, 60, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = model(x)
    print("most popular token, by layer, softmax:", _shown(most_popular(model, x)))

    espformer.convert(model, ESP(hard=True), where="layers.[23]")
    print(conversion_report(model))
    print("most popular token, by layer, swapped:", _shown(most_popular(model, x)))

    espformer.revert(model)
    with torch.no_grad():
        same = torch.equal(model(x), before)
    print(f"reverted, the output is the same bit for bit: {same}")


def _shown(shares: list[float]) -> str:
    return "  ".join(f"{share:.2f}" for share in shares)


if __name__ == "__main__":
    main()
