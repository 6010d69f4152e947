"""YAML, JSON and overrides from users, with an error for each problem."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import partial, reduce
from itertools import count
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agent_loop.errors import ConfigError, did_you_mean

MAX_VALUES = 100_000
"""Number of parts of a JSON schema whose references are resolved."""
HALVES = re.compile("[\ud800-\udfff]")
"""Halves of surrogate pairs, which JSON can represent and UTF-8 cannot encode."""
MAX_SHOWN = 200
"""Number of characters of a value in an error message."""
_FAULTS = (
    yaml.YAMLError,
    OmegaConfBaseException,
    ValueError,
    TypeError,
    OSError,
    LookupError,
    RecursionError,
)
"""Errors of OmegaConf and its parsers for an invalid text."""


class YamlLoader(yaml.SafeLoader):
    """Loader of YAML 1.2, in which `NO`, `12:30` and dates are text, and `1e-4` is a number. A key may occur once."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for number, (tag, name) in enumerate(keys):
            if (tag, name) in keys[:number] and not tag.endswith(":merge"):
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {name!r} is there twice", node.start_mark
                )
        return super().construct_mapping(node, deep=deep)


YamlLoader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag.rpartition(":")[2] in ("null", "merge")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, _form, _first in (
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", "[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
):
    cast(Any, YamlLoader).add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(f"({_form})$"), list(_first)
    )


def without_halves(text: str) -> str:
    """Return the text with a replacement character (U+FFFD) for each half of a surrogate pair."""
    return HALVES.sub("\N{REPLACEMENT CHARACTER}", text)


def read_yaml(path: str | Path, *, what: str, resolve: bool = False) -> Any:
    """Return the plain values of a YAML file. An empty file gives an empty mapping.

    Args:
        path: Path, relative to the working directory.
        what: Kind of the file for error messages, such as `config file`.
        resolve: Resolve `${...}` interpolation, as OmegaConf does.
    """
    named = f"{what} {str(path)!r}"
    if not Path(path).is_file():
        found = "is a folder" if Path(path).is_dir() else "does not exist"
        folder = Path(path).parent
        others = [str(file) for file in folder.glob("*.y*ml")] if folder.is_dir() else []
        raise ConfigError(f"{named} {found}{did_you_mean(str(path), others)}; give the path of a YAML file")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{named} cannot be read as text: {error}") from error
    try:
        values: Any = yaml.load(text, YamlLoader)
        if values is not None and not isinstance(values, dict | list):
            raise ValueError(f"it holds the single value {shown(text.strip())}, where keys or a list belong")
        return OmegaConf.to_container(
            OmegaConf.create({} if values is None else cast(Any, values)), resolve=resolve
        )
    except _FAULTS as error:
        raise ConfigError(f"{named} is not valid YAML: {reason(error)}") from error


def parse_override(text: str) -> dict[str, Any]:
    """Return the nested mappings of a `key=value` override."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override {text!r} is not of the form key=value, as in actor.lr=1e-4")
    try:
        made = OmegaConf.create({})
        OmegaConf.update(made, key, yaml.load(value, YamlLoader))
        return cast(dict[str, Any], OmegaConf.to_container(made))
    except _FAULTS as error:
        raise ConfigError(f"override {shown(text)} cannot be read: {reason(error)}") from error


def merge_mappings(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings merged key by key, with the values of `above` where both have one."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = (
            merge_mappings(cast(Mapping[str, Any], old), cast(Mapping[str, Any], value)) if both else value
        )
    return merged


def merge_overrides(below: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return nested mappings with `key=value` overrides merged over them."""
    return reduce(merge_mappings, map(parse_override, overrides), dict(below))


def resolve_interpolation(values: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return the values with every `${...}` resolved, as OmegaConf does."""
    try:
        return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(dict(values)), resolve=True))
    except _FAULTS as error:
        raise ConfigError(f"{where}: {reason(error)}") from error


def parse_json(text: str | bytes) -> Any:
    """Return the value of a user's JSON text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise ValueError(f"{error.msg} at {place}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(reason(error)) from error


def without_references(schema: Mapping[str, Any], *, root: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a JSON schema with its definitions in the place of the references to them.

    Many chat templates show a schema in parts, so that the model would not see the definitions. A definition inside
    itself is shown by its type and description alone. A schema that would have more than `MAX_VALUES` parts is
    returned unchanged.

    Args:
        schema: The schema.
        root: Document that holds the definitions; the schema itself if None.
    """
    if "$ref" not in str(schema):
        return dict(schema)
    try:
        resolved = _resolved(schema, root=root or schema, parents=(), num_left=count(MAX_VALUES, -1))
    except (OverflowError, RecursionError):
        return dict(schema)
    return {key: value for key, value in resolved.items() if key not in ("$defs", "definitions")}


def _resolved(node: Any, *, root: Mapping[str, Any], parents: tuple[str, ...], num_left: count[int]) -> Any:
    if next(num_left) < 0:
        raise OverflowError
    resolve = partial(_resolved, root=root, parents=parents, num_left=num_left)
    if isinstance(node, list):
        return [resolve(item) for item in cast(list[Any], node)]
    if not isinstance(node, Mapping):
        return node
    schema = dict(cast(Mapping[str, Any], node))
    reference: Any = schema.get("$ref")
    target = _definition(root, reference) if isinstance(reference, str) else None
    below: dict[str, Any] = {}
    if target is not None and reference in parents:
        below = {key: target[key] for key in ("type", "description") if key in target}
    elif target is not None:
        below = _resolved(target, root=root, parents=(*parents, reference), num_left=num_left)
    if target is not None:
        del schema["$ref"]
    read: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "patternProperties") and isinstance(value, Mapping):
            read[key] = {name: resolve(inner) for name, inner in cast(Mapping[str, Any], value).items()}
        elif key in ("default", "enum", "const", "examples", "$defs", "definitions"):
            read[key] = value
        else:
            read[key] = resolve(value)
    return {**below, **read}


def _definition(root: Mapping[str, Any], reference: str) -> Mapping[str, Any] | None:
    """Return the part of a schema that a reference such as `#/$defs/Name` names, or None if it names none."""
    found: Any = root if reference.startswith("#/") else None
    for part in reference.removeprefix("#/").split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        found = cast(Mapping[str, Any], found).get(name) if isinstance(found, Mapping) else None
    return cast(Mapping[str, Any], found) if isinstance(found, Mapping) else None


def shown(value: Any) -> str:
    """Return the repr of a value for an error message: on one line and truncated. Never raises."""
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # noqa: BLE001  (a failing repr must not hide the error about the value)
        return f"<a {type(value).__name__} that cannot be shown: {type(error).__name__}>"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def reason(error: BaseException) -> str:
    """Return a parser's reason for refusing a text, in the user's words."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        mark = error.problem_mark
        return f"{error.problem} at line {mark.line + 1} column {mark.column + 1}"
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {str(error).splitlines()[0]}"
    if isinstance(error, ValueError) and "set_int_max_str_digits" in str(error):
        return "it holds an integer of thousands of digits"
    return " ".join(str(error).split())
