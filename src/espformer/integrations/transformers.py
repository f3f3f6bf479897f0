"""Mechanisms inside models of transformers, through its registry of attention functions.

Importing this module registers the name ``"espformer"``, for attention and for masks: without the
second, transformers would hand over no mask and padded tokens would take part.

Two ways to use it. ``espformer.convert(model, mechanism)`` gives every chosen attention module a
mechanism of its own, with its parameters;
:func:`espformer.integrations.pretrained.load_pretrained` loads what ``save_pretrained`` saved of
such a model. Without it, for mechanisms that have no parameters::

    import espformer.integrations.transformers
    config = AutoConfig.from_pretrained(name)
    config.espformer = {"name": "ESP", "sort_temperature": 0.3}   # the default is ESP()
    model = AutoModel.from_pretrained(name, config=config, attn_implementation="espformer")

``config.espformer`` holds the class of the mechanism, its arguments, and optionally ``cross``, as
in :func:`espformer.convert`. Causal self-attention of an encoder-decoder model keeps softmax; a
model that is causal throughout is refused.
"""

import functools
import inspect
import sys
from dataclasses import dataclass
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
    Converted,
    give_scale,
    present_tokens,
    restore_class,
    swap_class,
    unusual_scale,
)
from espformer.integrations.settings import mechanism_from_settings, settings_of
from espformer.nn import Mechanism

try:  # what transformers records of a forward; private, so it may be elsewhere one day
    from transformers.utils.output_capturing import _active_collector
except ImportError:
    _active_collector = None  # type: ignore[assignment]

__all__ = ["attention", "find", "padding_mask", "revert"]

NAME = "espformer"
_PLACE = "_espformer_place"
# What attention modules call the tokens that only their keys come from.
_OTHER_STATES = (
    "key_value_states",
    "encoder_hidden_states",
    "cross_attention_states",
    "cross_states",
    "kv_states",
    "memory",
)
_MASK_MAKERS = {"create_causal_mask", "create_bidirectional_mask"}
BIASED = "adds a bias of positions to scores, which this attention does not have"
PACKED = "packs several images into one sequence, with a mask of pairs that keeps them apart"
_HEADS = ("num_attention_heads", "num_heads", "n_heads")
_HEAD_DIM = ("head_dim", "attention_head_size")


@dataclass
class _Place:
    """What a module is in a model of which something was converted.

    Attributes:
        base: the attention function that the model had.
        cross: whether it is cross-attention.
        given: what `cross` was given to convert.
        converted: whether it has a mechanism.
        settings: of the mechanism, None if a dictionary cannot hold them.
        root: class of the model that it was converted in.
        name: its name there.
    """

    base: str
    cross: bool
    given: bool | None = None
    converted: bool = False
    settings: dict[str, Any] | None = None
    root: str = ""
    name: str = ""


class _Entry(dict[str, Any]):
    """The entry of a configuration while its model lives; saved and loaded, it is a dictionary.

    It says which modules of which classes of models have which mechanism. ``places`` are all
    modules that were looked at, ``before`` is the entry that was there.
    """

    def __init__(self, base: str, before: dict[str, Any] | None) -> None:
        super().__init__(base=base, modules={})
        self.places: list[_Place] = []
        self.before = before

    def refresh(self) -> bool:
        """Write down what is converted; False if nothing is."""
        modules: dict[str, dict[str, Any]] = {}
        given: dict[str, dict[str, bool]] = {}
        for place in self.places:
            if place.converted:
                modules.setdefault(place.root, {})[place.name] = place.settings
                if place.given is not None:
                    given.setdefault(place.root, {})[place.name] = place.given
        self["modules"] = modules
        self.pop("cross", None)
        if given:
            self["cross"] = given
        return bool(modules)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Entry, (self["base"], self.before), self.__dict__, None, iter(self.items())


def find(name: str, module: nn.Module, parent: nn.Module | None) -> Candidate | None:
    """The module as a candidate, if it computes its attention through the registry."""
    if not _uses_registry(module):
        return None
    heads, head_dim = _heads(module), _first(module, *_HEAD_DIM)
    return Candidate(
        name,
        module,
        heads,
        head_dim or 0,
        cross=_is_cross(name, module),
        refusal=_refusal(module),
        scale=unusual_scale(_scale(module), head_dim or 1),
        convert=_convert,
    )


def _uses_registry(module: nn.Module) -> bool:
    known = hasattr(getattr(module, "config", None), "_attn_implementation")
    return known and "ALL_ATTENTION_FUNCTIONS" in _names_in_forward(module)


