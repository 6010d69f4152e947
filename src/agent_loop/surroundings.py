"""What one trajectory talks to beside the model: its tools and its interaction."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from agent_loop.concurrency import run_together
from agent_loop.errors import EpisodeError
from agent_loop.interactions.session import InteractionReply, InteractionSession
from agent_loop.tools.session import ToolResult, ToolSession
from agent_loop.trajectory import Incident
from agent_loop.turn_log import TurnLog
from agent_loop.types import Message, ToolCall


class Surroundings:
    """The tools and the interaction of one trajectory, and what they found it worth. Single use.

    Args:
        tools: None for an episode without tools.
        interaction: None for one without an interaction.
        log: Answers what is on record.
    """

    def __init__(
        self, *, tools: ToolSession | None, interaction: InteractionSession | None, log: TurnLog
    ) -> None:
        self.tool_rewards: list[float] = []
        """Of the calls, in order."""
        self.turn_scores: list[float] = []
        """Of the interaction, one per turn."""
        self.verdicts: list[float] = []
        """On the whole trajectory."""
        self._tools = tools
        self._interaction = interaction
        self._log = log

    def fresh(self, log: TurnLog) -> Surroundings:
        """The same, with instances of their own."""
        return Surroundings(
            tools=None if self._tools is None else self._tools.fresh(),
            interaction=None if self._interaction is None else self._interaction.fresh(),
            log=log,
        )

    @property
    def has_interaction(self) -> bool:
        return self._interaction is not None

    @property
    def num_open(self) -> int:
        """Instances that were opened and not yet closed."""
        return sum(part.num_open for part in (self._tools, self._interaction) if part is not None)

    async def call_tools(self, calls: Sequence[ToolCall], *, max_parallel: int) -> list[ToolResult]:
        """One result per call, in order; so many calls run at once.

        Raises:
            EpisodeError: There are no tools.
            ToolBug: A tool raised something else than `ToolError`; the calls beside it are cancelled.
        """
        if self._tools is None:
            raise EpisodeError("this episode has no tools; pass tools= to AgentLoopBase.episode")
        tools, places, turn = self._tools, asyncio.Semaphore(max_parallel), self._log.next_turn()

        async def run(number: int, call: ToolCall) -> ToolResult:
            async with places:
                return await self._log.tool_result(
                    call,
                    turn=turn,
                    number=number,
                    on_replay=tools.on_replay(call.name),
                    execute=partial(tools.execute, call),
                    prepare=partial(tools.open, call.name),
                )

        results = await run_together(run(number, call) for number, call in enumerate(calls))
        self.tool_rewards += [result.reward for result in results if result.reward is not None]
        return results

    async def interact(self, messages: Sequence[Message]) -> InteractionReply:
        """The interaction's reply to the conversation.

        Raises:
            EpisodeError: There is no interaction.
            InteractionBug: It raised or took too long.
        """
        if self._interaction is None:
            raise EpisodeError("this episode has no interaction; the row needs interaction_kwargs.name")
        reply = await self._log.interaction_reply(
            num_messages=len(messages),
            on_replay=self._interaction.on_replay,
            respond=partial(self._interaction.respond, messages),
            prepare=self._interaction.open,
        )
        self.turn_scores.append(reply.score)
        return reply

    async def judge(self) -> None:
        """Asks for the verdicts.

        Raises:
            ToolBug: A tool's `calc_reward` raised or took too long.
            InteractionBug: The interaction's `calculate_score` did.
        """
        if self._tools is not None:
            self.verdicts += (await self._tools.calc_rewards()).values()
        if self._interaction is not None:
            score = await self._interaction.calculate_score()
            if score is not None:
                self.verdicts.append(score)

    async def close(self) -> list[Incident]:
        """Closes what was opened, to the end even if cancelled meanwhile; returns what went wrong."""
        incidents: list[Incident] = []
        for part in (self._tools, self._interaction):
            if part is not None:
                incidents += await part.close()
        return incidents
