"""Environments of verifiers as a suite of tasks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

from pydantic import ConfigDict

from agent_loop.config import Positive, Section
from agent_loop.environments.suite import TaskSuite, option_value
from agent_loop.environments.verifiers.process import EnvironmentSpec, read_rows
from agent_loop.errors import ConfigError


class VerifiersOptions(Section):
    """Options of an environment. Further options belong to the environment's own configuration."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    python: str = ""
    """Path of the interpreter that has verifiers. "" is the running one."""
    size: Positive | None = None
    """Number of rows. None takes all tasks of the environment."""


class VerifiersSuite(TaskSuite):
    """Environments of verifiers, which run in an interpreter of their own."""

    name = "verifiers"
    extra = "verifiers"
    summary = "environments of verifiers: verifiers:PACKAGE or verifiers:FILE.py, with ?python= of their interpreter"
    options: ClassVar[type[Section]] = VerifiersOptions
    reward_parts: ClassVar[Mapping[str, str]] = {
        "reward functions of the environment": "weighted value of each, by its name; the reward is their sum"
    }
    agent_name = "verifiers"
    lists_tasks = False

    def tasks(self) -> Sequence[str]:
        return ()

    def rows(self, task: str, options: Any) -> Iterator[dict[str, Any]]:
        place: dict[str, Any] = {
            "env": str(Path(task).resolve()) if task.endswith(".py") else task,
            "settings": nested_settings(options.model_extra or {}),
            "python": options.python,
        }
        spec = EnvironmentSpec(
            place["env"], json.dumps(place["settings"], sort_keys=True), options.python or sys.executable
        )
        for row in read_rows(spec, size=options.size):
            messages = row.pop("messages")
            yield {"raw_prompt": messages, "task": {**place, **row}}

    def identity(self, row: Mapping[str, Any]) -> str:
        return str(row["task"]["key"])


def nested_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with dotted names, such as `taskset.split`, as nested dicts. Values are read as JSON if they are.

    Raises:
        ConfigError: An option is both a value and a group of options.
    """
    settings: dict[str, Any] = {}
    for name, value in options.items():
        *groups, last = name.split(".")
        group = settings
        for part in groups:
            inner: Any = group.setdefault(part, {})
            if not isinstance(inner, dict):
                raise ConfigError(
                    f"options of verifiers: {part} is {inner!r}, so {name} cannot be set; remove one"
                )
            group = cast(dict[str, Any], inner)
        group[last] = option_value(value)
    return settings
