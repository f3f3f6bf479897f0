"""Loading of converted models that ``save_pretrained`` of transformers has saved."""

import functools
from collections.abc import Iterable
from typing import Any, cast

from safetensors.torch import load_file
from torch import nn
from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from espformer.integrations.candidates import MECHANISM
from espformer.integrations.convert import convert
from espformer.integrations.settings import mechanism_from_settings
from espformer.integrations.transformers import NAME
from espformer.nn import Mechanism

__all__ = ["load_pretrained"]


def load_pretrained(
    model_class: Any, folder: str, mechanism: Mechanism | None = None, **options: Any
) -> nn.Module:
    """Load a converted model that ``save_pretrained`` saved, with what its mechanisms learnt.

    On the way transformers calls the keys of the mechanisms unexpected: it loads the original, and
    this function the rest.

    Args:
        model_class: such as ``AutoModel``.
        folder: where the model was saved, or its name on a hub.
        mechanism: needed if the model was converted with a mechanism of one's own class, which its
            configuration cannot describe.
        options: for ``model_class.from_pretrained``.
    """
    model = model_class.from_pretrained(folder, **options)
    modules = (getattr(model.config, NAME, None) or {}).get("modules")
    if modules is None:
        raise ValueError(f"load_pretrained: {folder} does not hold a converted model")
    if mechanism is None and None in modules.values():
        raise ValueError(
            "load_pretrained: the configuration cannot describe the mechanism of this model; pass "
            "mechanism="
        )
    delattr(model.config, NAME)
    for settings in _different(modules.values()):
        names = [name for name, other in modules.items() if other == settings]
        made = mechanism_from_settings(settings or {}) if mechanism is None else mechanism
        convert(model, made, where=functools.partial(_chosen, names), cross=True)

    whole = cached_file(folder, "model.safetensors", _raise_exceptions_for_missing_entries=False)
    if whole is None:
        index = cached_file(folder, "model.safetensors.index.json")
        files = get_checkpoint_shard_files(folder, index)[0]
    else:
        files = [whole]
    marker = f".{MECHANISM}."
    saved = {k: v for file in files for k, v in load_file(file).items() if marker in k}
    for name, module in model.named_modules():
        if _chosen(list(modules), name, module) and hasattr(module, MECHANISM):
            mine = {
                key.partition(marker)[2]: tensor
                for key, tensor in saved.items()
                if _chosen([key.partition(marker)[0]], name, module)
            }
            cast(nn.Module, getattr(module, MECHANISM)).load_state_dict(mine)
    return cast(nn.Module, model)


def _chosen(names: list[str], name: str, module: nn.Module) -> bool:
    """Whether a module is one of these; names begin differently in a model with a head."""
    return any(name == n or name.endswith(f".{n}") or n.endswith(f".{name}") for n in names)


def _different(items: Iterable[Any]) -> list[Any]:
    different: list[Any] = []
    for item in items:
        if item not in different:
            different.append(item)
    return different
