"""Mechanisms inside models of transformers, through its registry of attention functions.

Importing this module registers the name ``"espformer"`` for attention and for masks. Without the
latter, transformers would pass no mask, and padded tokens would take part.

There are two ways to use it. ``espformer.convert(model, mechanism)`` gives every selected attention
module its own mechanism, with parameters. :func:`espformer.integrations.pretrained.load_pretrained`
loads such a model after ``save_pretrained``. Mechanisms without parameters also work without
``convert``::

    import espformer.integrations.transformers
    config = AutoConfig.from_pretrained(name)
    config.espformer = {"name": "ESP", "sort_temperature": 0.3}   # the default is ESP()
    model = AutoModel.from_pretrained(name, config=config, attn_implementation="espformer")

``config.espformer`` holds the class of the mechanism, its arguments, and optionally ``cross``, as
in :func:`espformer.convert`. Causal self-attention of an encoder-decoder model keeps softmax; a
model that is causal throughout is refused.
"""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, bidirectional_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from espformer.integrations.candidates import (
    CAUSAL,
    MECHANISM,
    NOT_SELF,
    Candidate,
    give_scale,
    present_tokens,
    swap_class,
    unusual_scale,
)
from espformer.integrations.settings import mechanism_from_settings
from espformer.integrations.transformers_modules import (
    BIASED,
    HEAD_DIM,
    PAIRS,
    class_name,
    first_of,
    heads_of,
    is_cross,
    names_in_forward,
    own_class,
    refusal_of,
    scale_of,
    uses_registry,
)
from espformer.integrations.transformers_places import (
    NAME,
    PLACE,
    Entry,
    RegistryAttention,
    describe,
    finish,
    revert,
)
from espformer.nn import Mechanism
from espformer.ops.common.operators import can_decide_by

try:  # what transformers records of a forward; private, so it may be elsewhere one day
    from transformers.utils.output_capturing import _active_collector
except ImportError:
    _active_collector = None

__all__ = [
    "attention",
    "building_original",
    "describe",
    "find",
    "finish",
    "padding_mask",
    "revert",
    "review",
]

_MASK_MAKERS = {"create_causal_mask", "create_bidirectional_mask"}
# What Pixtral and Grounding DINO call to mask pairs.
_PAIR_MASK_MAKERS = {
    "generate_block_attention_mask",
    "generate_masks_with_special_tokens_and_transfer_map",
}


def find(name: str, module: nn.Module, parent: nn.Module | None) -> Candidate | None:
    """The module as a candidate, if it computes its attention through the registry."""
    if not uses_registry(module):
        return None
    heads, head_dim = heads_of(module), first_of(module, *HEAD_DIM)
    return Candidate(
        name,
        module,
        heads,
        head_dim or 0,
        cross=is_cross(name, module),
        refusal=refusal_of(module),
        scale=unusual_scale(scale_of(module), head_dim or 1),
        convert=_convert,
    )


def _convert(candidate: Candidate, mechanism: Mechanism) -> None:
    swap_class(candidate.module, RegistryAttention, mechanism)


