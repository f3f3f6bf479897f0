"""Swap the attention of an existing model for a mechanism, and revert it."""

import fnmatch
import re
import sys
from collections.abc import Callable
from types import ModuleType

from torch import nn

from espformer.functional.arguments import check_module
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
    """Replace the attention of a model by a mechanism, in place, keeping its weights.

    It converts ``nn.MultiheadAttention`` (also inside torch's Transformer layers), the attention of
    timm's Vision Transformers, the encoders of transformers, and :class:`espformer.nn.Attention`.
    Parameter names do not change, so checkpoints of the original load with ``strict=False``. The
    state of a mechanism is stored under ``<attention>.mechanism``.

    Causal attention is not converted: a causal matrix with unit row and column sums is the
    identity. ``print(espformer.integrations.conversion_report(model))`` lists what was converted,
    what was not, and why.

    Dropout on the attention matrix of the original is not applied, because there is no matrix. Use
    ``ESP(slice_dropout=...)`` or ``Softmax(dropout=...)`` instead.

    Args:
        model: any module.
        mechanism: such as ``espformer.nn.ESP()``; every layer gets its own copy.
        where: selects modules. A string is a shell pattern for the name of a module or of one of
            its parents: ``"encoder.layer.[0-5]"`` selects all attention in those six layers. A
            compiled regular expression is searched for in the name. A function takes
            (name, module).
        cross: True also converts cross-attention. Do not use it for autoregressive decoders:
            doubly-stochastic cross-attention would leak information from later tokens, because the
            weight that one query takes is missing for the others. For some modules only the call
            shows whether queries and keys are the same tokens. There, equal tensors are
            self-attention; different ones are cross-attention with True, self-attention with False,
            and by default an error if it makes a difference.
        causal: whether to assume that self-attention in an ``nn.TransformerDecoderLayer`` is
            causal, since its mask is known only when it is called. False converts it too, for
            decoders that see all their queries at once, as in DETR; a causal mask is then an error.

    Returns:
        The same model.

    Raises:
        ValueError: nothing to convert; the message lists the attention modules that were found.

    Example:
        >>> import espformer, torch
        >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        >>> model = espformer.convert(model, espformer.nn.ESP())
        >>> model(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """
    if isinstance(model, Mechanism):
        raise TypeError(
            "convert: the model comes first, then the mechanism: "
            f"convert(model, {type(model).__name__}())"
        )
    check_module("convert", model)
    if not isinstance(mechanism, Mechanism):
        got = type(mechanism).__name__ if isinstance(mechanism, nn.Module) else repr(mechanism)
        raise TypeError(
            f"convert: mechanism must be an object such as espformer.nn.ESP(), got {got}"
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
    """Undo :func:`convert`: restore the original attention of every module.

    Weights keep their current values, whether trained since or not, except that those changed by
    :func:`espformer.calibrate` are restored. The parameters of the mechanisms are lost.

    Returns:
        The same model.

    Raises:
        ValueError: nothing in this model was converted.

    Example:
        >>> import espformer, torch
        >>> model = torch.nn.TransformerEncoderLayer(32, 4, dropout=0, batch_first=True)
        >>> x = torch.randn(2, 5, 32)
        >>> before = model(x)
        >>> model = espformer.revert(espformer.convert(model, espformer.nn.ESP()))
        >>> torch.equal(model(x), before)
        True
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
    """All attention modules, including unknown kinds, in the order of the model."""
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
    """One module per supported library, only for libraries that are in use."""
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
