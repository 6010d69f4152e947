"""Read YAML and JSON that users write, with bounds on depth and size, and an error for everything that is wrong.

Parsers recurse: a file that is nested deeply enough ends CPython with a segmentation fault. So the depth of a text is
bounded before a parser sees the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agent_loop.errors import ConfigError

MAX_DEPTH = 50
"""Lists and mappings inside one another, in configuration and tool files."""
MAX_VALUES = 100_000
"""Values of one such file, each alias counted as all that it stands for."""
MAX_DATA_DEPTH = 200
"""The same as `MAX_DEPTH`, for rows of data."""
LONGEST_NUMBER = re.compile(r"[-+]?[0-9a-fA-FxoXO_:]{1000,}")
"""A plain scalar that fits this is taken for a number of thousands of digits, in whatever base."""
UNUSABLE = re.compile("[\0\ud800-\udfff]")
MAX_SHOWN = 200
"""Characters of a value that an error shows."""
_LOADER: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_FAULTS = (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, OSError, RecursionError)
"""Errors of OmegaConf and its parsers for a text that they cannot read."""


def read_yaml(path: str | Path, *, what: str, resolve: bool = False) -> Any:
    """Return the plain values of a YAML file; an empty file gives an empty mapping.

    Args:
        path: Relative to where the command runs.
        what: What the file is, for errors, as in `config file`.
        resolve: Resolve `${...}` interpolation, as OmegaConf does.

    Raises:
        ConfigError: The file is missing, is not YAML, or is nested too deeply.
    """
    named = f"{what} {str(path)!r}"
    if not Path(path).is_file():
        found = "is a folder" if Path(path).is_dir() else "does not exist"
        raise ConfigError(f"{named} {found}; give the path of a YAML file")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{named} cannot be read as text: {error}") from error
    try:
        if _scan_yaml(text):
            raise ValueError(f"it holds the single value {shown(text.strip())}, where keys or a list belong")
        return OmegaConf.to_container(OmegaConf.load(StringIO(text)), resolve=resolve)
    except _FAULTS as error:
        raise ConfigError(f"{named} is not valid YAML: {reason(error)}") from error


def parse_override(text: str) -> dict[str, Any]:
    """Return what one `key=value` says, as nested mappings.

    Raises:
        ConfigError: The text has another form, or its value is not YAML.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override {text!r} is not of the form key=value, as in actor.lr=1e-4")
    try:
        if len(re.findall(r"[.\[]", key)) >= MAX_DEPTH:
            raise ValueError(f"the key has more than {MAX_DEPTH} parts")
        _scan_yaml(value)
        return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.from_dotlist([text])))
    except (*_FAULTS, LookupError) as error:
        raise ConfigError(f"override {shown(text)} cannot be read: {reason(error)}") from error


def resolve_interpolation(values: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return the values with every `${...}` resolved, as OmegaConf does.

    Raises:
        ConfigError: An interpolation leads nowhere, in a circle, or is not written correctly.
    """
    try:
        return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(dict(values)), resolve=True))
    except _FAULTS as error:
        raise ConfigError(f"{where}: {reason(error)}") from error


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text that a user wrote.

    Raises:
        ValueError: The text is not JSON, is nested too deeply, or holds an integer of thousands of digits. The message
            says which, on one line.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise ValueError(f"{error.msg} at {place}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(reason(error)) from error


def depth_fault(value: Any, *, max_depth: int = MAX_DATA_DEPTH) -> str | None:
    """Return what is wrong with a value that is nested more deeply than `max_depth`; None if nothing is."""
    open_values: list[Iterator[Any]] = [iter([value])]
    while open_values:
        for inner in open_values[-1]:
            if isinstance(inner, (Mapping, list, tuple)):
                if len(open_values) > max_depth:
                    return f"it is nested more than {max_depth} deep"
                mapping = isinstance(inner, Mapping)
                parts = cast(Mapping[Any, Any], inner).values() if mapping else cast(Iterable[Any], inner)
                open_values.append(iter(parts))
                break
        else:
            open_values.pop()
    return None


def shown(value: Any) -> str:
    """Return the value as an error shows it: on one line, cut, whatever its `repr` does."""
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # noqa: BLE001  (a repr that raises must not hide what is wrong with the value)
        return f"<a {type(value).__name__} that cannot be shown: {type(error).__name__}>"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def reason(error: BaseException) -> str:
    """Return why a parser refused a text, in the user's words."""
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


def _scan_yaml(text: str) -> bool:
    """Return whether the text is a single value, and neither a list nor a mapping.

    Raises:
        ValueError: Values are nested too deeply, or are too many once aliases are expanded.
    """
    open_values, is_scalar = [_Size()], False
    anchored: dict[str, _Size | None] = {}
    for event in cast(Iterator[Any], cast(Any, yaml).parse(text, Loader=_LOADER)):
        if isinstance(event, yaml.CollectionStartEvent):
            open_values.append(_Size(anchor=event.anchor))
            if event.anchor is not None:
                anchored[event.anchor] = None
        elif isinstance(event, yaml.CollectionEndEvent):
            ended = open_values.pop()
            open_values[-1].add(ended)
            if ended.anchor is not None:
                anchored[ended.anchor] = ended
        elif isinstance(event, yaml.AliasEvent):
            meant = anchored.get(event.anchor, _Size())
            if meant is None:
                raise ValueError(f"the alias *{event.anchor} stands inside of what it stands for")
            open_values[-1].add(meant)
        elif isinstance(event, yaml.ScalarEvent):
            if event.implicit[0] and LONGEST_NUMBER.fullmatch(event.value):
                raise ValueError("it holds an integer of thousands of digits")
            if UNUSABLE.search(event.value):
                raise ValueError(
                    "it holds a zero character or half a surrogate, which no name and no file can hold"
                )
            open_values[-1].num_values += 1
            is_scalar = is_scalar or (len(open_values) == 1 and bool(event.value))
            if event.anchor is not None:
                anchored[event.anchor] = _Size()
        else:
            continue
        if len(open_values) - 1 + open_values[-1].depth > MAX_DEPTH:
            raise ValueError(f"its values are nested more than {MAX_DEPTH} deep")
        if open_values[-1].num_values > MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES} values once its aliases are expanded")
    return is_scalar


class _Size:
    """How many values a list or mapping of YAML holds, itself included, and how deep they are nested below it."""

    def __init__(self, *, anchor: str | None = None) -> None:
        self.anchor = anchor
        self.num_values = 1
        self.depth = 0

    def add(self, inner: _Size) -> None:
        self.num_values += inner.num_values
        self.depth = max(self.depth, inner.depth + 1)
