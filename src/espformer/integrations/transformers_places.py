"""The places of mechanisms in a converted transformers model, and the entry in its
configuration.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from espformer.integrations.candidates import (
    MECHANISM,
    NOT_SELF,
    Candidate,
    Converted,
    restore_class,
)
from espformer.integrations.settings import settings_of
from espformer.integrations.transformers_modules import (
    class_name,
    is_cross,
    other_states,
    uses_registry,
)
from espformer.nn import Mechanism

__all__ = ["NAME", "PLACE", "Entry", "Place", "RegistryAttention", "describe", "finish", "revert"]

NAME = "espformer"
PLACE = "_espformer_place"


@dataclass
class Place:
    """The role of a module in a model of which something was converted.

    Attributes:
        base: the attention function that the model had.
        cross: whether it is cross-attention.
        given: what `cross` was given to convert.
        converted: whether it has a mechanism.
        settings: of the mechanism, None if a dictionary cannot hold them.
        root: class of the model that it was converted in.
        name: its name there.
        called: whether its mechanism was called in this forward.
    """

    base: str
    cross: bool
    given: bool | None = None
    converted: bool = False
    settings: dict[str, Any] | None = None
    root: str = ""
    name: str = ""
    called: bool = False


class Entry(dict[str, Any]):
    """The entry of a configuration while its model lives; saved and loaded, it is a dictionary.

    It says which modules of which classes of models have which mechanism. ``places`` are all
    modules that were looked at, ``before`` is the entry that was there.
    """

    def __init__(self, base: str, before: dict[str, Any] | None) -> None:
        super().__init__(base=base, modules={})
        self.places: list[Place] = []
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
        return Entry, (self["base"], self.before), self.__dict__, None, iter(self.items())


class RegistryAttention(Converted):
    """An attention module of transformers that is known to use the registry's attention
    function.
    """

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
        place = module.__dict__.get(PLACE)
        other = other_states(self.original, args, options)
        if place is not None and other is not None and place.cross != other:
            if other and not place.given:
                raise ValueError(f"espformer: this {self.original.__name__} {NOT_SELF}")
            place.cross = other
        if place is None or torch.compiler.is_compiling():
            return self.original.forward(module, *args, **options)
        place.called = False
        output = self.original.forward(module, *args, **options)
        if not place.called:
            raise RuntimeError(
                f"espformer: this {self.original.__name__} was converted and does not ask the "
                "registry of transformers for its attention: it computed softmax"
            )
        return output


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
        roots.setdefault(id(owner.config), (class_name(owner), f"{name}." if name else ""))
    registry = set()
    for name, module in model.named_modules():
        config = _config_of(name, module, owners)
        if id(config) not in configs:
            continue
        if not uses_registry(module) and id(module) not in chosen:
            continue
        entry = getattr(config, NAME, None)
        if not isinstance(entry, Entry):
            implementation = config._attn_implementation or "eager"
            entry = Entry("sdpa" if implementation == NAME else implementation, entry)
            setattr(config, NAME, entry)
        place = module.__dict__.get(PLACE)
        if place is None:
            place = module.__dict__[PLACE] = Place(entry["base"], is_cross(name, module))
            entry.places.append(place)
        if id(module) in chosen:
            place.given = chosen[id(module)].given
        if id(module) in chosen or place.converted:
            place.converted = True
            place.settings = settings_of(cast(Mechanism, getattr(module, MECHANISM)))
            place.root, prefix = roots.get(id(config), (class_name(model), ""))
            place.name = name.removeprefix(prefix)
            if uses_registry(module):
                registry.add(id(config))
    for config in configs.values():
        cast(Entry, getattr(config, NAME)).refresh()
        if id(config) in registry:
            config._attn_implementation_internal = NAME


def _config_of(name: str, module: nn.Module, owners: dict[str, PreTrainedModel]) -> Any:
    """The configuration that says which attention a module has: its own, or its model's."""
    if uses_registry(module):
        return module.config
    parts = name.split(".")
    around = (owners.get(".".join(parts[:depth])) for depth in reversed(range(len(parts))))
    return next((owner.config for owner in around if owner is not None), None)


def revert(module: nn.Module) -> bool:
    """Put the original computation back; False if it is there already."""
    return isinstance(module, RegistryAttention) and restore_class(module)


def finish(model: nn.Module) -> None:
    """Give the configurations of a reverted model their attention back."""
    for module in model.modules():
        place = module.__dict__.get(PLACE)
        if place is not None and not isinstance(module, Converted):
            place.converted = False
    for module in model.modules():
        entry = getattr(getattr(module, "config", None), NAME, None)
        # If only a part of the model was reverted, the rest stays converted.
        if isinstance(entry, Entry) and not entry.refresh():
            config = cast(Any, module.config)
            config._attn_implementation_internal = entry["base"]
            if entry.before is not None:
                setattr(config, NAME, entry.before)
            else:
                delattr(config, NAME)
    for module in model.modules():
        config = getattr(module, "config", None)
        if not isinstance(getattr(config, NAME, None), Entry):
            module.__dict__.pop(PLACE, None)
