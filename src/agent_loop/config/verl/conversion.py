"""Conversion of a start of verl's trainer to a configuration of this package, with a report of every key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.config.verl.launch import VerlLaunch
from agent_loop.config.verl.rollout_keys import ENGINES, R
from agent_loop.config.verl.rules import GPU_DEFAULTS, VERL_DEFAULTS
from agent_loop.config.verl.translation import KeyReport, Translation
from agent_loop.files.plain_values import merge_mappings

RULES = "agent_loop.integrations.verl.rules:default_compute_score"
"""The reward function that stands for verl's default, `default_compute_score`."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """Result of a conversion."""

    settings: Mapping[str, Any]
    """Settings of this package, in nested mappings."""
    reports: Sequence[KeyReport]
    """One report for each key that is given."""
    defaults: Sequence[KeyReport]
    """Reports of the defaults of verl, which are written because those of this package differ."""
    notes: Sequence[str]


def convert(launch: VerlLaunch) -> Conversion:
    """Return the settings of this package for a start of verl's trainer."""
    given = Translation(is_lenient=True)
    given.add(launch.values)
    keys = {report.key for report in given.reports}
    engine = given.own("rollout.engine")
    defaults = {**VERL_DEFAULTS, **(GPU_DEFAULTS if engine in ENGINES else {})}
    if given.verl("trainer.total_training_steps") is not None:
        del defaults["trainer.total_epochs"]
    missing = {key: value for key, value in defaults.items() if key not in keys}
    both = Translation(is_lenient=True)
    both.add(_nested(missing))
    default_reports, both.reports = both.reports, []
    both.add(launch.values)
    notes = list(launch.notes)
    settings = merge_mappings(_assumed(both, keys, notes), both.settings)
    reports = [_explained(report, launch.program) for report in _last(both.reports)]
    return Conversion(settings, reports, default_reports, notes)


def _explained(report: KeyReport, program: str) -> KeyReport:
    """Return the report of a key that only the program of a recipe reads with that explanation."""
    if report.status != "unknown" or not program or program.startswith("verl."):
        return report
    note = f"only {program} reads it, a trainer of its own; its code is not converted"
    return KeyReport(report.key, report.value, "not supported", note=note)


def _assumed(translation: Translation, keys: set[str], notes: list[str]) -> dict[str, Any]:
    """Return the settings that verl's trainer implies and no key says."""
    settings: dict[str, Any] = {}
    multi_turn = translation.own("rollout.multi_turn.tool_config_path") or translation.own(
        "rollout.multi_turn.interaction_config_path"
    )
    if multi_turn and f"{R}.agent.default_agent_loop" not in keys:
        settings["rollout.agent.default_agent_loop"] = "tool_agent"
        notes.append(
            "rows without agent_name run tool_agent, because tools or interactions are configured: "
            "rollout.agent.default_agent_loop"
        )
    if translation.own("reward.function") is None and not translation.own("reward.functions"):
        settings["reward.function"] = RULES
        notes.append(
            "rows are scored by the rule of their data_source: reward.function. As always here, it is called for "
            "trajectories that tools and interactions do not score"
        )
    return _nested(settings)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in values.items():
        inner: Any = value
        for part in reversed(key.split(".")):
            inner = {part: inner}
        nested = merge_mappings(nested, inner)
    return nested


def _last(reports: Sequence[KeyReport]) -> list[KeyReport]:
    """Return the last report of each key."""
    return list({report.key: report for report in reports}.values())