def review(modules: dict[str, nn.Module], candidates: dict[str, Candidate]) -> None:
    """Refuse attention whose masks are causal or carry biases, whatever its modules say.

    CLIP's modules serve images and texts, and only the model around them knows which. Modules
    without ``is_causal`` say nothing; BEiT adds positions to the mask.
    """
    for name, candidate in candidates.items():
        if candidate.refusal is not None or not uses_registry(candidate.module):
            continue
        parts = name.split(".")
        around = [modules.get(".".join(parts[:depth])) for depth in reversed(range(len(parts)))]
        forwards = [set() if module is None else names_in_forward(module) for module in around]
        inside = (child for module in around if module is not None for child in module._modules)
        if any("position_bias" in child for child in inside):
            candidate.refusal = BIASED
        elif any(names & _PAIR_MASK_MAKERS for names in forwards):
            candidate.refusal = PAIRS
        elif not candidate.cross:
            makers = next((names for names in forwards if names & _MASK_MAKERS), set())
            if makers and "create_bidirectional_mask" not in makers:
                candidate.refusal = CAUSAL


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function for transformers: ``(batch, heads, tokens, head_dim)`` tensors.

    Returns the output and the matrix, or None for it.
    """
    mechanism, cross, base = _mechanism_of(module)
    if mechanism is None:
        mask = _base_mask(base, attention_mask, query, key)
        options |= {"scaling": scaling, "dropout": dropout}
        output, weights = _base_attention(module, base)(module, query, key, value, mask, **options)
        return output, weights
    for refused in ("position_bias", "softcap", "sliding_window", "is_causal"):
        if options.get(refused):
            raise ValueError(
                f"espformer: {type(module).__name__} asks for {refused}, which this attention does "
                "not have; leave the module out with convert(..., where=...)"
            )
    if key.shape[1] != query.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    own = scale_of(module) or query.shape[-1] ** -0.5
    if scaling is not None and abs(scaling - own) > 1e-6 * own:
        query = query * (scaling / own)  # scaled before the call, as in Whisper
    place = module.__dict__.get(PLACE)
    if place is not None:
        place.called = True
    if not cross and query.shape[2] != key.shape[2]:
        if place is None or not place.given:
            raise ValueError(f"espformer: this {class_name(module)} {NOT_SELF}")
        cross = True
    key_mask = _key_mask(attention_mask, module, key)
    query_mask = key_mask
    if cross and key_mask is not None:
        shape = query.shape[0], query.shape[2]
        query_mask = torch.ones(shape, dtype=torch.bool, device=query.device)
    masks = {"query_mask": query_mask, "key_mask": key_mask}
    output = mechanism(query, key, value, **masks).transpose(1, 2).contiguous()
    shown = _matrices_wanted(module, options)
    return output, mechanism.matrix(query, key, **masks) if shown else None


def _matrices_wanted(module: nn.Module, options: dict[str, Any]) -> bool:
    """Whether attention matrices are requested: by this call, by the configuration, or by a
    recorder.

    Models like SigLIP do not pass this request to their attention; transformers records what
    modules return.
    """
    if options.get("output_attentions") or getattr(module.config, "output_attentions", False):
        return True
    recorded = None if _active_collector is None else _active_collector.get()
    return any("attentions" in key for key in recorded or ())


def _mechanism_of(module: nn.Module) -> tuple[Mechanism | None, bool, str]:
    """The module's mechanism (None: it keeps its own attention), is it cross, and its own."""
    place = module.__dict__.get(PLACE)
    if place is not None:
        mechanism = cast(Mechanism, getattr(module, MECHANISM)) if place.converted else None
        return mechanism, place.cross, place.base
    config = cast(Any, module.config)
    entry = getattr(config, NAME, None)
    if isinstance(entry, Entry):
        # Another part of the model was converted, which shares its configuration with this one.
        return None, False, entry["base"]
    settings = dict(entry or {})
    if "modules" in settings:
        raise ValueError(
            f"espformer: the configuration of this {type(module).__name__} is that of a converted "
            "model, but this module was not there. Load a saved model with espformer.integrations."
            "pretrained.load_pretrained"
        )
    with_cross, cross, refusal = (
        settings.pop("cross", False),
        is_cross("", module),
        refusal_of(module),
    )
    other = refusal == CAUSAL or (cross and not with_cross)
    if other and getattr(config, "is_encoder_decoder", False):
        return None, cross, "sdpa"
    if refusal is not None:
        raise ValueError(f'attn_implementation="espformer": {type(module).__name__} is {refusal}')
    made = module.__dict__.get("_espformer_made")
    if made is None or made[0] != settings:
        mechanism = mechanism_from_settings(settings)
        heads, head_dim = heads_of(module), first_of(module, *HEAD_DIM)
        if mechanism.extra_parameters(heads, head_dim):
            raise ValueError(
                f"config.espformer = {settings} describes a mechanism with parameters, for which a "
                "configuration makes no place: use espformer.convert(model, mechanism)"
            )
        give_scale(mechanism, unusual_scale(scale_of(module), head_dim))
        layer = getattr(module, "layer_idx", None) or 0
        with torch.random.fork_rng(devices=[]):
            # Random directions are not saved, so every model must draw the same ones.
            # The seed tells layers apart, and without parameters nothing else depends on the depth.
            torch.manual_seed(layer)
            mechanism = mechanism.bind(heads, head_dim)
        weight = next(module.parameters(), None)
        mechanism = mechanism if weight is None else mechanism.to(weight.device)
        made = module.__dict__["_espformer_made"] = (settings, mechanism)
    return made[1].train(module.training), cross, "sdpa"


