"""Environment of one trajectory: its tools and its interaction."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import uuid4

from agent_loop.environments.base import Reply
from agent_loop.environments.live import LiveEnvironment
from agent_loop.episode.deadlines import run_cancellable
from agent_loop.errors import EpisodeError, ToolBug, WorkspaceError
from agent_loop.recording.row_log import EpisodeLog, LoggedCall
from agent_loop.runtime.activity import WaitKind, waiting_for
from agent_loop.runtime.concurrency import CallAborted, run_together
from agent_loop.tools.results import ToolResult
from agent_loop.tools.session import ToolSession
from agent_loop.trajectory import Feedback, Incident
from agent_loop.types import Message, Origin, ToolCall


class TrajectoryEnvironment:
    """Tools and interaction of one trajectory, and the rewards they returned. Single use."""

    def __init__(
        self,
        *,
        tools: ToolSession | None,
        interaction: LiveEnvironment | None,
        log: EpisodeLog,
        cancellation: asyncio.Event | None,
    ) -> None:
        self.feedback: list[Feedback] = []
        """Feedback of each tool call and each reply of the interaction, in order."""
        self.verdicts: list[float] = []
        """Rewards that tools and the interaction returned for the whole trajectory."""
        self._tools = tools
        self._interaction = interaction
        self._log = log
        self._cancellation = cancellation

    def new_instance(self, log: EpisodeLog, *, num_feedback: int) -> TrajectoryEnvironment:
        """Return an environment with new tool and interaction instances and the first `num_feedback` entries of
        `feedback`."""
        trajectory = uuid4().hex
        environment = TrajectoryEnvironment(
            tools=None if self._tools is None else self._tools.fresh(trajectory=trajectory),
            interaction=None if self._interaction is None else self._interaction.fresh(trajectory=trajectory),
            log=log,
            cancellation=self._cancellation,
        )
        environment.feedback = self.feedback[:num_feedback]
        return environment

    @property
    def has_interaction(self) -> bool:
        return self._interaction is not None

    @property
    def num_open(self) -> int:
        """Number of instances that were opened and not yet closed."""
        num_tools = 0 if self._tools is None else self._tools.num_open
        own = self._own_interaction
        return num_tools + int(own is not None and own.is_open)

    @property
    def opens_conversation(self) -> bool:
        """Whether the interaction adds a greeting to the prompt."""
        own = self._own_interaction
        return own is not None and own.interaction is not None and own.interaction.opens_conversation

    @property
    def _own_interaction(self) -> LiveEnvironment | None:
        """The interaction, if it is not the environment of the loop."""
        interaction = self._interaction
        return None if interaction is None or interaction.interaction is None else interaction

    async def opened(self, messages: Sequence[Message]) -> list[Message]:
        """Return the prompt with the interaction's greeting."""
        if self._interaction is None:
            raise EpisodeError("the episode has no interaction; set interaction_kwargs.name in the row")
        reply = await self._reply_of(self._interaction, self._interaction.greet, num_messages=len(messages))
        return append_to_user_message(messages, f"\n\n{reply.content}") if reply.content else list(messages)

    async def call_tools(
        self, calls: Sequence[ToolCall], *, max_parallel: int, place: int | None
    ) -> list[ToolResult]:
        """Run the calls and return one result per call, in order. At most `max_parallel` calls run concurrently."""
        if self._tools is None:
            raise EpisodeError("the episode has no tools; pass tools= to AgentLoopBase.episode")
        turn = self._log.next_turn()
        runs = [
            partial(self._result_of, call, self._tools, turn=turn, number=number, place=place)
            for number, call in enumerate(calls)
        ]
        if max_parallel == 1 or len(runs) == 1:
            results = [await run() for run in runs]
        else:
            results = await _run_concurrently(runs, max_parallel=max_parallel)
        self.feedback += [
            Feedback(
                Origin.TOOL,
                name=call.name,
                place=place,
                reward=result.reward,
                incident=None if result.incident is None else result.incident.kind,
                extra=result.extra,
            )
            for call, result in zip(calls, results, strict=True)
        ]
        return results

    async def interact(self, messages: Sequence[Message], *, place: int | None) -> Reply:
        """Return the interaction's reply to the conversation."""
        if self._interaction is None:
            raise EpisodeError("the episode has no interaction; set interaction_kwargs.name in the row")
        respond = partial(self._interaction.reply, messages)
        reply = await self._reply_of(self._interaction, respond, num_messages=len(messages))
        self.feedback.append(Feedback(Origin.INTERACTION, place=place, reward=reply.score, extra=reply.extra))
        return reply

    async def collect_verdicts(self, messages: Sequence[Message]) -> None:
        """Collect the rewards of the whole trajectory from the tools and the interaction."""
        if self._tools is not None:
            verdicts = {name: v for name, v in self._log.kept_verdicts().items() if v is not None}
            if self._tools.has_verdict:
                with waiting_for(WaitKind.REWARD, "of its tools"):
                    verdicts |= await self._tools.calc_rewards()
            self.verdicts += verdicts.values()
        if self._own_interaction is not None:
            with waiting_for(WaitKind.REWARD, "of its interaction"):
                score = await self._own_interaction.reward(messages)
            if score is not None:
                self.verdicts.append(score.reward)

    async def keep_verdicts(self) -> None:
        """Record the rewards of tools whose state cannot be restored when the cancelled episode is resumed.

        No reward is recorded if a tool fails; the trajectory then restarts from its prompt.
        """
        if self._tools is None or not self._tools.has_verdict or not self._log.is_kept:
            return
        with waiting_for(WaitKind.REWARD, "of its tools"), suppress(ToolBug, WorkspaceError):
            self._log.keep_verdicts(await self._tools.verdicts_at_a_cut())

    async def close(self) -> list[Incident]:
        """Close all open instances, even if the caller is cancelled. Return the incidents."""
        incidents = [] if self._tools is None else await self._tools.close()
        return incidents if self._own_interaction is None else incidents + await self._own_interaction.close()

    async def _result_of(
        self, call: ToolCall, tools: ToolSession, *, turn: int, number: int, place: int | None
    ) -> ToolResult:
        on_replay = tools.on_replay(call.name)
        with waiting_for(WaitKind.TOOL, call.name, details={"place": place, "number": number}):
            logged = LoggedCall(
                call,
                num_messages=0,
                result_type=ToolResult,
                on_replay=on_replay,
                execute=partial(
                    run_cancellable,
                    partial(tools.execute, call),
                    event=self._cancellation,
                    on_replay=on_replay,
                ),
                prepare=partial(tools.open, call.name),
                is_read_later=tools.is_read_later(call.name),
            )
            return await self._log.call(logged, turn=turn, number=number)

    async def _reply_of(
        self,
        interaction: LiveEnvironment,
        respond: Callable[[], Coroutine[Any, Any, Reply]],
        *,
        num_messages: int,
    ) -> Reply:
        on_replay = interaction.on_replay
        with waiting_for(WaitKind.INTERACTION):
            logged = LoggedCall(
                None,
                num_messages=num_messages,
                result_type=Reply,
                on_replay=on_replay,
                execute=partial(run_cancellable, respond, event=self._cancellation, on_replay=on_replay),
                prepare=interaction.open,
            )
            return await self._log.call(logged)


async def _run_concurrently(
    calls: Iterable[Callable[[], Awaitable[ToolResult]]], *, max_parallel: int
) -> list[ToolResult]:
    """Run at most `max_parallel` calls concurrently; queue the rest."""
    slots = asyncio.Semaphore(max_parallel)

    async def run(call: Callable[[], Awaitable[ToolResult]]) -> ToolResult | None:
        async with slots:
            with suppress(CallAborted):
                return await call()

    results = await run_together(run(call) for call in calls)
    if None in results:
        raise CallAborted
    return [result for result in results if result is not None]


def append_to_user_message(messages: Sequence[Message], text: str) -> list[Message]:
    """Return the messages with `text` appended to the last one if it is the user's, or as a new user message."""
    if not messages or messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": text.lstrip("\n")}]
    last = dict(messages[-1])
    if isinstance(last["content"], list):
        last["content"] = [*last["content"], {"type": "text", "text": text}]
    else:
        last["content"] = f"{last['content'] or ''}{text}"
    return [*messages[:-1], last]
