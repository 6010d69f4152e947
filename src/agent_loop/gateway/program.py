"""The agent loop that runs an agent program: any function or command that calls a model over HTTP."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from agent_loop.errors import ConfigError
from agent_loop.gateway.listener import Endpoint, reachable
from agent_loop.gateway.program_calls import (
    CommandFailed,
    call_command,
    call_program,
    checked_command,
    checked_env,
)
from agent_loop.gateway.session import MAX_BRANCHES, Session
from agent_loop.loading import load_object
from agent_loop.loops.base import AgentLoopBase, LoopContext
from agent_loop.loops.registry import register
from agent_loop.rewards.function import REWARD_NAMES, read_score
from agent_loop.runtime.concurrency import run_while
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.user_code import run_bounded
from agent_loop.tools.environment_variables import expand_variables
from agent_loop.trajectory import AgentLoopOutput, Failure
from agent_loop.types import Row, StopReason


@register("agent_program")
class AgentProgramLoop(AgentLoopBase):
    """Runs a function or command that calls a model over the OpenAI or Anthropic API.

    Its conversations are recorded to the token, with one output per branch. If the program fails, the trajectory
    fails with the program's traceback. If the program fails right after a limit refused a further turn, the trajectory
    ends with the limit's stop reason instead.
    """

    def __init__(
        self,
        context: LoopContext,
        *,
        program: str | Callable[..., Any] | None = None,
        command: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        max_branches: int = MAX_BRANCHES,
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
            max_branches: Maximum number of conversations per program.
        """
        super().__init__(context)
        self._program = program
        self._command = command
        self._env = expand_variables(checked_env(env or {}), where="env")
        self._max_branches = max_branches
        self._session: Session | None = None

    async def run(
        self, sampling_params: dict[str, Any], **row: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        call = self._call_for(row)
        session = Session(self.context, sampling_params=sampling_params, max_branches=self._max_branches)
        async with session:
            self._session = session
            result = await _run_program(partial(call, row), session, cancellation=self.context.cancellation)
            await session.close(result.reason)
        if session.fault is not None:
            raise session.fault
        return self._output(session, result)

    def unfinished_output(
        self, reason: StopReason, *, failure: Failure | None = None
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        outputs = [] if self._session is None else self._session.outputs(failure=failure)
        return _one_or_more(outputs, otherwise=_ProgramResult(reason=reason, failure=failure))

    def _output(self, session: Session, result: _ProgramResult) -> AgentLoopOutput | list[AgentLoopOutput]:
        failure = None if session.was_refused else result.failure
        outputs = session.outputs(reward=result.reward, extra_fields=result.extra_fields, failure=failure)
        if not outputs and result.reason is StopReason.ANSWERED and failure is None:
            message = "the program ended without a completion from the model; make it use the base URL that it is given"
            result = _ProgramResult(failure=Failure(error=f"EpisodeError: {message}", traceback=message))
        return _one_or_more(outputs, otherwise=result)

    def _call_for(self, row: Row) -> Callable[[Row, Endpoint], Any]:
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
class _ProgramResult:
    """Result of a program."""

    reward: float | None = None
    extra_fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    failure: Failure | None = None
    reason: StopReason = StopReason.ANSWERED

    @classmethod
    def from_value(cls, returned: Any) -> _ProgramResult:
        """Build the result from the program's return value: None, a number, or a mapping that may hold a reward.

        Raises:
            RewardError: The value has another type.
        """
        if returned is None:
            return cls()
        if isinstance(returned, Mapping) and not any(name in returned for name in REWARD_NAMES):
            return cls(extra_fields=dict(cast(Mapping[str, Any], returned)))
        score = read_score(returned, source="the program")
        return cls(score.reward, score.extra)


async def _run_program(
    call: Callable[[Endpoint], Any], session: Session, *, cancellation: asyncio.Event | None
) -> _ProgramResult:
    """Run a program while its session is served.

    Once the deadline has passed, the stop reason is `DEADLINE`, even if the program ignored its cancellation.
    """
    result: _ProgramResult | None = None
    cancelled = cancellation or asyncio.Event()
    try:
        async with reachable(session) as endpoint, session.deadline:
            result = await run_while(_call_program(partial(call, endpoint)), condition=_wait_for(cancelled))
    except TimeoutError:
        if not session.deadline.expired():
            raise
    if session.deadline.expired():
        return _ProgramResult(reason=StopReason.DEADLINE)
    return result or _ProgramResult(reason=StopReason.CANCELLED)


async def _wait_for(event: asyncio.Event) -> None:
    await event.wait()


async def _call_program(call: Callable[[], Any]) -> _ProgramResult:
    """Call the program and return its result. An exception becomes the result's failure."""
    try:
        return _ProgramResult.from_value(await run_bounded(call, timeout_s=None))
    except CommandFailed as failed:
        return _ProgramResult(failure=failed.failure)
    except Exception as error:  # noqa: BLE001  (a failed program is data, with its traceback)
        text = "".join(traceback.format_exception(error))
        return _ProgramResult(failure=Failure(error=describe_error(error), traceback=text))


def _one_or_more(
    outputs: list[AgentLoopOutput], *, otherwise: _ProgramResult
) -> AgentLoopOutput | list[AgentLoopOutput]:
    if not outputs:
        reason = StopReason.FAILED if otherwise.failure else otherwise.reason
        return AgentLoopOutput(segments=(), stop_reason=reason, failure=otherwise.failure)
    return outputs[0] if len(outputs) == 1 else outputs