def _key_mask(mask: Tensor | None, module: nn.Module, key: Tensor) -> Tensor | None:
    """``(batch, M)``, True = takes part."""
    if mask is None or mask.dim() == 2:
        return None if mask is None else mask.bool()
    if mask.dim() == 4 and mask.shape[1:3] == (1, 1):
        if mask.dtype == torch.bool:
            return mask[:, 0, 0]
        return present_tokens("espformer", "attention_mask", mask)[:, 0, 0]
    raise ValueError(
        f"espformer: {class_name(module)} got a mask of (query, key) pairs, of shape "
        f"{tuple(mask.shape)}. Only padding can be masked: pass attention_mask as (batch, tokens). "
        "Causal and local attention keep softmax: leave them out with convert(..., where=...)"
    )


def padding_mask(
    *, mask_function: Any, attention_mask: Tensor | None = None, config: Any = None, **options: Any
) -> Tensor | None:
    """The mask function for transformers: ``(batch, tokens)``, True = takes part, or None.

    Masks of pairs are made as the model made them before, for the modules that keep its attention,
    but always: with None for a causal mask, a converted module could not know that it is causal.
    """
    if mask_function is not bidirectional_mask_function:
        settings = getattr(config, NAME, None) or {}
        make = ALL_MASK_ATTENTION_FUNCTIONS[settings.get("base", "sdpa")]
        options |= {"attention_mask": attention_mask, "config": config}
        mask = make(mask_function=mask_function, **options | {"allow_is_causal_skip": False})
        return cast(Tensor | None, mask)
    if attention_mask is None:
        return None
    mask = attention_mask[:, -options["kv_length"] :].bool()
    # On a GPU it is not read: that would synchronise the device.
    nothing = mask.device.type == "cpu" and can_decide_by(mask) and bool(mask.all())
    return None if nothing else mask


def _base_mask(base: str, mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask that the model's own attention takes, from one of padding."""
    if mask is None or mask.dim() != 2 or base not in ALL_MASK_ATTENTION_FUNCTIONS:
        return mask
    made = ALL_MASK_ATTENTION_FUNCTIONS[base](
        batch_size=query.shape[0],
        q_length=query.shape[2],
        kv_length=key.shape[2],
        mask_function=bidirectional_mask_function,
        attention_mask=mask,
        allow_is_causal_skip=False,
        dtype=query.dtype,
        device=query.device,
    )
    return cast(Tensor | None, made)


def _base_attention(module: nn.Module, base: str) -> Any:
    eager = getattr(sys.modules[own_class(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(base, eager)


# Whether :func:`building_original` is active.
_original: ContextVar[bool] = ContextVar("espformer_building_original", default=False)


@contextmanager
def building_original() -> Iterator[None]:
    """Lets a model be built with its own attention from the configuration of a converted one."""
    token = _original.set(True)
    try:
        yield
    finally:
        _original.reset(token)


def _refuse_to_be_ignored() -> None:
    """Make it an error to build a model that would silently use softmax instead of a mechanism.

    transformers accepts every registered name without a check, so a model that computes its scores
    itself would use softmax. So would a converted model that is built from its configuration alone.
    This method is called for every model that is built, so it is the place for the errors.
    """
    accept = PreTrainedModel.get_correct_attn_implementation
    if hasattr(accept, "__wrapped__"):
        return

    @functools.wraps(accept)
    def checked(
        self: Any, requested_attention: str | None, is_init_check: bool = False, **others: Any
    ) -> str:
        name = type(self).__name__
        if requested_attention == NAME and not self._can_set_attn_implementation():
            raise ValueError(
                f'attn_implementation="{NAME}": {name} computes its attention itself instead of '
                "asking the registry of transformers, and would ignore this"
            )
        entry = getattr(self.config, NAME, None) if is_init_check and not _original.get() else None
        if entry is not None and "modules" in entry:
            raise ValueError(
                f"{name}: config.{NAME} says that the model was converted, but here it would be "
                "built with softmax. Load a saved model with espformer.integrations.pretrained."
                "load_pretrained and the class you want, copy a model with copy.deepcopy; then "
                "espformer.revert gives softmax back. A new model needs a configuration of its "
                "own, copied before the conversion"
            )
        if entry is not None and requested_attention is None:
            raise ValueError(
                f"{name}: config.{NAME} = {entry} has no effect without attn_implementation="
                f'"{NAME}", which was not given; pass it, or attn_implementation="sdpa" for softmax'
            )
        return str(accept(self, requested_attention, is_init_check, **others))

    PreTrainedModel.get_correct_attn_implementation = checked


_refuse_to_be_ignored()
AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, padding_mask)
