"""Translation of verl's settings to those of this package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast, get_args

from agent_loop.config.validation import all_keys
from agent_loop.config.verl.group import Group
from agent_loop.config.verl.rollout_keys import ENGINES
from agent_loop.config.verl.rules import (
    GROUPS,
    OFF,
    ROLLOUT,
    VERL_RULES,
    Fixed,
    Refused,
    Rename,
    Rule,
    Unneeded,
    Words,
    rule_of,
)
from agent_loop.config.whole import Config
from agent_loop.errors import ConfigError
from agent_loop.files.plain_values import merge_mappings

VERL_NAMES: Mapping[str, str] = {
    key: rule.target for key, rule in VERL_RULES.items() if isinstance(rule, Rename)
}
"""Keys of verl, or their beginnings, and the keys here. The longest match applies."""

VERL_FIXED_VALUES: Mapping[str, Any] = {
    key: rule.value for key, rule in VERL_RULES.items() if isinstance(rule, Fixed)
}
"""Keys of verl that have a single possible value here. Another value is refused."""

VERL_VALUES: Mapping[str, tuple[str, Mapping[Any, Any]]] = {
    key: (rule.target, rule.values) for key, rule in VERL_RULES.items() if isinstance(rule, Words)
}
"""Keys of verl with other values than here: the key here, and the value here for each of verl's values."""

FREE_KEYS = (
    "engine_kwargs",
    *(f"engine_kwargs.{name}" for name in (*ENGINES, "trtllm")),
    "custom_reward_function.reward_kwargs",
    "runtime_env",
    "algorithm.reward_parts",
    "algorithm.by_data_source",
)
"""Ends of the names of mappings whose keys are the user's. Such a key may contain dots."""

Status: TypeAlias = Literal["same", "renamed", "translated", "not needed", "not supported", "unknown"]

_OWN_KEYS = frozenset(all_keys(Config))


@dataclass(frozen=True, slots=True)
class KeyReport:
    """Result of the translation of one key."""

    key: str
    value: Any
    status: Status
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings of this package, by dotted key."""
    note: str = ""


@dataclass(slots=True)
class Translation:
    """Settings under verl's names or the names of this package, read one source after the other.

    Args:
        is_lenient: Report keys that are not supported, instead of raising an error.
    """

    is_lenient: bool = False
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """Settings of this package so far, in nested mappings."""
    reports: list[KeyReport] = field(default_factory=list[KeyReport])
    """One report per key, in the order of the sources."""
    _given: dict[str, Any] = field(default_factory=dict[str, Any])
    _groups: list[Group] = field(default_factory=list[Group])
    """Groups with a key in any source so far."""
    _errors: dict[int, ConfigError] = field(default_factory=dict[int, ConfigError])
    """Errors of groups, which a later source may correct."""

    def add(self, values: Mapping[str, Any]) -> None:
        """Add a source, whose values replace those of the sources before it.

        Raises:
            ConfigError: A key of verl has a value that does not exist here.
        """
        new: dict[str, Any] = {}
        keys_of: dict[int, list[str]] = {}
        num_reports = len(self.reports)
        for key, value in _flatten(values):
            rule = _rule(key)
            if isinstance(rule, Group):
                self._remember(key, value)
                keys_of.setdefault(GROUPS.index(rule), []).append(key)
            else:
                self._apply(key, value, rule, new)
        self.settings = merge_mappings(self.settings, new)
        set_here = [key for key, _ in _flatten(new)]
        self._run_groups(keys_of, set_here=[*set_here, *(key for keys in keys_of.values() for key in keys)])
        set_here += _settings_of(self.reports[num_reports:])
        if "trainer.total_steps" in set_here:  # takes precedence, also over the epochs of an earlier source
            self.settings = merge_mappings(self.settings, {"trainer": {"total_epochs": None}})

    def finish(self) -> dict[str, Any]:
        """Return the settings of this package, in nested mappings.

        Raises:
            ConfigError: Keys of verl together have values that do not exist here.
        """
        for error in self._errors.values():
            raise error
        return self.settings

    def _run_groups(self, keys_of: Mapping[int, Sequence[str]], *, set_here: list[str]) -> None:
        """Translate the groups with a key in this source, and those that depend on a key in it."""
        for number, group in enumerate(GROUPS):
            is_affected = group in self._groups and any(
                key.startswith(tuple(group.depends)) for key in set_here if group.depends
            )
            if number in keys_of or is_affected:
                set_here += self._apply_group(group, keys_of.get(number, []))

    def verl(self, *keys: str) -> Any:
        """Return the value of the first of these keys of verl that is given; None if none is."""
        return next((self._given[key] for key in keys if self._given.get(key) is not None), None)

    def own(self, key: str) -> Any:
        """Return the value of a key of this package, or its default."""
        found: Any = self.settings
        for part in key.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return _default(key)
            found = cast(Any, found[part])
        return found

    def _remember(self, key: str, value: Any) -> None:
        old = self._given.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = merge_mappings(cast(Mapping[str, Any], old), cast(Mapping[str, Any], value))
        self._given[key] = value

    def _apply(self, key: str, value: Any, rule: Rule | None, target: dict[str, Any]) -> None:
        """Apply a rule that concerns a single key."""
        try:
            report = _report(key, value, rule)
            if self.is_lenient and value is None and not _accepts_none(_target_of(key, rule)):
                report = KeyReport(key, value, "not needed", note="it has no value")
        except ConfigError as error:
            if not self.is_lenient:
                raise
            report = KeyReport(key, value, "not supported", note=str(error))
        self.reports.append(report)
        if report.status == "unknown" and self.is_lenient:
            return
        for name, setting in report.settings.items():
            _put(target, name.split("."), setting)

    def _apply_group(self, group: Group, keys: Sequence[str]) -> list[str]:
        """Apply a group, and return the settings that it has changed."""
        if group not in self._groups:
            self._groups.append(group)
        try:
            found = dict(group.translate(self))
            self._errors.pop(GROUPS.index(group), None)
        except ConfigError as error:
            if not self.is_lenient:
                self._errors[GROUPS.index(group)] = error
            self.reports += [
                KeyReport(key, self._given[key], "not supported", note=str(error)) for key in keys
            ]
            return []
        for key in keys:
            status: Status = "translated" if found else "not needed"
            note = "" if found else "it is switched off, or another key decides"
            if list(found.items()) == [(key, self._given[key])]:
                status = "same"
            self.reports.append(KeyReport(key, self._given[key], status, found, note))
        new: dict[str, Any] = {}
        for name, setting in found.items():
            _put(new, name.split("."), setting)
        self.settings = merge_mappings(self.settings, new)
        return list(found)


def replace_verl_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with verl's keys replaced by those of this package. Both kinds may be mixed.

    Raises:
        ConfigError: A key of verl has a value that does not exist here.
    """
    translation = Translation()
    translation.add(values)
    return translation.finish()


