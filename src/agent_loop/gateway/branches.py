"""The episodes of a session: one for each way in which its conversations went on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from agent_loop.episode import Episode, EpisodeMark
from agent_loop.gateway.errors import too_many_branches
from agent_loop.loops.base import LoopContext
from agent_loop.trajectory import IncidentKind
from agent_loop.types import Message, StopReason


class Branch:
    """One episode, and whether a request is at work on it."""

    def __init__(self, episode: Episode, *, number: int) -> None:
        self.episode = episode
        self.number = number
        self.is_busy = True
        """A request has it; another one that belongs to the same place gets a branch."""
        self.is_open = False
        self.has_sampled_tokens = False
        """The model sampled tokens in it."""

    def is_free_at(self, mark: EpisodeMark | None) -> bool:
        """Whether the next request may go on with it from this place."""
        return (
            mark is not None
            and not self.is_busy
            and self.episode.stop_reason is not StopReason.CANCELLED
            and self.episode.mark() == mark
        )


class Branches:
    """Opens the episodes of a session and ends them with it.

    An episode's time limits are bound to the task that opens it, and each request has a task of its own: the time of
    the trajectory is the session's affair, that of a completion the request's.

    Args:
        context: Of the session.
        max_branches: No more are opened.
    """

    def __init__(self, context: LoopContext, *, max_branches: int) -> None:
        self._context = context
        self._limits = replace(context.limits, deadline_s=None, turn_timeout_s=None, generate_timeout_s=None)
        self._max_lanes = max_branches
        self._stack = AsyncExitStack()
        self._lanes: list[Branch] = []
        self._num_begun = 0

    def new(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]]) -> Branch:
        """A lane that begins with these messages.

        Raises:
            LimitReached: There are too many.
        """
        self._refuse_if_full()
        new_log = self._context.new_log
        episode = Episode(
            messages,
            template=self._context.template,
            server_manager=self._context.server_manager,
            limits=self._limits,
            tool_schemas=tools,
            log=None if new_log is None else new_log(),
        )
        return self._added(episode)

    def branch(self, lane: Branch, *, at: EpisodeMark) -> Branch:
        """A lane that goes on from where another one stood.

        Raises:
            LimitReached: There are too many.
        """
        self._refuse_if_full()
        return self._added(lane.episode.branch(at=at))

    async def open(self, lane: Branch) -> None:
        """Renders the lane's prompt, once.

        Raises:
            ChatTemplateError: The template does not accept its messages; the lane is gone.
        """
        if lane.is_open:
            return
        try:
            await self._stack.enter_async_context(lane.episode)
        except BaseException:
            self._lanes.remove(lane)
            raise
        lane.is_open = True

    async def close(self, reason: StopReason) -> None:
        """Ends all lanes that are not over, with this reason."""
        for lane in self._lanes:
            lane.episode.stop(reason)
        await self._stack.aclose()

    def note_failure(self, error: Exception, *, lane: Branch | None = None) -> None:
        """Names a failed request on its lane, or where the model did not speak there, on the first that is of
        record."""
        if lane is None or not lane.has_sampled_tokens:
            lane = next(iter(self.recorded), lane)
        if lane is not None:
            lane.episode.note(IncidentKind.FAILED_REQUEST, str(error))

    @property
    def recorded(self) -> Sequence[Branch]:
        """Those in which the model spoke; if it did in none, the first one that is open."""
        spoken = [lane for lane in self._lanes if lane.has_sampled_tokens]
        return spoken or [lane for lane in self._lanes if lane.is_open][:1]

    def _refuse_if_full(self) -> None:
        if len(self._lanes) >= self._max_lanes:
            raise too_many_branches(self._max_lanes)

    def _added(self, episode: Episode) -> Branch:
        lane = Branch(episode, number=self._num_begun)
        self._num_begun += 1
        self._lanes.append(lane)
        return lane
