"""Rows of tasks by name, `suite:task?option=value&option=value`, and of folders of tasks."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args
from urllib.parse import unquote

from agent_loop.config import Section, parse_section
from agent_loop.environments.harbor import harbor_rows
from agent_loop.environments.suite import TaskSuite
from agent_loop.errors import AgentLoopError, ConfigError, DataError, did_you_mean
from agent_loop.files.plain_values import shown
from agent_loop.registries import construct, load_class
from agent_loop.runtime.describe import describe_error

SUITES: Mapping[str, str] = {
    "agentdojo": "agent_loop.environments.agentdojo:AgentDojoSuite",
    "bfcl": "agent_loop.environments.bfcl:BfclSuite",
    "gymnasium": "agent_loop.environments.gymnasium:GymnasiumSuite",
    "reasoning_gym": "agent_loop.environments.reasoning_gym:ReasoningGymSuite",
    "openenv": "agent_loop.environments.openenv:OpenEnvSuite",
    "tau2": "agent_loop.environments.tau2:Tau2Suite",
    "textarena": "agent_loop.environments.textarena:TextArenaSuite",
    "verifiers": "agent_loop.environments.verifiers:VerifiersSuite",
}
"""Suites by name. Each is imported when it is first used."""
Options: TypeAlias = dict[str, str]
_PREFIX = re.compile(r"([A-Za-z_][\w-]*):")
Split: TypeAlias = Literal["train", "val"]
VAL_SHARE = 10
"""One in so many tasks belongs to `val`, all others to `train`."""
MAX_SEARCHED = 100
"""Generated rows that are searched for each row of a split."""


def load_suite(name: str) -> TaskSuite:
    """Return the suite of a name."""
    if name not in SUITES:
        raise ConfigError(f"there is no suite of tasks named {name!r}{did_you_mean(name, SUITES)}")
    return construct(load_class(SUITES[name], base=TaskSuite, key="suite"), where=f"suite {name!r}")


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
    """Parse a name."""
    name, colon, rest = text.partition(":")
    suite = suite or load_suite(name)
    task, _, query = rest.partition("?")
    if not colon or not task:
        example = [f", for example {name}:{each}" for each in suite.tasks()[:1]]
        raise ConfigError(f"{text!r} names no task; give {name}:TASK{''.join(example)}")
    given = _read_options(query, text=text)
    split: Any = given.pop("split", None)
    if split is not None and split not in get_args(Split):
        raise ConfigError(f"{text!r}: split is {shown(split)}; give {' or '.join(get_args(Split))}")
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


def _nearest(task: str, tasks: Sequence[str]) -> str:
    near = did_you_mean(task, tasks)
    return near if len(near) < 300 else f"; `agent-loop tasks` lists its {len(tasks)} tasks"


def named_rows(source: str, workspace: Mapping[str, Any]) -> Iterator[tuple[str, Any]] | None:
    """Return the rows of a task by its name, with their locations. Return None for other sources."""
    if not is_task_name(source):
        return None
    suite = load_suite(source.partition(":")[0])
    rows = suite_rows(suite, parse_task_name(source, suite=suite))
    return ((f"{source} row {number}", row) for number, row in enumerate(rows, start=1))


def suite_rows(suite: TaskSuite, name: TaskName) -> Iterator[dict[str, Any]]:
    """Yield the rows of a task, with the columns that the loop reads."""
    added = {"agent_name": suite.agent_name, "environment": suite.name, "data_source": name.data_source}
    selected = select_rows(
        suite.rows(name.task, name.options),
        split=name.split,
        identity=suite.identity,
        size=getattr(name.options, "size", None),
        where=name.text,
    )
    try:
        for row in selected:
            prompt = row["raw_prompt"]
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            yield {**row, "raw_prompt": messages, **added}
    except AgentLoopError:
        raise
    except Exception as error:
        raise DataError(f"{name.text}: making its rows raised {describe_error(error)}") from error


def split_of(identity: str) -> Split:
    """Return the split of a task. It depends on its identity alone, so a repeated task is always in the same split."""
    digest = hashlib.sha256(identity.encode("utf-8", "surrogatepass")).digest()
    return "val" if int.from_bytes(digest[:8]) % VAL_SHARE == 0 else "train"


def select_rows(
    rows: Iterable[dict[str, Any]],
    *,
    split: Split | None,
    identity: Callable[[dict[str, Any]], str],
    size: int | None,
    where: str,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a split."""
    num_selected = num_searched = 0
    most = None if size is None else MAX_SEARCHED * size + 1000
    for row in rows:
        num_searched += 1
        if split is None or split_of(identity(row)) == split:
            num_selected += 1
            yield row
        if num_selected == size:
            return
        if num_searched == most:
            raise DataError(
                f"{where}: only {num_selected} of {num_searched} generated rows belong to split={split}, and "
                f"size is {size}; the generator repeats its tasks, so lower size or leave out split"
            )
    if not num_selected and split is not None:
        raise DataError(f"{where}: none of its {num_searched} rows belongs to split={split}; leave out split")


RowFormat = Callable[[str, Mapping[str, Any]], Iterator[tuple[str, Any]] | None]
"""Called with a source and the settings for the workspaces of its rows. Returns the rows with their locations, or None
if the source is of another format."""
ROW_FORMATS: tuple[RowFormat, ...] = (harbor_rows, named_rows)


def environment_rows(source: str, *, workspace: Mapping[str, Any]) -> Iterator[tuple[str, Any]] | None:
    """Return the rows of a source with their locations, or None if no format recognises the source."""
    for rows_of in ROW_FORMATS:
        rows = rows_of(source, workspace)
        if rows is not None:
            return rows
    return None
