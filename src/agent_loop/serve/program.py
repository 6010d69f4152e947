"""The agent loop that runs an agent program: any function or command that calls a model over HTTP."""

from __future__ import annotations

import asyncio
import inspect
import json
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from agent_loop.errors import ConfigError, DataError, EpisodeError
from agent_loop.loading import load_object
from agent_loop.loops.base import AgentLoopBase, LoopContext
from agent_loop.loops.registry import register
from agent_loop.rewards.function import REWARD_NAMES, Score, read_score
from agent_loop.rollout.failures import failure_of
from agent_loop.runtime.child_process import CommandResult, inherited_environment, run_command
from agent_loop.runtime.concurrency import run_while
from agent_loop.runtime.describe import describe_value, one_line
from agent_loop.runtime.user_code import call_function, run_bounded
from agent_loop.serve.gateway import Endpoint, http_client, reachable
from agent_loop.serve.session import MAX_BRANCHES, Session
from agent_loop.serve.wishes import wishes_of
from agent_loop.tools.registry import expand_variables
from agent_loop.trajectory import AgentLoopOutput, Failure
from agent_loop.types import Row, StopReason
from agent_loop.workspaces.base import Workspace
from agent_loop.workspaces.check import check_reward
from agent_loop.workspaces.factory import open_workspace
from agent_loop.workspaces.settings import CheckSettings, read_workspace

NO_COMPLETION = (
    "the program ended without a completion from the model; make it use the base URL that it is given"
)


class ProgramFailed(EpisodeError):
    """A program reported a failure."""

    def __init__(self, error: str, *, traceback: str) -> None:
        super().__init__(error)
        self.failure = Failure(error=error, traceback=traceback)


@dataclass(frozen=True, slots=True)
class Program:
    """A program that is ready to run."""

    run: Callable[[Endpoint], Any]
    """Runs the program, or returns an awaitable that does.

    The result is None, a reward, or a mapping that may hold a reward; its other values become extra fields. Raises
    `ProgramFailed` if the program reported a failure.
    """
    workspace: Workspace | None = None
    check: CheckSettings | None = None
    """Gives the reward of what the program left in the workspace. It replaces a reward that the program returned."""