def _names_in_forward(module: nn.Module) -> set[str]:
    """Global names that the forward of a module uses."""
    return set(getattr(getattr(_forward(module), "__code__", None), "co_names", ()))


def _forward(module: nn.Module) -> Any:
    """The forward of a module's own class, without decorators."""
    return inspect.unwrap(_own_class(module).forward)


def _own_class(module: nn.Module) -> type[nn.Module]:
    return type(module).original if isinstance(module, Converted) else type(module)


def _refusal(module: nn.Module) -> str | None:
    if getattr(module, "is_causal", None):
        return CAUSAL
    arguments = inspect.signature(_forward(module)).parameters
    tables = _first(module, "relative_position_bias_table", "relative_position_bias")
    relative = tables is not None or hasattr(module, "has_relative_attention_bias")
    if "position_bias" in arguments or relative:
        return BIASED
    if isinstance(_first(module, "scaling", "scale"), Tensor):
        return "multiplies its queries by factors that it learns"
    if getattr(module, "sliding_window", None):
        return "local: queries see a window of keys, so the matrix has other marginals"
    if _heads(module) is None or _first(module, *_HEAD_DIM) is None:
        return "its number of heads or their width could not be found"
    return None


def _is_cross(name: str, module: nn.Module) -> bool:
    """Classes used for both say whose part they are: the causal one of a decoder is the other."""
    in_decoder = getattr(module, "is_decoder", False) and not getattr(module, "is_causal", True)
    named = any("cross" in part or part == "encoder_attn" for part in name.lower().split("."))
    return named or "CrossAttention" in _own_class(module).__name__ or bool(in_decoder)


def _first(holder: Any, *names: str) -> Any:
    return next((getattr(holder, n) for n in names if getattr(holder, n, None) is not None), None)


def _scale(module: nn.Module) -> float | None:
    """The factor on the scores that a module says it has."""
    scale = _first(module, "scaling", "scale")
    if scale == 1 and -0.5 in getattr(_forward(module).__code__, "co_consts", ()):
        return None  # scaled before the call, by head_dim ** -0.5, as in ESM
    return None if isinstance(scale, Tensor) else scale


def _heads(module: nn.Module) -> Any:
    """Number of heads: said by the module, or by the size of its projection, or for all alike."""
    heads, head_dim = _first(module, *_HEADS), _first(module, *_HEAD_DIM)
    if heads is None and head_dim and isinstance(getattr(module, "q_proj", None), nn.Linear):
        heads = cast(nn.Linear, module.q_proj).out_features // head_dim
    return _first(module.config, *_HEADS) if heads is None else heads


def _convert(candidate: Candidate, mechanism: Mechanism) -> None:
    swap_class(candidate.module, _RegistryAttention, mechanism)


class _RegistryAttention(Converted):
    """An attention module of transformers whose attention function is the registry's, for sure."""

    def forward(self, *args: Any, **options: Any) -> Any:
        module = cast(nn.Module, self)
        implementation = cast(Any, module.config)._attn_implementation
        if implementation != NAME:
            raise ValueError(
                f"espformer: this {self.original.__name__} was converted, but the attention of its "
                f"model was set to {implementation!r} since, which would be softmax. "
                "espformer.revert(model) gives softmax back; to go on, call "
                f'model.set_attn_implementation("{NAME}"). Attention matrices need no other '
                "attention: model(..., output_attentions=True)"
            )
        place = module.__dict__.get(_PLACE)
        other = _other_states(self.original, args, options)
        if place is not None and other is not None and place.cross != other:
            if other and not place.given:
                raise ValueError(f"espformer: this {self.original.__name__} {NOT_SELF}")
            place.cross = other
        return self.original.forward(self, *args, **options)  # type: ignore[arg-type]


@functools.cache
def _other_states_argument(cls: type[nn.Module]) -> tuple[str, int] | None:
    """Name and position of the argument that holds the tokens of keys alone."""
    names = list(inspect.signature(inspect.unwrap(cls.forward)).parameters)[1:]
    return next(((name, i) for i, name in enumerate(names) if name in _OTHER_STATES), None)


def _other_states(
    cls: type[nn.Module], args: tuple[Any, ...], options: dict[str, Any]
) -> bool | None:
    """Whether a call has tokens for its keys alone; None where no call of this class can."""
    argument = _other_states_argument(cls)
    if argument is None:
        return None
    name, position = argument
    given = args[position] if position < len(args) else options.get(name)
    return given is not None


