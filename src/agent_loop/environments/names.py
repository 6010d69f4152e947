"""Names of tasks in suites: `suite:task?option=value&option=value`."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias, get_args
from urllib.parse import unquote

from agent_loop.config import Section, parse_section
from agent_loop.environments.registry import SUITES, load_suite
from agent_loop.environments.splits import Split
from agent_loop.environments.suite import TaskSuite
from agent_loop.errors import ConfigError, did_you_mean
from agent_loop.files.plain_values import shown

Options: TypeAlias = dict[str, str]
_PREFIX = re.compile(r"([A-Za-z_][\w-]*):")


@dataclass(frozen=True, slots=True)
class TaskName:
    """A task of a suite, with its options."""

    text: str
    """The name as it was given."""
    suite: str
    task: str
    options: Section
    """Options of the suite."""
    split: Split | None = None
    """Part of the rows. None for all rows."""

    @property
    def data_source(self) -> str:
        """The name without options."""
        return f"{self.suite}:{self.task}"


def is_task_name(source: str) -> bool:
    """Return whether a source of rows is the name of a task, not a path or a function.

    A path that exists is never a name. A module that has the name of a suite cannot be named as a source.

    Raises:
        ConfigError: The source can only be a name, but there is no such suite.
    """
    prefix = _PREFIX.match(source)
    if prefix is None or Path(source).exists() or Path(prefix[1]).exists():
        return False
    name = prefix[1]
    if name in SUITES:
        return True
    has_options = bool(re.search(r"\?\w+=", source))
    is_near = bool(get_close_matches(name, SUITES, n=1)) and importlib.util.find_spec(name) is None
    if has_options or is_near:
        load_suite(name)
    return False


def parse_task_name(text: str, *, suite: TaskSuite | None = None) -> TaskName:
    """Parse a name.

    Args:
        text: `suite:task` or `suite:task?option=value&option=value`. Values may be percent-encoded.
        suite: The suite, if it was loaded before.

    Raises:
        ConfigError: There is no such suite, task or option, or the suite's package is not installed.
    """
    name, colon, rest = text.partition(":")
    suite = suite or load_suite(name)
    task, _, query = rest.partition("?")
    if not colon or not task:
        raise ConfigError(f"{text!r} names no task; give {name}:TASK{_examples(suite)}")
    given = _read_options(query, text=text)
    split = _read_split(given.pop("split", None), text=text)
    options = parse_section(suite.options, given, where=text)
    if suite.lists_tasks and task not in (tasks := suite.tasks()):
        raise ConfigError(f"{text!r}: the suite {name!r} has no task {task!r}{_nearest(task, tasks)}")
    return TaskName(text, name, task, options, split)


def _read_options(query: str, *, text: str) -> Options:
    options: Options = {}
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise ConfigError(f"{text!r}: {part!r} is not an option; give option=value")
        if key in options:
            raise ConfigError(f"{text!r} gives {key!r} twice; remove one of them")
        options[key] = unquote(value)
    return options


def _read_split(value: Any, *, text: str) -> Split | None:
    if value is not None and value not in get_args(Split):
        raise ConfigError(f"{text!r}: split is {shown(value)}; give {' or '.join(get_args(Split))}")
    return value


def _nearest(task: str, tasks: Sequence[str]) -> str:
    near = did_you_mean(task, tasks)
    return near if len(near) < 300 else f"; `agent-loop tasks` lists its {len(tasks)} tasks"


def _examples(suite: TaskSuite) -> str:
    tasks = suite.tasks()
    return f", for example {suite.name}:{tasks[0]}" if tasks else ""
