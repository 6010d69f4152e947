"""The episodes of a session: one for each branch of its conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from agent_loop.chat.template import ChatTemplate
from agent_loop.episode import Episode, EpisodeMark
from agent_loop.errors import AgentLoopError, RequestError
from agent_loop.loops.base import LoopContext
from agent_loop.trajectory import Incident, IncidentKind
from agent_loop.types import Message, StopReason


class Branch:
    """One episode of a session."""

    def __init__(self, episode: Episode, *, number: int) -> None:
        self.episode = episode
        self.number = number
        self.is_busy = True
        """Whether a request is using the episode. Another request for the same position gets its own branch."""
        self.is_open = False
        self.has_sampled_tokens = False
        """Whether the episode holds tokens that the model sampled."""
        self.noted: list[Incident] = []
        """Recorded incidents of the requests of this branch, such as parameters that were dropped."""

    def note_once(self, incidents: Sequence[Incident]) -> None:
        """Record incidents, except those that the branch has recorded already."""
        for incident in incidents:
            if incident not in self.noted:
                self.noted.append(incident)
                self.episode.note(incident.kind, incident.detail)

    def is_free_at(self, mark: EpisodeMark | None) -> bool:
        """Return whether the next request may continue the episode from this mark."""
        return (
            mark is not None
            and not self.is_busy
            and self.episode.stop_reason is not StopReason.CANCELLED
            and self.episode.mark() == mark
        )


class Branches:
    """Opens the episodes of a session, and ends them together with the session.

    The episodes have no time limits of their own, because a time limit is bound to the task that opens an episode and
    each request has its own task. The session limits the time of the trajectory, and the request limits the time of a
    completion.
    """

    def __init__(self, context: LoopContext, *, max_branches: int) -> None:
        self._context = context
        self._limits = replace(context.limits, deadline_s=None, turn_timeout_s=None, generate_timeout_s=None)
        self._max_branches = max_branches
        self._stack = AsyncExitStack()
        self._branches: list[Branch] = []
        self._noted_errors: list[Exception] = []
        self._num_started = 0

    def start(
        self, messages: Sequence[Message], *, template: ChatTemplate, tools: Sequence[Mapping[str, Any]]
    ) -> Branch:
        """Return a new branch that starts with these messages."""
        self._refuse_if_full()
        episode = Episode(
            messages,
            template=template,
            server_manager=self._context.server_manager,
            limits=self._limits,
            tool_schemas=tools,
            log=self._context.new_log(),
        )
        return self._added(episode)

    def fork(self, branch: Branch, *, at: EpisodeMark) -> Branch:
        """Return a new branch that continues an existing branch from a mark."""
        self._refuse_if_full()
        return self._added(branch.episode.branch(at=at))

    def release(self, branch: Branch) -> None:
        """Give back a branch that a request claimed and did not use. A new branch is removed."""
        branch.is_busy = False
        if not branch.is_open:
            self._branches.remove(branch)

    async def open(self, branch: Branch) -> None:
        """Render the prompt of a branch. Do nothing if the branch is open already."""
        if branch.is_open:
            return
        try:
            await self._stack.enter_async_context(branch.episode)
        except BaseException:
            self._branches.remove(branch)
            raise
        branch.is_open = True

    async def close(self, reason: StopReason) -> None:
        """End all branches. Branches that are still running get this stop reason."""
        for branch in self._branches:
            branch.episode.stop(reason)
        await self._stack.aclose()

    def note_failure(self, error: Exception, *, branch: Branch | None = None) -> None:
        """Record a failed request as an incident. Each error is recorded once.

        The incident belongs to `branch` if the model sampled tokens in it, else to the first recorded branch.
        """
        if branch is None or not branch.has_sampled_tokens:
            branch = next(iter(self.recorded), branch)
        if branch is not None and error not in self._noted_errors:
            self._noted_errors.append(error)
            branch.episode.note(IncidentKind.FAILED_REQUEST, str(error))

    @property
    def recorded(self) -> Sequence[Branch]:
        """Branches with sampled tokens; if there are none, the first open branch."""
        sampled = [branch for branch in self._branches if branch.has_sampled_tokens]
        return sampled or [branch for branch in self._branches if branch.is_open][:1]

    def _refuse_if_full(self) -> None:
        if len(self._branches) >= self._max_branches:
            raise branch_limit_error(self._max_branches)

    def _added(self, episode: Episode) -> Branch:
        branch = Branch(episode, number=self._num_started)
        self._num_started += 1
        self._branches.append(branch)
        return branch


TOO_LONG = "context_length_exceeded"
"""OpenAI's error code for a conversation that cannot get longer."""


class LimitReached(RequestError):
    """A limit of the trajectory allows no further turn. Clients do not retry such a request."""


class GatewayBug(AgentLoopError):
    """An unexpected exception in the gateway or in a layer below it."""


def limit_error(reason: StopReason) -> LimitReached:
    """Return the error for a request in a conversation that has ended."""
    is_length = reason in (StopReason.RESPONSE_LENGTH, StopReason.PROMPT_LENGTH)
    return LimitReached(
        f"this conversation is over ({reason}): a limit of the rollout allows no further turn",
        param="messages",
        code=TOO_LONG if is_length else str(reason),
    )


def branch_limit_error(max_branches: int) -> LimitReached:
    """Return the error for a request that would exceed `max_branches`."""
    return LimitReached(
        f"this program has {max_branches} conversations already; raise max_branches if it needs more",
        code="too_many_branches",
    )