def review(modules: dict[str, nn.Module], candidates: dict[str, Candidate]) -> None:
    """Refuse attention whose masks are causal or carry biases, whatever its modules say.

    CLIP's modules serve images and texts, and only the model around them knows which. Modules
    without ``is_causal`` say nothing; BEiT adds positions to the mask.
    """
    for name, candidate in candidates.items():
        if candidate.refusal is not None or not _uses_registry(candidate.module):
            continue
        parts = name.split(".")
        around = [modules.get(".".join(parts[:depth])) for depth in reversed(range(len(parts)))]
        forwards = [set() if module is None else _names_in_forward(module) for module in around]
        if any(_first(module, "relative_position_bias", "rel_pos_bias") for module in around):
            candidate.refusal = BIASED
        elif any("generate_block_attention_mask" in names for names in forwards):
            candidate.refusal = PACKED
        elif not candidate.cross:
            makers = next((names for names in forwards if names & _MASK_MAKERS), set())
            if makers and "create_bidirectional_mask" not in makers:
                candidate.refusal = CAUSAL


def describe(model: nn.Module, converted: list[Candidate]) -> None:
    """Tell the modules and the configurations of a model what was converted.

    An attention module that does not ask the registry, such as an ``nn.MultiheadAttention``, is
    written into the configuration of the model of transformers that it is part of, to be saved.
    """
    chosen = {id(c.module): c for c in converted}
    owners = {n: m for n, m in model.named_modules() if isinstance(m, PreTrainedModel)}
    configs = {}
    for name, module in model.named_modules():
        config = _config_of(name, module, owners)
        if config is not None and id(module) in chosen:
            configs[id(config)] = config
    roots: dict[int, tuple[str, str]] = {}
    for name, owner in owners.items():
        roots.setdefault(id(owner.config), (_class_name(owner), f"{name}." if name else ""))
    registry = set()
    for name, module in model.named_modules():
        config = _config_of(name, module, owners)
        if id(config) not in configs:
            continue
        if not _uses_registry(module) and id(module) not in chosen:
            continue
        entry = getattr(config, NAME, None)
        if not isinstance(entry, _Entry):
            implementation = config._attn_implementation or "eager"
            entry = _Entry("sdpa" if implementation == NAME else implementation, entry)
            setattr(config, NAME, entry)
        place = module.__dict__.get(_PLACE)
        if place is None:
            place = module.__dict__[_PLACE] = _Place(entry["base"], _is_cross(name, module))
            entry.places.append(place)
        if id(module) in chosen:
            place.given = chosen[id(module)].given
        if id(module) in chosen or place.converted:
            place.converted = True
            place.settings = settings_of(cast(Mechanism, getattr(module, MECHANISM)))
            place.root, prefix = roots.get(id(config), (_class_name(model), ""))
            place.name = name.removeprefix(prefix)
            if _uses_registry(module):
                registry.add(id(config))
    for config in configs.values():
        cast(_Entry, getattr(config, NAME)).refresh()
        if id(config) in registry:
            config._attn_implementation_internal = NAME


def _config_of(name: str, module: nn.Module, owners: dict[str, PreTrainedModel]) -> Any:
    """The configuration that says which attention a module has: its own, or its model's."""
    if _uses_registry(module):
        return module.config
    parts = name.split(".")
    around = (owners.get(".".join(parts[:depth])) for depth in reversed(range(len(parts))))
    return next((owner.config for owner in around if owner is not None), None)


def _class_name(model: nn.Module) -> str:
    return _own_class(model).__name__


def revert(module: nn.Module) -> bool:
    """Put the original computation back; False if it is there already."""
    return isinstance(module, _RegistryAttention) and restore_class(module)


