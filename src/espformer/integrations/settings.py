"""Convert a mechanism to a dictionary for a configuration file, and back."""

import inspect
from typing import Any

from espformer.nn import ESP, MECHANISMS, Mechanism
from espformer.nn.esp import former_settings
from espformer.ops.esp.options import OPTIONS

__all__ = ["mechanism_from_settings", "settings_of", "stored_settings"]

_CLASSES = {cls.__name__: cls for cls in MECHANISMS.values()}
# Always saved, even if they equal the defaults, because defaults may change.
_ALWAYS = ("sort_temperature", "inverse_temperature", "temperature_unit", "slicer")
# Arguments that a mechanism keeps under another name.
_KEPT_AS = {"slicer": "slicer_kind", "lambda_init": "lambda_schedule"}


def settings_of(mechanism: Mechanism) -> dict[str, Any] | None:
    """The arguments that recreate this mechanism, or None if a dictionary cannot hold them.

    They include everything that differs from the defaults, and always ESP's temperatures.

    Example:
        >>> from espformer.nn import Sinkhorn
        >>> settings_of(Sinkhorn(iterations=5))
        {'name': 'Sinkhorn', 'iterations': 5}
        >>> settings_of(ESP(sort_temperature=0.4, hard=True))["sort_temperature"]
        0.4
    """
    cls = type(mechanism)
    if _CLASSES.get(cls.__name__) is not cls:
        return None
    settings: dict[str, Any] = {"name": cls.__name__}
    for argument, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            continue  # a short form of another one
        # The initial value of a learnt temperature is among the options.
        option = isinstance(mechanism, ESP) and argument in OPTIONS
        holder: Any = mechanism.options if option else mechanism
        value = getattr(holder, _KEPT_AS.get(argument, argument))
        if isinstance(value, Mechanism):
            value = settings_of(value)
            if value is None:
                return None
        elif argument == "slicer" and value == "given":
            return None
        if value != parameter.default or (cls is ESP and argument in _ALWAYS):
            settings[argument] = value
    return settings


def stored_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a saved model, completed by the defaults of the version that saved it.

    Example:
        >>> stored_settings({"name": "ESP", "hard": True})["temperature_unit"]
        'absolute'
    """
    if settings.get("name", "ESP") == "ESP":
        return former_settings(settings)
    if isinstance(settings.get("base"), dict):
        return settings | {"base": stored_settings(settings["base"])}
    return settings


def mechanism_from_settings(settings: dict[str, Any]) -> Mechanism:
    """The mechanism that a dictionary describes: ``name`` is its class, the rest its arguments.

    Example:
        >>> mechanism_from_settings({"name": "Sinkhorn", "iterations": 5})
        Sinkhorn(iterations=5, epsilon=1.0)
    """
    arguments = dict(settings)
    name = arguments.pop("name", "ESP")
    if name not in _CLASSES:
        raise ValueError(
            f"settings of a mechanism: name must be one of {', '.join(_CLASSES)}, got {name!r}"
        )
    if isinstance(arguments.get("base"), dict):
        arguments["base"] = mechanism_from_settings(arguments["base"])
    try:
        return _CLASSES[name](**arguments)
    except TypeError as error:
        raise ValueError(f"settings of a mechanism: {error}") from error
