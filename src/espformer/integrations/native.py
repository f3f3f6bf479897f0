"""Conversion of the library's own attention layers: their mechanism is replaced."""

from torch import nn

from espformer.integrations.candidates import Candidate
from espformer.nn import Attention, Mechanism

__all__ = ["ORIGINAL", "find", "revert"]

ORIGINAL = "_espformer_original"


def find(name: str, module: nn.Module, parent: nn.Module | None) -> Candidate | None:
    """The module as a candidate, if it is an :class:`espformer.nn.Attention`."""
    if not isinstance(module, Attention):
        return None
    candidate = Candidate(
        name,
        module,
        module.heads,
        module.qk_dim,
        cross=module.cross,
        convert=_convert,
        value_dim=module.head_dim,
    )
    if type(module) is not Attention:
        candidate.refusal = (
            "computes position by position, for a decoder (build the model with the mechanism)"
            if hasattr(module, "advance")
            else "a subclass of espformer.nn.Attention (build the model with the mechanism)"
        )
    return candidate


def _convert(candidate: Candidate, mechanism: Mechanism) -> None:
    module = candidate.module
    assert isinstance(module, Attention)
    # Bypasses nn.Module's registration: the original mechanism must not be a submodule.
    module.__dict__.setdefault(ORIGINAL, module.mechanism)
    module.mechanism = mechanism


def revert(module: nn.Module) -> bool:
    """Put the original mechanism back; False if it is there already."""
    original = module.__dict__.pop(ORIGINAL, None)
    if original is None:
        return False
    assert isinstance(module, Attention)
    module.mechanism = original.to(module.proj.weight.device).train(module.training)
    return True
