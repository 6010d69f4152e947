"""The agent loop that runs an agent program: any function or command that calls a model over HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from agent_loop.errors import ConfigError
from agent_loop.gateway.listener import Endpoint
from agent_loop.gateway.program_calls import call_command, call_program, checked_command, checked_env
from agent_loop.gateway.program_loop import Program, ProgramLoop
from agent_loop.gateway.session import MAX_BRANCHES
from agent_loop.loading import load_object
from agent_loop.loops.base import LoopContext
from agent_loop.loops.registry import register
from agent_loop.rewards.function import Score
from agent_loop.tools.registry import expand_variables
from agent_loop.types import Row
from agent_loop.workspaces.base import Workspace
from agent_loop.workspaces.check import check_reward
from agent_loop.workspaces.factory import open_workspace
from agent_loop.workspaces.settings import CheckSettings, read_workspace


@register("agent_program")
class AgentProgramLoop(ProgramLoop):
    """Runs a function or command that calls a model over the OpenAI or Anthropic API.

    `ProgramLoop` says what is recorded, and how a program fails.
    """

    def __init__(
        self,
        context: LoopContext,
        *,
        program: str | Callable[..., Any] | None = None,
        command: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        workspace: Mapping[str, Any] | None = None,
        max_branches: int = MAX_BRANCHES,
        accept_as_wish: Sequence[str] = (),
    ) -> None:
        """Create the loop.

        Args:
            context: Context of the loop.
            program: `file.py:function` or `module:function`, called as `function(row, base_url=..., api_key=...)`;
                `docs/gateway.md` describes its other parameters and its result.
            command: A program and its arguments, instead of `program`. If both are None, the row's column `program`
                or `command` is used.
            env: Additional environment variables for the command. `$NAME` in a value is replaced by that variable of
                this process. The command inherits only the variables for paths, locale and the like.
            workspace: Workspace of rows without a column `workspace`. Commands run in it; functions get it as the
                argument `workspace`. Without either, commands run in the working folder of this process.
            max_branches: Maximum number of conversations per program.
            accept_as_wish: Names of request parameters that the program may send although they cannot be honoured.
        """
        super().__init__(context, max_branches=max_branches, accept_as_wish=accept_as_wish)
        self._workspace = workspace
        self._program = program
        self._command = command
        self._env = expand_variables(checked_env(env or {}), where="env")

    @asynccontextmanager
    async def prepared(self, row: Row) -> AsyncGenerator[Program]:
        call = self._call_for(row)
        given: Any = row.get("workspace") or self._workspace
        if not given:
            yield _Call(call, row)
            return
        settings = read_workspace(given)
        async with open_workspace(settings) as workspace:
            yield _Call(call, row, workspace, settings.check)

    def _call_for(self, row: Row) -> Callable[[Row, Endpoint, Workspace | None], Any]:
        """Return the function that runs the program of a row.

        Raises:
            ConfigError: There is no program, there are two, or the command is not a list of strings.
        """
        program, command = self._program, self._command
        if program is None and command is None:
            program, command = row.get("program"), row.get("command")
        if (program is None) == (command is None):
            raise ConfigError(
                "agent_program needs a program or a command, and not both; give it in the loop's entry of "
                "rollout.agent.agent_loop_config_path, or in the row's column of that name"
            )
        if command is not None:
            return partial(call_command, checked_command(command), self._env)
        function: Any = load_object(program, key="program") if isinstance(program, str) else program
        return partial(call_program, function)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a function or a command."""

    function: Callable[[Row, Endpoint, Workspace | None], Any]
    row: Row
    workspace: Workspace | None = None
    check: CheckSettings | None = None

    def run(self, endpoint: Endpoint) -> Any:
        return self.function(self.row, endpoint, self.workspace)

    async def score(self) -> Score | None:
        if self.workspace is None or self.check is None:
            return None
        return await check_reward(self.workspace, self.check)
