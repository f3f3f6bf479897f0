"""Code that all integrations share: a candidate for conversion, and the swap of its class."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from espformer.nn import Mechanism
from espformer.ops.common.operators import can_read

__all__ = [
    "ASSUMED_CAUSAL",
    "CAUSAL",
    "CROSS",
    "NOT_SELF",
    "Candidate",
    "Converted",
    "bind",
    "present_tokens",
    "restore_class",
    "swap_class",
]

# Where a converted module keeps its mechanism: the prefix of its extra keys in a state dict.
MECHANISM = "mechanism"
# Where it keeps the factor that its own attention has on scores, None for the usual one.
SCALE = "_espformer_scale"

CAUSAL = "causal: a causal matrix whose rows and columns sum to one is the identity"
ASSUMED_CAUSAL = f"{CAUSAL} (if it sees all tokens at once, pass causal=False)"
CROSS = "cross-attention (pass cross=True to convert it too)"
UNCLEAR = (
    "its queries and keys are not seen to be the same tokens (pass cross=True to convert it, or "
    "cross=False if they are)"
)
NOT_SELF = (
    "was converted as self-attention and is called with other tokens as keys than as queries: "
    "convert it with cross=True, or leave it out with convert(..., where=...)"
)

# Values that models add to the scores of padded tokens: -inf, the minimum of a dtype, -1e9, or
# BERT's -10,000. Values closer to zero leave some attention, so they are a bias.
_PADDING = -1e4
_SEEN = "_espformer_seen"


@dataclass
class Candidate:
    """An attention module of a model.

    Attributes:
        name: its name in the model.
        module: the module.
        heads: number of heads, None if unknown.
        head_dim: width of a head's queries and keys.
        cross: whether queries and keys come from different tokens; None where only a call shows.
        unclear: whether it is called with two expressions, which may or may not be the same tokens.
        given: what `cross` the user gave to convert.
        refusal: why it cannot be converted, None if it can.
        scale: the factor on the scores, None if it is ``head_dim ** -0.5``.
        convert: puts a bound mechanism in place.
        value_dim: width of a head's values, None if it is head_dim.
    """

    name: str
    module: nn.Module
    heads: int | None = None
    head_dim: int = 0
    cross: bool | None = False
    unclear: bool = False
    given: bool | None = None
    refusal: str | None = None
    scale: float | None = None
    convert: Callable[["Candidate", Mechanism], None] | None = None
    value_dim: int | None = None

    @property
    def kind(self) -> str:
        original = getattr(type(self.module), "original", type(self.module))
        return str(original.__name__)


def bind(candidate: Candidate, mechanism: Mechanism, depth: int) -> Mechanism:
    """A copy of the mechanism with the sizes, the scale, the device and the mode of a module."""
    assert candidate.heads is not None
    bound = mechanism.bind(
        candidate.heads, candidate.head_dim, value_dim=candidate.value_dim, depth=depth
    )
    give_scale(bound, candidate.scale)
    weight = next((p for p in candidate.module.parameters()), None)
    if weight is not None:
        bound = bound.to(weight.device)
    return bound.train(candidate.module.training)


def give_scale(mechanism: Mechanism, scale: float | None) -> None:
    """Give the scale of a module to all parts of a mechanism that have none."""
    for part in mechanism.modules():
        if scale is not None and isinstance(part, Mechanism) and getattr(part, "scale", 0) is None:
            part.scale = scale  # type: ignore[assignment]


def unusual_scale(scale: float | None, head_dim: int) -> float | None:
    """The scale, or None if it is the default of a mechanism."""
    usual = scale is None or abs(scale - head_dim**-0.5) < 1e-9
    return None if usual else scale


def split_heads(x: Tensor, heads: int) -> Tensor:
    """``(batch, tokens, width)`` to ``(batch, heads, tokens, head_dim)``."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def present_tokens(who: str, name: str, mask: Tensor) -> Tensor:
    """A boolean mask (True = takes part) from an additive one, whose entries are zero or very low.

    Other values are a bias, which is refused. Checking them synchronises a GPU, so every mask is
    checked only once, even if many layers use it.
    """
    present = mask == 0
    if not can_read(mask):
        return present
    version = 0 if mask.is_inference() else mask._version
    if getattr(mask, _SEEN, None) != version:
        if not bool((present | (mask <= _PADDING)).all()):
            raise ValueError(
                f"{who}: {name} holds numbers other than 0 and -inf (or below {_PADDING:g}); only "
                "padding can be masked, nothing can be added to scores that do not exist"
            )
        setattr(mask, _SEEN, version)
    return present


class Converted:
    """A mixin in front of the class of a converted module, which overrides its forward.

    The module stays the object that it was: its parameters, hooks, name and type are kept.
    Copies and pickles of it are converted too.
    """

    original: ClassVar[type[nn.Module]]
    replacement: ClassVar[type["Converted"]]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _blank, (self.replacement, self.original), self.__getstate__()


_CLASSES: dict[tuple[type, type], type] = {}


def _converted_class(replacement: type, original: type) -> type:
    """The one class of this replacement before this original."""
    if (replacement, original) not in _CLASSES:
        names = {"original": original, "replacement": replacement}
        _CLASSES[replacement, original] = type(
            f"Converted{original.__name__}",
            (replacement, original),
            names | {"__module__": replacement.__module__},
        )
    return _CLASSES[replacement, original]


def _blank(replacement: type[Converted], original: type[nn.Module]) -> nn.Module:
    cls = _converted_class(replacement, original)
    return cast(nn.Module, object.__new__(cls))


def swap_class(module: nn.Module, replacement: type[Converted], mechanism: Mechanism) -> None:
    """Let the replacement compute this module's output from now on, with the mechanism."""
    original = getattr(type(module), "original", type(module))
    module.__class__ = _converted_class(replacement, original)
    setattr(module, MECHANISM, mechanism)


def restore_class(module: nn.Module) -> bool:
    """Undo :func:`swap_class`; False if there is nothing to undo."""
    if not isinstance(module, Converted):
        return False
    module.__class__ = cast(Any, type(module).original)
    delattr(module, MECHANISM)
    return True
