"""Put a mechanism into a model that exists already, and take it out again."""

import fnmatch
import re
import sys
from collections.abc import Callable
from types import ModuleType

from torch import nn

from espformer.integrations import native, timm, torch_nn
from espformer.integrations.calibration import restore_weights
from espformer.integrations.candidates import (
    ASSUMED_CAUSAL,
    CROSS,
    MECHANISM,
    SCALE,
    UNCLEAR,
    Candidate,
    bind,
)
from espformer.integrations.report import ATTRIBUTE, ConversionReport, ConversionRow
from espformer.nn import Mechanism, Slicer

__all__ = ["convert", "revert"]

Where = str | re.Pattern[str] | Callable[[str, nn.Module], bool]


def convert(
    model: nn.Module,
    mechanism: Mechanism,
    *,
    where: Where | None = None,
    cross: bool | None = None,
    causal: bool = True,
) -> nn.Module:
    """Replace what the attention modules of a model compute, in place; their weights are kept.

    Converted are ``nn.MultiheadAttention`` (also inside torch's Transformer layers), the attention
    of timm's Vision Transformers, the encoders of transformers and :class:`espformer.nn.Attention`.
    Names of parameters stay, so checkpoints of the original load with ``strict=False``; what a
    mechanism adds stands under ``<attention>.mechanism``.

    Causal attention is left: a causal matrix whose rows and columns sum to one is the identity.
    ``print(espformer.integrations.conversion_report(model))`` shows what was converted, what was
    left, and why.

    Dropout on the attention matrix of the original is not applied: there is no matrix. Mechanisms
    have their own, ``ESP(slice_dropout=...)`` or ``Softmax(dropout=...)``.

    Args:
        model: any module.
        mechanism: such as ``espformer.nn.ESP()``; every layer gets a copy of its own.
        where: which modules. A string is a shell pattern for the name of a module, or of one that
            holds it: ``"encoder.layer.[0-5]"`` is all attention in those six layers. A compiled
            regular expression is searched in the name. A function takes (name, module).
        cross: True converts cross-attention too. In a decoder that writes word by word a
            doubly-stochastic cross-attention would let a word see later ones: what one query takes,
            the others lack. Where only the call of a module shows whether queries and keys are the
            same tokens, equal tensors are self-attention; others are cross-attention with True,
            self-attention with False, and an error by default where it makes a difference.
        causal: whether self-attention in an ``nn.TransformerDecoderLayer``, which only sees at the
            call whether its mask is causal, is taken to be. False converts it too, for decoders
            that see all their queries at once, as in DETR; a causal mask is then an error.

    Returns:
        The model that was given.

    Raises:
        ValueError: nothing to convert; the message lists the attention modules that were seen.

    Example:
        >>> import espformer, torch
        >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        >>> model = espformer.convert(model, espformer.nn.ESP())
        >>> model(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """
    if not isinstance(mechanism, Mechanism):
        raise TypeError(
            f"convert: mechanism must be an object such as espformer.nn.ESP(), got {mechanism!r}"
        )
    chosen = _selector(where)
    plan: list[tuple[Candidate, Mechanism]] = []
    rows = []
    for depth, candidate in enumerate(find_attention(model)):
        reason = candidate.refusal
        if reason == ASSUMED_CAUSAL and not causal:
            reason = None
        if not chosen(candidate.name, candidate.module):
            reason = "not chosen by where" + _already(candidate)
        elif reason is None and candidate.cross and not cross:
            reason = CROSS
        elif reason is None and candidate.unclear and cross is None:
            reason = UNCLEAR
        if reason is None:
            candidate.given = cross
            plan.append((candidate, bind(candidate, mechanism, depth)))
        action = "converted" if reason is None else "left"
        reason = type(mechanism).__name__ if reason is None else reason
        rows.append(ConversionRow(candidate.name, candidate.kind, candidate.heads, action, reason))
    report = ConversionReport(tuple(rows))
    if not plan:
        chosen_by = "" if where is None else f" with where={where!r}"
        raise ValueError(
            f"convert: nothing to convert in this {type(model).__name__}{chosen_by}. Attention "
            f"modules that were seen:\n{report}"
        )
    # Everything that can fail has been done: a model is converted whole or not at all.
    for candidate, bound in plan:
        assert candidate.convert is not None
        candidate.convert(candidate, bound)
        candidate.module.__dict__[SCALE] = candidate.scale
    torch_nn.prepare(model)
    for library in _libraries():
        if hasattr(library, "describe"):
            library.describe(model, [candidate for candidate, _ in plan])
    object.__setattr__(model, ATTRIBUTE, report)
    return model


