"""Load converted models that were saved by ``save_pretrained`` of transformers."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from espformer.integrations.candidates import MECHANISM
from espformer.integrations.convert import convert
from espformer.integrations.settings import mechanism_from_settings, stored_settings
from espformer.integrations.transformers import building_original
from espformer.integrations.transformers_places import NAME
from espformer.nn import Mechanism

__all__ = ["load_pretrained"]


def load_pretrained(
    model_class: Any, folder: str, mechanism: Mechanism | None = None, **options: Any
) -> nn.Module:
    """Load a converted model saved by ``save_pretrained``, with the parameters of its mechanisms.

    transformers loads the original model; this function then adds the mechanisms.

    Args:
        model_class: such as ``AutoModel``.
        folder: directory of the saved model, or its name on the hub.
        mechanism: required if the model was converted with a user-defined mechanism class, which
            the configuration cannot describe.
        options: passed to ``model_class.from_pretrained``.

    Returns:
        The converted model.

    Raises:
        ValueError: the directory does not hold a converted model.

    Example:
        >>> import tempfile
        >>> import espformer
        >>> from transformers import AutoModel, BertConfig
        >>> config = BertConfig(
        ...     hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
        >>> model = espformer.convert(AutoModel.from_config(config), espformer.nn.ESP())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)
        ...     model = load_pretrained(AutoModel, folder)
        >>> type(model.encoder.layer[0].attention.self.mechanism).__name__
        'ESP'
    """
    if not hasattr(model_class, "from_pretrained"):
        raise TypeError(
            "load_pretrained: model_class must be a class of transformers such as AutoModel, got "
            f"{model_class!r} (the class comes first, then the directory)"
        )
    path = Path(folder).expanduser()
    if not path.exists() and (path.is_absolute() or str(folder).startswith((".", "~"))):
        raise FileNotFoundError(f"load_pretrained: there is no directory {folder}")
    with _quiet_about_mechanisms(), building_original():
        model = model_class.from_pretrained(folder, **options)
    entries = _take_entries(model)
    if not entries:
        raise ValueError(f"load_pretrained: {folder} does not hold a converted model")
    found = _found(model, entries)
    if mechanism is None and any(settings is None for settings, _ in found.values()):
        raise ValueError(
            "load_pretrained: the configuration cannot describe the mechanism of this model; pass "
            "mechanism="
        )
    for settings, cross in _different(found.values()):
        chosen = {name for name, other in found.items() if other == (settings, cross)}
        stored = stored_settings(settings or {})
        made = mechanism_from_settings(stored) if mechanism is None else mechanism
        convert(
            model,
            made,
            where=lambda name, _, chosen=chosen: name in chosen,
            cross=cross,
            causal=False,
        )

    whole = cached_file(folder, "model.safetensors", _raise_exceptions_for_missing_entries=False)
    if whole is None:
        index = cached_file(folder, "model.safetensors.index.json")
        files = get_checkpoint_shard_files(folder, index)[0]
    else:
        files = [whole]
    marker = f".{MECHANISM}."
    saved: dict[str, dict[str, Tensor]] = {}
    for file in files:
        for key, tensor in load_file(file).items():
            owner, inside, name = key.partition(marker)
            if inside:
                saved.setdefault(owner, {})[name] = tensor
    for name in found:
        names = (_saved_name(model, name), name)
        exact = [n for n in names if n in saved]
        owner = next(iter(exact or [o for o in saved for n in names if _same(o, n)]), "")
        held = cast(nn.Module, getattr(model.get_submodule(name), MECHANISM))
        held.load_state_dict(saved.get(owner, {}))
    return cast(nn.Module, model)


@contextmanager
def _quiet_about_mechanisms() -> Iterator[None]:
    """Removes the keys of mechanisms from transformers' warning about unexpected keys."""

    def without(record: logging.LogRecord) -> bool:
        lines = record.getMessage().splitlines()
        others = [line for line in lines if f".{MECHANISM}." not in line]
        if len(others) < len(lines):
            record.msg, record.args = "\n".join(others), None
            return sum("|" in line for line in others) > 1  # more than the head of the table
        return True

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(without)
    try:
        yield
    finally:
        logger.removeFilter(without)


def _take_entries(model: nn.Module) -> list[tuple[Any, dict[str, Any]]]:
    """The configurations of the model and of its parts that contain a conversion entry, and the
    entries.

    The entry of CLIP's tower of images lies in the configuration of that tower.
    """
    entries: list[tuple[Any, dict[str, Any]]] = []
    for module in model.modules():
        config = getattr(module, "config", None)
        entry = getattr(config, NAME, None)
        if isinstance(entry, dict) and "modules" in entry:
            delattr(config, NAME)
            entries.append((config, entry))
    return entries


def _found(
    model: nn.Module, entries: list[tuple[Any, dict[str, Any]]]
) -> dict[str, tuple[Any, bool | None]]:
    """Modules that were converted in the saved model, by name: settings, and what `cross` was."""
    found = {}
    modules = dict(model.named_modules())
    for config, entry in entries:
        for root, converted in entry["modules"].items():
            roots = [
                name
                for name, module in modules.items()
                if type(module).__name__ == root and getattr(module, "config", None) is config
            ]
            for name, settings in converted.items():
                if len(roots) == 1:
                    there = [f"{roots[0]}.{name}" if roots[0] else name]
                else:
                    # Saved with another head: names begin differently.
                    there = [other for other in modules if _same(name, other)]
                there = [other for other in there if other in modules]
                if len(there) != 1:
                    raise ValueError(
                        f"load_pretrained: {name} of the {root} that was converted "
                        f"{'is not' if not there else 'could be several modules'} in this "
                        f"{type(model).__name__}; load it as {root}"
                    )
                cross = entry.get("cross", {}).get(root, {}).get(name)
                found[there[0]] = (settings, cross)
    return found


def _saved_name(model: Any, name: str) -> str:
    """Name of a module in files: transformers keeps those of older versions there."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return name
    marker = f".{MECHANISM}._"
    (key,) = revert_weight_conversion(model, {f"{name}{marker}": torch.zeros(1)})
    return str(key).removesuffix(marker)


def _same(name: str, other: str) -> bool:
    return name == other or name.endswith(f".{other}") or other.endswith(f".{name}")


def _different(items: Iterable[Any]) -> list[Any]:
    different: list[Any] = []
    for item in items:
        if item not in different:
            different.append(item)
    return different
