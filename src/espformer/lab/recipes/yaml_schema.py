"""YAML to typed dataclasses, strictly: an unknown key is an error that names its line.

Values are checked against the annotations of the dataclass; a mistake is reported with its key path
and with where it was written: a line of a file, or the command line.
"""

import dataclasses
import functools
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from espformer.lab.errors import ConfigError, nearest

T = TypeVar("T")
KeyPath = tuple[str, ...]


# The parser in C reads ten times as fast; not every build of PyYAML has it.
class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML 1.2 scalars: `1e-3` is a number, and `no`, `on` and `off` are strings."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":bool", ":float"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^(?:[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?|[-+]?\.inf|\.nan)$"),
    list("-+.0123456789"),
)


@dataclass
class Origins:
    """The places where values were written, for messages."""

    file: str = ""
    places: dict[KeyPath, str] = field(default_factory=dict)

    def of(self, path: KeyPath) -> str:
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, self.file)

    def error(self, path: KeyPath, message: str) -> ConfigError:
        place = self.of(path)
        name = ".".join(path)
        return ConfigError(": ".join(part for part in (place, name, message) if part))


@dataclass(frozen=True)
class Spec:
    """A named thing with its arguments, written `name` or `{name: {argument: value}}`."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> Any:
        return {self.name: plain(self.arguments)} if self.arguments else self.name

    def __str__(self) -> str:
        inside = ", ".join(f"{key}={_show(value)}" for key, value in self.arguments.items())
        return f"{self.name}({inside})"


def _show(value: Any) -> str:
    if isinstance(value, Mapping) and len(value) == 1:
        name, arguments = next(iter(value.items()))
        return str(Spec(name, dict(arguments or {})))
    return f"{value:g}" if isinstance(value, float) else str(value)


def read_yaml(path: Path) -> tuple[dict[str, Any], Origins]:
    """Return the mapping in a file, and the line of each of its keys."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not a text file") from None
    origins = Origins(str(path))
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        _locate(node, (), origins)
        value = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{path}{line}: this is not YAML: {problem}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected keys and values, got {_kind_of(value)}")
    return value, origins