def revert(model: nn.Module) -> nn.Module:
    """Undo :func:`convert`: every attention module computes again what it computed before.

    Weights stay as they are, trained since or not; those that :func:`espformer.calibrate` changed
    are again what they were before. What the mechanism had learnt is lost.

    Raises:
        ValueError: nothing in this model was converted.
    """
    libraries = _libraries()
    reverted = [
        module for module in list(model.modules()) if any(x.revert(module) for x in libraries)
    ]
    if not reverted:
        raise ValueError(f"revert: no module of this {type(model).__name__} was converted")
    restore_weights(model)
    for library in libraries:
        if hasattr(library, "finish"):
            library.finish(model)
    model.__dict__.pop(ATTRIBUTE, None)
    return model


def find_attention(model: nn.Module) -> list[Candidate]:
    """All attention modules, those of unknown kinds included, in the model's order."""
    libraries = _libraries()
    modules = dict(model.named_modules())
    found: dict[str, Candidate] = {}
    for name, module in modules.items():
        if any(_inside(name, outer) for outer in found):
            continue
        parent = modules.get(name.rpartition(".")[0]) if name else None
        candidates = (library.find(name, module, parent) for library in libraries)
        candidate = next((c for c in candidates if c is not None), None)
        if candidate is not None:
            found[name] = candidate
    for library in libraries:
        if hasattr(library, "review"):
            library.review(modules, found)
    for name, module in modules.items():
        unknown = "Attention" in type(module).__name__ and not isinstance(
            module, (Mechanism, Slicer)
        )
        if unknown and not any(_inside(name, other) or _inside(other, name) for other in found):
            refusal = "not a kind of attention that convert knows"
            found[name] = Candidate(name, module, refusal=refusal)
    return [found[name] for name in modules if name in found]


def _already(candidate: Candidate) -> str:
    mechanism = getattr(candidate.module, MECHANISM, None)
    return f", keeps {type(mechanism).__name__}" if isinstance(mechanism, Mechanism) else ""


def _inside(name: str, outer: str) -> bool:
    return outer in ("", name) or name.startswith(outer + ".")


def _libraries() -> list[ModuleType]:
    """One module for each library whose models can be converted; each only where it is in use."""
    libraries: list[ModuleType] = [native, torch_nn]
    if "transformers" in sys.modules:
        from espformer.integrations import transformers

        libraries.append(transformers)
    return [*libraries, timm]


def _selector(where: Where | None) -> Callable[[str, nn.Module], bool]:
    if where is None:
        return lambda name, module: True
    if isinstance(where, re.Pattern):
        return lambda name, module: where.search(name) is not None
    if isinstance(where, str):
        pattern = re.compile(fnmatch.translate(where))

        def matches(name: str, module: nn.Module) -> bool:
            parts = name.split(".")
            return any(pattern.match(".".join(parts[:n])) for n in range(1, len(parts) + 1))

        return matches
    if callable(where):
        return where
    raise TypeError(
        "convert: where must be a pattern of names such as 'encoder.layer.[0-5]', a compiled "
        f"regular expression or a function of (name, module), got {where!r}"
    )