def _settings_of(reports: Sequence[KeyReport]) -> list[str]:
    return [name for report in reports for name in report.settings]


def _rule(key: str) -> Rule | None:
    """Return the rule of a key; None if it is a key of this package without a rule of its own, or unknown."""
    found = rule_of(key)
    if found is None:
        return None
    name, rule = found
    return None if _is_own(key) and name != key else rule


def _is_own(key: str) -> bool:
    parts = key.split(".")
    return any(".".join(parts[:length]) in _OWN_KEYS for length in range(1, len(parts) + 1))


def _report(key: str, value: Any, rule: Rule | None) -> KeyReport:
    """Return the report of a key that depends on no other key.

    Raises:
        ConfigError: There is no counterpart.
    """
    if rule is None:
        return KeyReport(key, value, "same" if _is_own(key) else "unknown", {key: value})
    if isinstance(rule, Rename):
        target = _target_of(key, rule)
        status: Status = "same" if target == key else "renamed" if _is_own(target) else "unknown"
        return KeyReport(key, value, status, {target: value}, rule.note)
    if isinstance(rule, Words):
        if value is None:
            return KeyReport(key, value, "not needed", note="it has no value")
        if value not in rule.values and rule.others:
            raise ConfigError(f"{key} is {value!r}; {rule.others}")
        return KeyReport(key, value, "translated", {rule.target: rule.values.get(value, value)})
    if isinstance(rule, Fixed):
        if value != rule.value and value is not None:
            raise ConfigError(f"{key} is {value!r}, but only {rule.value!r} is supported; {rule.remedy}")
        return KeyReport(key, value, "not needed", note="it is always so here")
    if isinstance(rule, Refused):
        if value not in OFF:
            raise ConfigError(f"{key} is {value!r}, which is not supported; {rule.remedy}")
        return KeyReport(key, value, "not needed", note="it is switched off")
    assert isinstance(rule, Unneeded)
    return KeyReport(key, value, "not needed", note=rule.reason)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        is_open = not name.endswith(FREE_KEYS) or (
            name == f"{ROLLOUT}.engine_kwargs" and _is_by_engine(value)
        )
        if isinstance(value, Mapping) and value and is_open:
            flat += _flatten(cast(Mapping[str, Any], value), prefix=f"{name}.")
        else:
            flat.append((name, cast(Any, value)))
    return flat


def _target_of(key: str, rule: Rule | None) -> str:
    """Return the setting here that a key sets alone."""
    if isinstance(rule, Rename):
        found = rule_of(key)
        return rule.target + key[len(found[0]) if found else 0 :]
    return rule.target if isinstance(rule, Words) else key


def _accepts_none(key: str) -> bool:
    """Return whether a setting can be None. An unknown one can."""
    section: Any = Config
    for part in key.split("."):
        fields = getattr(section, "model_fields", {})
        if part not in fields:
            return True
        section = fields[part].annotation
    return type(None) in get_args(section) or section is Any


def _is_by_engine(value: Any) -> bool:
    """Return whether options are grouped by the name of the engine, as in verl."""
    return isinstance(value, Mapping) and all(
        f"engine_kwargs.{name}" in FREE_KEYS for name in cast(Any, value)
    )


def _default(key: str) -> Any:
    value: Any = Config()
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _put(target: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        inner = target.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(
                f"{'.'.join(path)}: {part!r} is set to a value and also has keys; remove one of them"
            )
        target = cast(dict[str, Any], inner)
    target[path[-1]] = value
