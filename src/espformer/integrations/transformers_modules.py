"""Properties of an attention module of transformers: heads, causality, projections."""

import functools
import inspect
from typing import Any, cast

from torch import Tensor, nn

from espformer.integrations.candidates import CAUSAL, Converted

__all__ = ["heads_of", "is_cross", "other_states", "refusal_of", "scale_of", "uses_registry"]

# What attention modules call the tokens that only their keys come from.
_OTHER_STATES = (
    "key_value_states",
    "encoder_hidden_states",
    "cross_attention_states",
    "cross_states",
    "kv_states",
    "memory",
)
BIASED = "adds a bias of positions to scores, which this attention does not have"
PAIRS = "its model masks (query, key) pairs, to keep images or phrases in one sequence apart"
_HEADS = ("num_attention_heads", "num_heads", "n_heads")
HEAD_DIM = ("head_dim", "attention_head_size", "head_size")


def uses_registry(module: nn.Module) -> bool:
    known = hasattr(getattr(module, "config", None), "_attn_implementation")
    names = names_in_forward(module)
    # The registry has no attributes: ``getattr(ALL_ATTENTION_FUNCTIONS, name, eager)`` is eager.
    asked = "get_interface" in names or "getattr" not in names
    return known and "ALL_ATTENTION_FUNCTIONS" in names and asked


def names_in_forward(module: nn.Module) -> set[str]:
    """Global names that the forward of a module uses."""
    return set(getattr(getattr(forward_of(module), "__code__", None), "co_names", ()))


def forward_of(module: nn.Module) -> Any:
    """The forward of a module's own class, without decorators."""
    return inspect.unwrap(own_class(module).forward)


def own_class(module: nn.Module) -> type[nn.Module]:
    return type(module).original if isinstance(module, Converted) else type(module)


def refusal_of(module: nn.Module) -> str | None:
    if getattr(module, "is_causal", None):
        return CAUSAL
    arguments = inspect.signature(forward_of(module)).parameters
    tables = first_of(module, "relative_position_bias_table", "relative_position_bias")
    relative = tables is not None or hasattr(module, "has_relative_attention_bias")
    relative |= hasattr(module, "relative_k_proj")
    # Conformers of wav2vec 2 are built with one of several kinds of positions.
    relative |= "relative" in str(getattr(module, "position_embeddings_type", None))
    if "position_bias" in arguments or relative:
        return BIASED
    if isinstance(first_of(module, "scaling", "scale"), Tensor):
        return "multiplies its queries by factors that it learns"
    if getattr(module, "sliding_window", None):
        return "local: queries see a window of keys, so the matrix has other marginals"
    if heads_of(module) is None or first_of(module, *HEAD_DIM) is None:
        return "its number of heads or their width could not be found"
    return None


def is_cross(name: str, module: nn.Module) -> bool:
    """Whether it is cross-attention. Of classes used for both, the one in a decoder that is not
    causal is.
    """
    in_decoder = getattr(module, "is_decoder", False) and not getattr(module, "is_causal", True)
    named = any("cross" in part or part == "encoder_attn" for part in name.lower().split("."))
    # Segformer's keys are patches that were merged: other tokens than its queries.
    merged = hasattr(module, "sequence_reduction")
    return named or "CrossAttention" in own_class(module).__name__ or bool(in_decoder) or merged


def first_of(holder: Any, *names: str) -> Any:
    return next((getattr(holder, n) for n in names if getattr(holder, n, None) is not None), None)


def scale_of(module: nn.Module) -> float | None:
    """The factor on the scores that a module says it has."""
    scale = first_of(module, "scaling", "scale")
    if scale == 1 and -0.5 in getattr(forward_of(module).__code__, "co_consts", ()):
        return None  # scaled before the call, by head_dim ** -0.5, as in ESM
    return None if isinstance(scale, Tensor) else scale


def heads_of(module: nn.Module) -> Any:
    """Number of heads: said by the module, or by the size of its projection, or for all alike."""
    heads, head_dim = first_of(module, *_HEADS), first_of(module, *HEAD_DIM)
    if heads is None and head_dim and isinstance(getattr(module, "q_proj", None), nn.Linear):
        heads = cast(nn.Linear, module.q_proj).out_features // head_dim
    return first_of(module.config, *_HEADS) if heads is None else heads


def class_name(model: nn.Module) -> str:
    return own_class(model).__name__


@functools.cache
def _other_states_argument(cls: Any) -> tuple[str, int] | None:
    """Name and position of the argument that holds the tokens of keys alone."""
    names = list(inspect.signature(inspect.unwrap(cls.forward)).parameters)[1:]
    return next(((name, i) for i, name in enumerate(names) if name in _OTHER_STATES), None)


def other_states(
    cls: type[nn.Module], args: tuple[Any, ...], options: dict[str, Any]
) -> bool | None:
    """Whether a call has tokens for its keys alone; None where no call of this class can."""
    argument = _other_states_argument(cast(Any, cls))
    if argument is None:
        return None
    name, position = argument
    given = args[position] if position < len(args) else options.get(name)
    return given is not None