def finish(model: nn.Module) -> None:
    """Give the configurations of a reverted model their attention back."""
    for module in model.modules():
        place = module.__dict__.get(_PLACE)
        if place is not None and not isinstance(module, Converted):
            place.converted = False
    for module in model.modules():
        entry = getattr(getattr(module, "config", None), NAME, None)
        # Part of a model may have been reverted: the rest goes on.
        if isinstance(entry, _Entry) and not entry.refresh():
            config = cast(Any, module.config)
            config._attn_implementation_internal = entry["base"]
            if entry.before is not None:
                setattr(config, NAME, entry.before)
            else:
                delattr(config, NAME)
    for module in model.modules():
        config = getattr(module, "config", None)
        if not isinstance(getattr(config, NAME, None), _Entry):
            module.__dict__.pop(_PLACE, None)


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
    """What transformers calls: ``(batch, heads, tokens, head_dim)`` to (output, matrix or None)."""
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
    own = _scale(module) or query.shape[-1] ** -0.5
    if scaling is not None and abs(scaling - own) > 1e-6 * own:
        query = query * (scaling / own)  # scaled before the call, as in Whisper
    place = module.__dict__.get(_PLACE)
    if not cross and query.shape[2] != key.shape[2]:
        if place is None or not place.given:
            raise ValueError(f"espformer: this {_class_name(module)} {NOT_SELF}")
        cross = True
    masks: dict[str, Tensor | None] = {"key_mask": _key_mask(attention_mask, module, key)}
    if cross and masks["key_mask"] is not None:
        # Without it, keys as many as the queries would lend them their mask.
        every = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
        masks["query_mask"] = every
    output = mechanism(query, key, value, **masks).transpose(1, 2).contiguous()
    shown = _matrices_wanted(module, options)
    return output, mechanism.matrix(query, key, **masks) if shown else None


def _matrices_wanted(module: nn.Module, options: dict[str, Any]) -> bool:
    """Whether somebody asked for attention matrices: this call, the configuration, or a recorder.

    Models like SigLIP do not tell their attention: transformers records what modules return.
    """
    if options.get("output_attentions") or getattr(module.config, "output_attentions", False):
        return True
    recorded = None if _active_collector is None else _active_collector.get()
    return any("attentions" in key for key in recorded or ())


def _mechanism_of(module: nn.Module) -> tuple[Mechanism | None, bool, str]:
    """The module's mechanism (None: it keeps its own attention), is it cross, and its own."""
    place = module.__dict__.get(_PLACE)
    if place is not None:
        mechanism = cast(Mechanism, getattr(module, MECHANISM)) if place.converted else None
        return mechanism, place.cross, place.base
    config = cast(Any, module.config)
    entry = getattr(config, NAME, None)
    if isinstance(entry, _Entry):
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
        _is_cross("", module),
        _refusal(module),
    )
    other = refusal == CAUSAL or (cross and not with_cross)
    if other and getattr(config, "is_encoder_decoder", False):
        return None, cross, "sdpa"
    if refusal is not None:
        raise ValueError(f'attn_implementation="espformer": {type(module).__name__} is {refusal}')
    made = module.__dict__.get("_espformer_made")
    if made is None or made[0] != settings:
        mechanism = mechanism_from_settings(settings)
        if mechanism.extra_parameters(_heads(module), _first(module, *_HEAD_DIM)):
            raise ValueError(
                f"config.espformer = {settings} describes a mechanism with parameters, for which a "
                "configuration makes no place: use espformer.convert(model, mechanism)"
            )
        give_scale(mechanism, unusual_scale(_scale(module), _first(module, *_HEAD_DIM)))
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
        f"espformer: {_class_name(module)} got a mask of (query, key) pairs, of shape "
        f"{tuple(mask.shape)}. Only padding can be masked: pass attention_mask as (batch, tokens). "
        "Causal and local attention keep softmax: leave them out with convert(..., where=...)"
    )


def padding_mask(
    *, mask_function: Any, attention_mask: Tensor | None = None, config: Any = None, **options: Any
) -> Tensor | None:
    """What transformers calls to make masks: ``(batch, tokens)``, True = takes part, or None.

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
    nothing = not torch.compiler.is_compiling() and mask.device.type == "cpu" and bool(mask.all())
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
    eager = getattr(sys.modules[_own_class(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(base, eager)


def _refuse_to_be_ignored() -> None:
    """Let models that never ask the registry raise when they are built with this attention.

    transformers accepts every registered name and checks nothing: a model that computes its scores
    itself would go on with softmax. The method that it calls for every model that is built is the
    one place where this can be said.
    """
    accept = PreTrainedModel.get_correct_attn_implementation
    if hasattr(accept, "__wrapped__"):
        return

    @functools.wraps(accept)
    def checked(self: Any, requested_attention: str | None, *args: Any, **options: Any) -> str:
        if requested_attention == NAME and not self._can_set_attn_implementation():
            raise ValueError(
                f'attn_implementation="{NAME}": {type(self).__name__} computes its attention '
                "itself instead of asking the registry of transformers, and would ignore this"
            )
        return str(accept(self, requested_attention, *args, **options))

    PreTrainedModel.get_correct_attn_implementation = checked  # type: ignore[method-assign]


_refuse_to_be_ignored()
AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, padding_mask)
