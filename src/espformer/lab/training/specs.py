"""From names in a recipe to objects: mechanisms, and arguments checked before anything is built."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from espformer.lab import data
from espformer.lab.training.errors import nearest
from espformer.lab.training.strict import KeyPath, Origins, Spec, parse
from espformer.models import CausalSoftmax, available_models, model_class
from espformer.nn import ESP, Differential, Mechanism, Sinkhorn, Softmax

__all__ = [
    "MECHANISMS",
    "build_mechanism",
    "check_arguments",
    "check_data",
    "check_model",
    "mechanism_uses_esp",
]

MECHANISMS: dict[str, type[Mechanism]] = {
    "causal_softmax": CausalSoftmax,
    "differential": Differential,
    "esp": ESP,
    "sinkhorn": Sinkhorn,
    "softmax": Softmax,
}


def build_mechanism(
    spec: Spec | str | Mapping[str, Any],
    origins: Origins | None = None,
    path: KeyPath = ("mechanism",),
) -> Mechanism:
    """The mechanism that a recipe describes, not yet bound to the sizes of a layer.

    Args:
        spec: ``softmax``, ``{esp: {sort_temperature: 1e-3}}`` or
            ``{differential: {base: softmax, lambda_init: 0.5}}``, where the base is itself one.
        origins: where the recipe was read, for messages.
        path: key path of `spec` in it.

    Example:
        >>> build_mechanism({"esp": {"sort_temperature": 1e-3}}).sort_temperature
        0.001
    """
    origins = origins or Origins()
    named = parse(Spec, dict(spec) if isinstance(spec, Mapping) else spec, origins, path)
    if named.name not in MECHANISMS:
        hint = nearest(named.name, MECHANISMS)
        raise origins.error(path, f"no mechanism is called '{named.name}', {hint}")
    here = (*path, named.name)
    arguments = dict(named.arguments)
    check_arguments(MECHANISMS[named.name].__init__, arguments, origins, here)
    if named.name == "differential":
        if "base" not in arguments:
            raise origins.error((*here, "base"), "this key is missing")
        arguments["base"] = build_mechanism(arguments["base"], origins, (*here, "base"))
    try:
        return MECHANISMS[named.name](**arguments)
    except (TypeError, ValueError) as error:
        raise origins.error(here, str(error)) from None


def mechanism_uses_esp(spec: Spec) -> bool:
    """Whether there is a sort temperature in it to anneal."""
    base = spec.arguments.get("base")
    if spec.name == "differential" and base is not None:
        return mechanism_uses_esp(parse(Spec, base, Origins()))
    return spec.name == "esp"


def check_data(spec: Spec, origins: Origins, path: KeyPath) -> None:
    """Refuse a data set that does not exist, and options that it does not have."""
    if spec.name not in data.available():
        hint = nearest(spec.name, data.available())
        raise origins.error(path, f"no data set is called '{spec.name}', {hint}")
    known = data.options(spec.name)
    for name in spec.arguments:
        if name not in known:
            hint = nearest(name, known)
            raise origins.error(
                (*path, spec.name, name), f"{spec.name} takes no option '{name}', {hint}"
            )


def check_model(spec: Spec, origins: Origins, path: KeyPath) -> None:
    """Refuse a model that does not exist, and arguments that it does not take."""
    if spec.name not in available_models():
        hint = nearest(spec.name, available_models())
        raise origins.error(path, f"no model is called '{spec.name}', {hint}")
    here = (*path, spec.name)
    check_arguments(model_class(spec.name), spec.arguments, origins, here, given=("mechanism",))
    for name, value in spec.arguments.items():
        if name.endswith("_mechanism"):
            build_mechanism(value, origins, (*here, name))


def check_arguments(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    origins: Origins,
    path: KeyPath,
    given: tuple[str, ...] = (),
) -> None:
    """Refuse arguments that `function` does not take, and say which it takes.

    Args:
        function: what will be called.
        arguments: keyword arguments of a recipe.
        origins: where the recipe was read.
        path: key path of `arguments` in it.
        given: parameters that the caller fills in, which a recipe may not.
    """
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    names = [name for name in parameters if name != "self" and name not in given]
    for name in arguments:
        if name not in names:
            hint = nearest(name, names)
            raise origins.error((*path, name), f"{path[-1]} takes no argument '{name}', {hint}")
