"""The agent loop that runs a program of any kind, which knows nothing but the address of a model."""

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
from agent_loop.trajectory import AgentLoopOutput, Failure
from agent_loop.types import Row, StopReason


@register("agent_program")
class AgentProgramLoop(AgentLoopBase):
    """Runs a function or a command that is given a base URL and speaks OpenAI or Anthropic to it.

    Its conversations are recorded to the token; there are as many outputs as ways in which they went on. A program that
    fails leaves a failed trajectory with its traceback. One that fails right after a limit refused it a further turn
    was ended by that limit.
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
        """Args:
        program: `file.py:function` or `module:function`, called as `function(row, base_url=..., api_key=...)`; see
            `docs/gateway.md` for what else it may take and return.
        command: A program and its arguments instead. Neither: the row's column `program` or `command` says.
        env: More environment variables for the command.
        max_branches: So many conversations a program may lead.
        """
        super().__init__(context)
        self._program = program
        self._command = command
        self._env = checked_env(env or {})
        self._max_branches = max_branches
        self._session: Session | None = None

    async def run(
        self, sampling_params: dict[str, Any], **row: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        call = self._call_for(row)
        session = Session(self.context, sampling_params=sampling_params, max_branches=self._max_branches)
        async with session:
            self._session = session
            end = await _end_of(partial(call, row), session, cancellation=self.context.cancellation)
            await session.close(end.reason)
        if session.fault is not None:
            raise session.fault
        return self._record(session, end)

    def left_behind(
        self, reason: StopReason, *, failure: Failure | None = None
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        outputs = [] if self._session is None else self._session.outputs(failure=failure)
        return _one_or_more(outputs, otherwise=_ProgramResult(reason=reason, failure=failure))

    def _record(self, session: Session, end: _ProgramResult) -> AgentLoopOutput | list[AgentLoopOutput]:
        failure = None if session.was_refused else end.failure
        outputs = session.outputs(reward=end.reward, extra_fields=end.extra_fields, failure=failure)
        if not outputs and end.reason is StopReason.ANSWERED and failure is None:
            message = (
                "the program ended without an answer from the model; have it use the base URL it is given"
            )
            end = _ProgramResult(failure=Failure(error=f"EpisodeError: {message}", traceback=message))
        return _one_or_more(outputs, otherwise=end)

    def _call_for(self, row: Row) -> Callable[[Row, Endpoint], Any]:
        """What runs the program.

        Raises:
            ConfigError: There is none, there are two, or the command is no list.
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
    """How a program ended."""

    reward: float | None = None
    extra_fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    failure: Failure | None = None
    reason: StopReason = StopReason.ANSWERED

    @classmethod
    def returning(cls, returned: Any) -> _ProgramResult:
        """Nothing, a number, or a mapping that may hold a reward.

        Raises:
            RewardError: Something else.
        """
        if returned is None:
            return cls()
        if isinstance(returned, Mapping) and not any(name in returned for name in REWARD_NAMES):
            return cls(extra_fields=dict(cast(Mapping[str, Any], returned)))
        score = read_score(returned, source="the program")
        return cls(score.reward, score.extra)


async def _end_of(
    call: Callable[[Endpoint], Any], session: Session, *, cancellation: asyncio.Event | None
) -> _ProgramResult:
    """Runs a program with its session in reach; at the deadline it has ended so, whatever it made of that."""
    end: _ProgramResult | None = None
    cancelled = cancellation or asyncio.Event()
    try:
        async with reachable(session) as endpoint, session.deadline:
            end = await run_while(_outcome_of(partial(call, endpoint)), condition=_is_set(cancelled))
    except TimeoutError:
        if not session.deadline.expired():
            raise
    if session.deadline.expired():
        return _ProgramResult(reason=StopReason.DEADLINE)
    return end or _ProgramResult(reason=StopReason.CANCELLED)


async def _is_set(event: asyncio.Event) -> None:
    await event.wait()


async def _outcome_of(call: Callable[[], Any]) -> _ProgramResult:
    """The program's edge: what it raises is data."""
    try:
        return _ProgramResult.returning(await run_bounded(call, timeout_s=None))
    except CommandFailed as failed:
        return _ProgramResult(failure=failed.failure)
    except Exception as error:  # noqa: BLE001  (a broken program is data, with its traceback)
        text = "".join(traceback.format_exception(error))
        return _ProgramResult(failure=Failure(error=describe_error(error), traceback=text))


def _one_or_more(
    outputs: list[AgentLoopOutput], *, otherwise: _ProgramResult
) -> AgentLoopOutput | list[AgentLoopOutput]:
    if not outputs:
        reason = StopReason.FAILED if otherwise.failure else otherwise.reason
        return AgentLoopOutput(segments=(), stop_reason=reason, failure=otherwise.failure)
    return outputs[0] if len(outputs) == 1 else outputs
