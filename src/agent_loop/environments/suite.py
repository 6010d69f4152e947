"""Suites of tasks that others wrote, by name: rows, environments, and the solutions that check them."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from agent_loop.config import Positive, Section, Seed
from agent_loop.environments.base import Environment
from agent_loop.environments.game import Game
from agent_loop.types import ToolCall


@dataclass(frozen=True, slots=True)
class SolutionTurn:
    """Model turn of a solution: its calls, or its text."""

    calls: tuple[ToolCall, ...] = ()
    text: str = ""


def option_value(text: Any) -> Any:
    """Return the value of an option that a suite passes on: JSON if the text is JSON, else the text itself."""
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text


class SizedOptions(Section):
    """Options of tasks whose rows are generated."""

    size: Positive = 1000
    """Number of rows, counted after the split."""
    seed: Seed = 0
    """Seed of the rows."""


class TaskSuite(ABC):
    """Suite of tasks. `data.train_files` names them as `suite:task?option=value&option=value`.

    A suite imports the package that it adapts only when a method needs it, with `import_extra`.
    """

    name: ClassVar[str]
    """Name before the colon."""
    extra: ClassVar[str]
    """Extra of this package that installs what the suite needs."""
    summary: ClassVar[str]
    """One line for `agent-loop tasks`."""
    options: ClassVar[type[Section]] = Section
    """Options after the question mark. `split` is common to all suites and not among them."""
    reward_parts: ClassVar[Mapping[str, str]] = {}
    """Meaning of each part of the reward, by name."""
    agent_name: ClassVar[str] = "environment_agent"
    """Loop that plays the rows. Another loop than this one does not call `environment`."""
    lists_tasks: ClassVar[bool] = True
    """Whether `tasks` returns all tasks. If not, `rows` also accepts other names or addresses."""
    solved_reward: ClassVar[float | None] = 1.0
    """Reward of a solved task, by which `agent-loop check tasks` judges solutions. None if it differs between tasks."""

    @abstractmethod
    def tasks(self) -> Sequence[str]:
        """Return the names after the colon.

        Raises:
            ConfigError: The package is not installed.
        """

    @abstractmethod
    def rows(self, task: str, options: Any) -> Iterator[dict[str, Any]]:
        """Yield the rows of a task, always in the same order.

        Every row has `raw_prompt` and whatever `Environment.reset` needs to start it again. It holds plain values only.
        `agent_name`, `environment` and `data_source` are added to it.

        If `options` has a field `size`, the rows are generated: yield them without end. The caller stops after `size`
        rows of the split.

        Args:
            task: One of `tasks()`.
            options: An instance of `options`.

        Raises:
            ConfigError: The package is not installed, or an option is wrong.
            DataError: The task cannot be used, with the reason.
        """

    def environment(self) -> Environment | Game:
        """Return a new environment for one trajectory, or a new game for one rollout, of this suite.

        Called for rows of `environment_agent`, or of `game_agent`.
        """
        raise NotImplementedError(f"rows of {self.name!r} are played by the loop {self.agent_name!r}")

    def solution(self, row: Mapping[str, Any]) -> Sequence[SolutionTurn] | None:
        """Return the model turns that solve a row, or None if no solution is known."""
        return None

    def identity(self, row: Mapping[str, Any]) -> str:
        """Return text that two rows share only if they are the same task. Splits never separate such rows."""
        return json.dumps(row, sort_keys=True, default=str)
