"""Translation of settings under verl's names to those of this package, with a report of every key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast, get_args

from agent_loop.config.validation import all_keys
from agent_loop.config.verl.rows import (
    MISSING,
    Effect,
    Given,
    Only,
    Row,
    Translate,
    Values,
    default_settings,
    value_at,
)
from agent_loop.config.verl.table import OFF, TABLE, row_of
from agent_loop.config.whole import Config
from agent_loop.errors import ConfigError
from agent_loop.files.plain_values import merge_mappings, resolve_interpolation, shown

Status: TypeAlias = Literal["taken over", "not needed", "different", "not supported", "unknown"]
Path: TypeAlias = tuple[str, ...]

_OWN_KEYS = frozenset(all_keys(Config))


@dataclass(frozen=True, slots=True)
class Report:
    """Outcome of the conversion of a key, or of several keys with one counterpart."""

    given: Mapping[str, Any]
    status: Status
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings of this package, by dotted key."""
    note: str = ""
    source: int = 0
    """Number of the last source with one of the keys."""


@dataclass(slots=True)
class Translation:
    """Settings of this package, with the keys that they come from."""

    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """The converted settings as nested mappings."""
    unknown: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keys that neither this package nor verl has, in nested mappings."""
    names: dict[str, str] = field(default_factory=dict[str, str])
    """Key of verl for each setting that comes from one."""
    reports: list[Report] = field(default_factory=list[Report])
    sources: dict[str, int] = field(default_factory=dict[str, int])
    """Number of the source of each setting."""

    def put(self, path: Path, value: Any, *, key: str, source: int) -> None:
        """Set a value, unless a later source has set it."""
        name = _name(path)
        if self.sources.get(name, -1) > source:
            return
        self.sources[name] = source
        self.names[name] = key
        inner = cast(Any, self.settings if _is_own(path) else self.unknown)
        for part in path[:-1]:
            if inner.get(part) is None:
                inner[part] = {}
            inner = inner[part]
            if not hasattr(inner, "get"):
                raise ConfigError(f"{key}: {part!r} is set to a value and also has keys; remove one of them")
        if value != {} or path[-1] not in inner:  # an empty mapping adds nothing to one that has keys
            inner[path[-1]] = value


def translate(sources: Sequence[Mapping[str, Any]], *, where: str) -> Translation:
    """Translate settings, which may have verl's names or those of this package. Later sources replace earlier ones."""
    tree: dict[str, Any] = {}
    given: dict[Path, int] = {}
    for number, source in enumerate(sources):
        tree = merge_mappings(tree, source)
        for path in _paths(source):
            given.pop(path, None)
            given[path] = number
    if "${" in repr(tree):
        known = merge_mappings(default_settings(), _translated_singly(tree, given).settings)
        tree = _like(resolve_interpolation(merge_mappings(known, tree), where=where), tree)
    found = _translated_singly(tree, given)
    for function in dict.fromkeys(row.ours for row in TABLE.values() if callable(row.ours)):
        _translate_together(found, tree, given, function)
    steps, epochs = (found.sources.get(f"trainer.total_{name}", -1) for name in ("steps", "epochs"))
    if steps >= epochs >= 0:
        found.settings["trainer"]["total_epochs"] = None
    return found


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted key as nested mappings."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        found = merge_mappings(found, value)
    return found


def _translated_singly(tree: Mapping[str, Any], given: Mapping[Path, int]) -> Translation:
    """Translate the keys that depend on no other key."""
    found = Translation()
    for path, source in given.items():
        value, row = value_at(tree, path), _row(path)
        if value is not MISSING and not (row and callable(row.ours)):
            _translate(found, path, value, row, source=source)
    return found


def _translate(found: Translation, path: Path, value: Any, row: Row | None, *, source: int) -> None:
    key, ours = _name(path), row.ours if row else Values("", {})
    note = row.note if row else ""
    if isinstance(ours, str | Values):
        target, value_here = path, value
        if row is not None:
            values = ours if isinstance(ours, Values) else Values(ours, {})
            target = (*values.target.split("."), *path[row.key.count(".") + 1 :])
            value_here = values.of(value)
            is_set = found.sources.get(_name(target)) == source
            if value_here is None and (not _accepts_none(target) or (value is None and is_set)):
                found.reports.append(Report({key: value}, "not needed", note="no value", source=source))
                return
        if value_here == {} and not _is_own(target):
            return
        found.put(target, value_here, key=key, source=source)
        status: Status = "taken over" if _is_own(target) else "unknown"
        found.reports.append(Report({key: value}, status, {_name(target): value_here}, note, source))
        return
    if isinstance(ours, Only):
        is_accepted = any(value == each for each in ours.accepted)
        status = "not needed" if is_accepted else "not supported"
        need = (
            "which is not supported"
            if ours.accepted[0] is None
            else f"but only {ours.accepted[0]!r} is supported"
        )
        note = "as here, or switched off" if is_accepted else f"{key} is {shown(value)}, {need}; {note}"
    else:
        status = "different" if ours is Effect.OTHER and value not in OFF.accepted else "not needed"
    found.reports.append(Report({key: value}, status, note=note, source=source))


def _translate_together(
    found: Translation, tree: Mapping[str, Any], given: Mapping[Path, int], function: Translate
) -> None:
    """Translate the keys of a function."""
    paths = [path for path in given if (row := _row(path)) is not None and row.ours is function]
    values = {_name(path): value_at(tree, path) for path in paths}
    values = {key: value for key, value in values.items() if value is not MISSING and value is not None}
    if not values:
        return
    source, key = given[paths[-1]], list(values)[-1]
    try:
        settings = function(Given(tree, found.settings))
    except ConfigError as error:
        found.reports.append(Report(values, "not supported", note=str(error), source=source))
        return
    for target, value in settings.items():
        inner = _paths(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) and value else [()]
        for rest in inner:
            found.put((*target.split("."), *rest), value_at(value, rest), key=key, source=source)
    row = next(row for row in TABLE.values() if row.ours is function)
    status: Status = "taken over" if settings else "not needed"
    note = row.note if settings else "switched off, or another key decides"
    found.reports.append(Report(values, status, settings, note, source))


def _row(path: Path) -> Row | None:
    """Return the row of a key; None if it is a key of this package without a row of its own, or unknown."""
    key = _name(path)
    row = row_of(key)
    return None if row is not None and row.key != key and _is_own(path) else row


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def _is_own(path: Path) -> bool:
    return any(_name(path[:length]) in _OWN_KEYS for length in range(1, len(path) + 1))


def _paths(values: Mapping[str, Any], above: Path = ()) -> Iterator[Path]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _paths(cast(Mapping[str, Any], value), (*above, key))
        else:
            yield (*above, key)


def _like(resolved: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resolved values of the keys that are given."""
    return {
        key: _like(resolved[key], cast(Mapping[str, Any], value))
        if isinstance(value, Mapping)
        else resolved[key]
        for key, value in given.items()
    }


def _accepts_none(path: Path) -> bool:
    """Return whether a setting can be None. An unknown one can."""
    section: Any = Config
    for part in path:
        fields = getattr(section, "model_fields", {})
        if part not in fields:
            return True
        section = fields[part].annotation
    return type(None) in get_args(section) or section is Any
