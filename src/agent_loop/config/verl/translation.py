"""Translation of settings under verl's names to those of this package, with a report of every key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Literal, TypeAlias, cast, get_args

import yaml

from agent_loop.config.validation import all_keys
from agent_loop.config.verl.combined import COMBINED
from agent_loop.config.verl.rows import MISSING, Given, Row, Translate, default_settings, keys_of, value_at
from agent_loop.config.whole import Config
from agent_loop.errors import ConfigError
from agent_loop.files.plain_values import merge_mappings, resolve_interpolation, shown

Status: TypeAlias = Literal["taken over", "not needed", "different", "not supported", "unknown"]
Path: TypeAlias = tuple[str, ...]

OFF: tuple[Any, ...] = (None, False, 0, -1, "", "null", "none", "None", "disable", "disabled", {}, [])
"""Values with which a key without a counterpart is accepted: it is switched off."""
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DATA: Mapping[str, Mapping[str, Any]] = yaml.load(
    (files("agent_loop.config.verl") / "table.yaml").read_text(encoding="utf-8"), _LOADER
)
VERL_DEFAULTS, GPU_DEFAULTS = _DATA["defaults"], _DATA["gpu_defaults"]


def _all_rows() -> Iterator[Row]:
    yield from COMBINED
    for note, sections in _DATA["not_needed"].items():
        for section, names in sections.items():
            yield from (Row(key=key, note=note) for key in keys_of(section, names))
    yield from (Row(key=key, note=remedy, accepted=OFF) for key, remedy in _DATA["unsupported"].items())
    yield from (Row(key=key, target=target) for key, target in _DATA["renamed"].items())
    yield from (Row(key=key, **columns) for key, columns in _DATA["values"].items())
    yield from (Row(key=key, **columns) for key, columns in _DATA["only"].items())
    yield from (Row(key=key, note=note, differs=True) for key, note in _DATA["different"].items())


TABLE: Mapping[str, Row] = {row.key: row for row in _all_rows()}
"""Rows of verl's settings by key."""
_OWN_KEYS = frozenset(all_keys(Config))


def row_of(key: str) -> Row | None:
    """Return the row of a key, or that of the section that it is in; None if there is none."""
    if key.endswith("_target_") or "@" in key:
        return TABLE["hydra"]
    parts = key.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((TABLE[name] for name in names if name in TABLE), None)


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
    for function in dict.fromkeys(row.function for row in COMBINED if row.function):
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
        if value is not MISSING and not (row and row.function):
            _translate(found, path, value, row, source=source)
    return found


def _translate(found: Translation, path: Path, value: Any, row: Row | None, *, source: int) -> None:
    key, target, here, usual = _name(path), path, value, row.note if row else ""

    def report(status: Status, note: str = "", /, **settings: Any) -> None:
        found.reports.append(Report({key: value}, status, settings, note or usual, source))

    if row is not None and row.accepted:
        if any(value == each for each in row.accepted):
            return report("not needed", "as here, or switched off")
        first = row.accepted[0]
        need = "which is not supported" if first is None else f"but only {first!r} is supported"
        return report("not supported", f"{key} is {shown(value)}, {need}; {row.note}")
    if row is not None and not row.target:
        return report("different" if row.differs and value not in OFF else "not needed")
    if row is not None:
        for theirs, remedy in row.refused.items():
            if theirs == value:
                return report("not supported", f"{key} is {value!r}; {remedy}")
        target = (*row.target.split("."), *path[row.key.count(".") + 1 :])
        here = next((ours for theirs, ours in row.values.items() if theirs == value), value)
        is_set = found.sources.get(_name(target)) == source
        if here is None and (not _accepts_none(target) or (value is None and is_set)):
            return report("not needed", "no value")
    if here != {} or _is_own(target):  # an empty mapping holds no unknown key
        found.put(target, here, key=key, source=source)
        report("taken over" if _is_own(target) else "unknown", **{_name(target): here})


def _translate_together(
    found: Translation, tree: Mapping[str, Any], given: Mapping[Path, int], function: Translate
) -> None:
    """Translate the keys of a function."""
    paths = [path for path in given if (row := _row(path)) is not None and row.function is function]
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
    row = next(row for row in TABLE.values() if row.function is function)
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
