"""Turn names in a recipe into objects; arguments are checked before anything is built."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args, get_type_hints

from espformer.lab import data
from espformer.lab.errors import nearest
from espformer.lab.recipes.yaml_schema import KeyPath, Origins, Spec, parse
from espformer.models import CausalSoftmax, available_models, model_class
from espformer.models.blocks import check_sizes
from espformer.nn import MECHANISMS, Mechanism

# A decoder's own mechanism is part of the models.
_MECHANISMS: dict[str, type[Mechanism]] = {**MECHANISMS, "causal_softmax": CausalSoftmax}


def build_mechanism(
    spec: Spec | str | Mapping[str, Any],
    origins: Origins | None = None,
    path: KeyPath = ("mechanism",),
) -> Mechanism:
    """Return the mechanism that a recipe describes, not yet bound to the sizes of a layer.

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
    _check_name("mechanism", named.name, _MECHANISMS, origins, path)
    kind, here = _MECHANISMS[named.name], (*path, named.name)
    arguments = dict(named.arguments)
    check_arguments(kind.__init__, arguments, origins, here)
    for name, annotation in get_type_hints(kind.__init__).items():
        if annotation is Mechanism:  # such as the base of a differential one
            if name not in arguments:
                raise origins.error((*here, name), "this key is missing")
            arguments[name] = build_mechanism(arguments[name], origins, (*here, name))
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        raise origins.error(here, str(error)) from None


def has_sort_temperature(spec: Spec) -> bool:
    """Say whether the mechanism has a soft sort to anneal and harden."""
    return build_mechanism(spec).has_sort_temperature


def check_data(spec: Spec, origins: Origins, path: KeyPath) -> None:
    """Refuse a data set that does not exist, and options that it does not have."""
    _check_name("data set", spec.name, data.available(), origins, path)
    _check_given("option", spec.arguments, data.options(spec.name), origins, (*path, spec.name))


def check_model(spec: Spec, origins: Origins, path: KeyPath) -> None:
    """Refuse a model that does not exist, arguments that it does not take, and wrong sizes."""
    _check_name("model", spec.name, available_models(), origins, path)
    here, kind = (*path, spec.name), model_class(spec.name)
    check_arguments(kind, spec.arguments, origins, here, given=("mechanism",))
    annotations = get_type_hints(kind.__init__)
    for name, value in spec.arguments.items():
        if name.endswith("_mechanism"):
            build_mechanism(value, origins, (*here, name))
        elif _takes_integers(annotations[name]):
            try:
                check_sizes(kind.__name__, **{name: value})
            except (TypeError, ValueError) as error:
                raise origins.error((*here, name), str(error)) from None


def _takes_integers(annotation: Any) -> bool:
    """Whether an annotation is `int`, or made of it: `int | None`, `Sequence[int]`."""
    return annotation is int or any(map(_takes_integers, get_args(annotation)))


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
    _check_given("argument", arguments, names, origins, path)


def _check_name(
    what: str, name: str, known: Iterable[str], origins: Origins, path: KeyPath
) -> None:
    if name not in known:
        raise origins.error(path, f"no {what} is called '{name}', {nearest(name, known)}")


def _check_given(
    what: str, given: Iterable[str], known: Iterable[str], origins: Origins, path: KeyPath
) -> None:
    for name in given:
        if name not in known:
            hint = nearest(name, known)
            raise origins.error((*path, name), f"{path[-1]} takes no {what} '{name}', {hint}")