class ProgramLoop(AgentLoopBase):
    """Base class of loops that run a program which calls the model over HTTP.

    The conversations of the program are recorded to the token, with one output per branch. If the program fails, the
    trajectory fails with the program's traceback. If the program fails right after a limit refused a further turn, the
    trajectory ends with the limit's stop reason instead.
    """

    def __init__(
        self, context: LoopContext, *, max_branches: int = MAX_BRANCHES, accept_as_wish: Sequence[str] = ()
    ) -> None:
        """Create the loop.

        Args:
            context: Context of the loop.
            max_branches: Maximum number of conversations per program.
            accept_as_wish: Names of request parameters that the program may send although they cannot be honoured. Each
                such parameter is dropped and leaves an incident.
        """
        super().__init__(context)
        self._wishes = wishes_of(accept_as_wish)
        self._max_branches = max_branches
        self._session: Session | None = None

    @abstractmethod
    def prepared(self, row: Row) -> AbstractAsyncContextManager[Program]:
        """Prepare what the program of a row needs, and remove all of it at the end."""

    async def run(
        self, sampling_params: dict[str, Any], **row: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        session = Session(
            self.context,
            sampling_params=sampling_params,
            max_branches=self._max_branches,
            wishes=self._wishes,
        )
        async with self.prepared(row) as program:
            async with session:
                self._session = session
                result = await _run_program(program.run, session, cancellation=self.context.cancellation)
                await session.close(result.reason)
            # A program that was cancelled, or failed by itself, gets no reward.
            is_scored = result.failure is None or session.was_refused
            is_scored = is_scored and result.reason is not StopReason.CANCELLED
            if is_scored and program.workspace is not None and program.check is not None:
                result = result.scored(await check_reward(program.workspace, program.check))
        if session.fault is not None:
            raise session.fault
        return _output(session, result)

    def unfinished_output(
        self, reason: StopReason, *, failure: Failure | None = None
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        outputs = [] if self._session is None else self._session.outputs(failure=failure)
        return _one_or_more(outputs, otherwise=_ProgramResult(reason=reason, failure=failure))


@dataclass(frozen=True, slots=True)
class _ProgramResult:
    """Result of a program."""

    reward: float | None = None
    extra_fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    failure: Failure | None = None
    reason: StopReason = StopReason.ANSWERED

    @classmethod
    def from_value(cls, returned: Any) -> _ProgramResult:
        """Build the result from the program's return value: None, a number, or a mapping that may hold a reward."""
        if returned is None:
            return cls()
        if isinstance(returned, Mapping) and not any(name in returned for name in REWARD_NAMES):
            return cls(extra_fields=dict(cast(Mapping[str, Any], returned)))
        score = read_score(returned, source="the program")
        return cls(score.reward, score.extra)

    def scored(self, score: Score) -> _ProgramResult:
        """Return the result with a score."""
        return replace(self, reward=score.reward, extra_fields={**self.extra_fields, **score.extra})


async def _run_program(
    run: Callable[[Endpoint], Any], session: Session, *, cancellation: asyncio.Event | None
) -> _ProgramResult:
    """Run a program while its session is served.

    Once the deadline has passed, the stop reason is `DEADLINE`, even if the program ignored its cancellation.
    """
    result: _ProgramResult | None = None
    cancelled = cancellation or asyncio.Event()
    try:
        async with reachable(session) as endpoint, session.deadline:
            result = await run_while(_call_program(lambda: run(endpoint)), condition=cancelled.wait())
    except TimeoutError:
        if not session.deadline.expired():
            raise
    if session.deadline.expired():
        return _ProgramResult(reason=StopReason.DEADLINE)
    return result or _ProgramResult(reason=StopReason.CANCELLED)


async def _call_program(call: Callable[[], Any]) -> _ProgramResult:
    """Call the program and return its result. An exception becomes the result's failure."""
    try:
        return _ProgramResult.from_value(await run_bounded(call, timeout_s=None))
    except ProgramFailed as failed:
        return _ProgramResult(failure=failed.failure)
    except Exception as error:  # noqa: BLE001  (a failed program is data, with its traceback)
        return _ProgramResult(failure=failure_of(error))


def _output(session: Session, result: _ProgramResult) -> AgentLoopOutput | list[AgentLoopOutput]:
    failure = None if session.was_refused else result.failure
    outputs = session.outputs(reward=result.reward, extra_fields=result.extra_fields, failure=failure)
    if not outputs and result.reason is StopReason.ANSWERED and failure is None:
        failure = Failure(error=f"EpisodeError: {NO_COMPLETION}", traceback=NO_COMPLETION)
        result = _ProgramResult(failure=failure)
    return _one_or_more(outputs, otherwise=result)


def _one_or_more(
    outputs: list[AgentLoopOutput], *, otherwise: _ProgramResult
) -> AgentLoopOutput | list[AgentLoopOutput]:
    if not outputs:
        reason = StopReason.FAILED if otherwise.failure else otherwise.reason
        return AgentLoopOutput(segments=(), stop_reason=reason, failure=otherwise.failure)
    return outputs[0] if len(outputs) == 1 else outputs


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
            yield Program(partial(call, row))
            return
        settings = read_workspace(given)
        async with open_workspace(settings) as workspace:
            yield Program(partial(call, row, workspace=workspace), workspace, settings.check)

    def _call_for(self, row: Row) -> Callable[..., Any]:
        """Return the function that runs the program of a row: `call_program` or `call_command`."""
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


class CommandFailed(ProgramFailed):
    """The command exited with an error."""

    def __init__(self, result: CommandResult) -> None:
        code = result.exit_code
        how = f"was ended by signal {-code}" if code < 0 else f"exited with status {code}"
        last = result.stderr.strip().splitlines()[-1:]
        error = ": ".join([f"the program {how}", *(one_line(line, max_length=200) for line in last)])
        super().__init__(error, traceback=result.stderr)


async def call_program(
    function: Callable[..., Any], row: Row, endpoint: Endpoint, workspace: Workspace | None = None
) -> Any:
    """Call a function with the row and those other arguments that it has parameters for. Return its result."""
    offered: dict[str, Any] = {
        "base_url": endpoint.base_url,
        "api_key": endpoint.api_key,
        "anthropic_base_url": endpoint.anthropic_base_url,
        "http_client": None,
        **({} if workspace is None else {"workspace": workspace}),
    }
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = {name: value for name, value in offered.items() if takes_any or name in parameters}
    async with AsyncExitStack() as stack:
        if "http_client" in arguments:
            arguments["http_client"] = await stack.enter_async_context(http_client(endpoint.app))
        return await call_function(function, dict(row), **arguments)


async def call_command(
    command: list[str],
    env: Mapping[str, str],
    row: Row,
    endpoint: Endpoint,
    workspace: Workspace | None = None,
) -> Any:
    """Run a command, in the workspace if there is one. Return the number or dict in its last line of output."""
    stdin = json.dumps(row, default=_as_json).encode()
    if workspace is None:
        variables = {**inherited_environment(), **_client_variables(endpoint), **env}
        result = await run_command(command, env=variables, stdin=stdin)
    else:
        reached = replace(endpoint, base_url=await workspace.reach(endpoint.base_url))
        result = await workspace.exec(command, env={**_client_variables(reached), **env}, stdin=stdin)
    if result.exit_code:
        raise CommandFailed(result)
    # `splitlines` would also split at characters that may occur in JSON strings.
    last = result.stdout.rstrip().rpartition("\n")[2]
    try:
        value: Any = json.loads(last)
    except ValueError:
        return None
    return cast(Any, value) if isinstance(value, int | float | dict) else None


def checked_command(command: Any) -> list[str]:
    """Return the command as a list of strings."""
    words: list[Any] = list(cast(Iterable[Any], command)) if isinstance(command, Iterable) else []
    if isinstance(command, str) or not words or not all(isinstance(word, str) for word in words):
        raise ConfigError(
            f"command is {command!r}; give the program and its arguments as a list of strings: [python, agent.py]"
        )
    return words


def checked_env(env: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables as a dict."""
    for name, value in env.items():
        if not isinstance(value, str):
            raise ConfigError(
                f"env.{name} is {describe_value(value)}; environment variables are strings: quote the value"
            )
    return dict(env)


def _client_variables(endpoint: Endpoint) -> dict[str, str]:
    """Return the environment variables that OpenAI and Anthropic clients read. They also bypass HTTP proxies."""
    return {
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_BASE": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "ANTHROPIC_BASE_URL": endpoint.anthropic_base_url,
        "ANTHROPIC_API_KEY": endpoint.api_key,
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }


def _as_json(value: Any) -> Any:
    """Convert an array or scalar of numpy or torch to plain Python values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise DataError(
        f"the row holds {describe_value(value)}, which cannot be written as JSON; a command gets the row as JSON"
    )