def read_text(text: str) -> Any:
    """One value as YAML reads it: `1e-3`, `true`, `[1, 2]`, `{esp: {sort_temperature: 0.1}}`."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        raise ConfigError(f"cannot read the value {text!r}; quote it as in YAML") from None


def _locate(node: Any, path: KeyPath, origins: Origins) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        here = (*path, str(key.value))
        place = f"{origins.file}, line {key.start_mark.line + 1}"
        if here in origins.places:
            raise ConfigError(f"{place}: {'.'.join(here)} is written twice")
        origins.places[here] = place
        _locate(value, here, origins)


def set_path(raw: dict[str, Any], path: KeyPath, value: Any, origins: Origins, place: str) -> None:
    """Set `raw["a"]["b"]` for the path (a, b); values along the path become mappings."""
    target = raw
    for depth, key in enumerate(path[:-1]):
        below = target.get(key)
        if isinstance(below, str):
            below = {below: {}}  # `softmax` is short for `{softmax: {}}`
        elif below is None:
            below = {}
        elif not isinstance(below, dict):
            raise ConfigError(
                f"{place}: {'.'.join(path)}: {'.'.join(path[: depth + 1])} is {_kind_of(below)}, "
                "it has no keys of its own"
            )
        target[key] = below
        target = below
    target[path[-1]] = value
    for depth in range(1, len(path)):
        before = origins.places.setdefault(path[:depth], place)
        if place not in before:
            origins.places[path[:depth]] = f"{before} and {place}"
    origins.places[path] = place


def parse(kind: type[T], raw: Any, origins: Origins, path: KeyPath = ()) -> T:
    """`raw` as a value of this annotation, or an error that says where and why not."""
    value: T = _parse(kind, raw, origins, path)
    return value


def _parse(kind: Any, raw: Any, origins: Origins, path: KeyPath) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return raw
    if origin in (Union, types.UnionType):
        if raw is None and type(None) in arguments:
            return None
        inner = [argument for argument in arguments if argument is not type(None)]
        return _parse(inner[0], raw, origins, path)
    if origin is Literal:
        if raw not in arguments:
            hint = nearest(str(raw), map(str, arguments))
            raise origins.error(path, f"got {raw!r}, {hint}")
        return raw
    if kind is Spec:
        return _parse_spec(raw, origins, path)
    if dataclasses.is_dataclass(kind):
        return _parse_dataclass(kind, raw, origins, path)
    if origin is list:
        _expect(isinstance(raw, list), "a list", raw, origins, path)
        return [_parse(arguments[0], item, origins, path) for item in raw]
    if origin is dict:
        _expect(isinstance(raw, dict), "keys and values", raw, origins, path)
        return {
            str(key): _parse(arguments[1], value, origins, (*path, str(key)))
            for key, value in raw.items()
        }
    return _parse_scalar(kind, raw, origins, path)


def _parse_scalar(kind: Any, raw: Any, origins: Origins, path: KeyPath) -> Any:
    if kind is bool:
        _expect(isinstance(raw, bool), "true or false", raw, origins, path)
        return raw
    number = isinstance(raw, int | float) and not isinstance(raw, bool)
    if kind is int:
        _expect(number and float(raw).is_integer(), "a whole number", raw, origins, path)
        return int(raw)
    if kind is float:
        _expect(number, "a number", raw, origins, path)
        return float(raw)
    _expect(isinstance(raw, str), "text", raw, origins, path)
    return raw


def _parse_spec(raw: Any, origins: Origins, path: KeyPath) -> Spec:
    if isinstance(raw, Spec):
        return raw
    if isinstance(raw, str):
        return Spec(raw)
    _expect(isinstance(raw, dict), "a name, or {name: {argument: value}}", raw, origins, path)
    if len(raw) != 1:
        names = " and ".join(map(str, raw)) or "nothing"
        where = ".".join(map(str, (*path, *raw)))
        hint = f"; an argument of {next(iter(raw))} is written {where}=..." if len(raw) == 2 else ""
        if hint and path == ("mechanism",):
            hint += ", and another row of the recipe is chosen by --mechanism"
        message = f"expected one name, {{name: {{argument: value}}}}, got {names}{hint}"
        raise origins.error(path, message)
    name, arguments = next(iter(raw.items()))
    arguments = {} if arguments is None else arguments
    here = (*path, str(name))
    _expect(isinstance(arguments, dict), "arguments and values", arguments, origins, here)
    return Spec(str(name), dict(arguments))


def _parse_dataclass(kind: Any, raw: Any, origins: Origins, path: KeyPath) -> Any:
    if isinstance(raw, kind):
        return raw
    _expect(isinstance(raw, dict), "keys and values", raw, origins, path)
    hints = _annotations(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key in raw:
        if key not in fields:
            hint = nearest(str(key), fields)
            raise origins.error((*path, str(key)), f"unknown key '{key}', {hint}")
    values = {}
    for name, f in fields.items():
        if name in raw:
            values[name] = _parse(hints[name], raw[name], origins, (*path, name))
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise origins.error((*path, name), "this key is missing")
    try:
        return kind(**values)
    except ValueError as error:
        raise origins.error((*path, *getattr(error, "path", ())), str(error)) from None


_annotations = functools.cache(get_type_hints)  # recipes are parsed once for each of their runs


def plain(value: Any) -> Any:
    """Return the same as mappings, lists and numbers: what YAML, JSON and a checkpoint can hold."""
    if isinstance(value, Spec):
        return value.plain()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _expect(condition: bool, what: str, raw: Any, origins: Origins, path: KeyPath) -> None:
    if not condition:
        raise origins.error(path, f"expected {what}, got {_kind_of(raw)}")


def _kind_of(raw: Any) -> str:
    if raw is None:
        return "nothing"
    if isinstance(raw, dict):
        return "keys and values"
    return "a list" if isinstance(raw, list) else repr(raw)
