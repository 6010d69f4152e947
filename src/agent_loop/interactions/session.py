"""Interaction of one trajectory: started at first use, limited in time, finalized exactly once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast
from uuid import uuid4

from agent_loop.errors import EnvironmentUnavailable, EpisodeError, InteractionBug, InteractionUnavailable
from agent_loop.interactions.base import BaseInteraction
from agent_loop.runtime.describe import describe_error, describe_value
from agent_loop.runtime.instances import OnReplay, TrajectoryInstance, close_instances
from agent_loop.runtime.isolated_task import DeadlineExpired
from agent_loop.runtime.numeric import REWARD_LIMIT, as_reward
from agent_loop.runtime.user_code import run_bounded
from agent_loop.runtime.user_values import plain_mapping
from agent_loop.trajectory import Incident
from agent_loop.trajectory.copying import copied
from agent_loop.types import Message

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class InteractionSessionConfig:
    """Time limits of one trajectory's interaction."""

    timeout_s: float
    """Limit for one reply. The first includes `start_interaction`."""
    close_timeout_s: float
    """Limit for `calculate_score`, and for `finalize_interaction`."""


@dataclass(frozen=True, slots=True)
class InteractionReply:
    """Reply of an interaction to one model turn."""

    content: str
    score: float = 0.0
    """Score of the model turn before the reply."""
    is_over: bool = False
    """Whether the trajectory ends with this reply. If so, `content` is recorded but not shown to the model."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values that the interaction wants to record."""


class InteractionSession:
    """Interaction of one trajectory. Single use."""

    def __init__(
        self,
        interaction: BaseInteraction,
        *,
        config: InteractionSessionConfig,
        interaction_kwargs: Mapping[str, Any] | None = None,
        trajectory: str | None = None,
    ) -> None:
        self._interaction = interaction
        self._config = config
        self._kwargs = {key: value for key, value in (interaction_kwargs or {}).items() if key != "name"}
        self._where = f"interaction {interaction.name!r}"
        self._instance = TrajectoryInstance(
            self._where,
            trajectory=trajectory or uuid4().hex,
            open_as=self._start,
            close_as=interaction.finalize_interaction,
        )
        self._greeting: Any = None
        self._incidents: list[Incident] = []
        self._is_closed = False

    def fresh(self, *, trajectory: str | None = None) -> InteractionSession:
        """Return a new session, not started, with the same interaction and arguments."""
        return InteractionSession(
            self._interaction,
            config=self._config,
            interaction_kwargs=self._kwargs,
            trajectory=trajectory,
        )

    @property
    def num_open(self) -> int:
        """1 between the start and the close, otherwise 0."""
        return self._instance.num_open

    @property
    def opens_conversation(self) -> bool:
        """Whether `greet` must be called before the first model turn."""
        return self._interaction.opens_conversation

    @property
    def on_replay(self) -> OnReplay:
        """How recorded replies are used when the trajectory runs again."""
        return OnReplay(self._interaction.on_replay)

    async def open(self) -> None:
        """Start the interaction without a reply, unless it is already started."""
        await run_bounded(self._instance.open, timeout_s=self._config.timeout_s, name=self._where)

    async def greet(self) -> InteractionReply:
        """Return the interaction's first message, which is empty if the interaction returned None."""
        await self._bounded(self._instance.open)
        greeting = "" if self._greeting is None else self._greeting
        if not isinstance(greeting, str):
            raise InteractionBug(
                f"start_interaction of {self._where} returned {describe_value(greeting)}; return a str or None"
            )
        return InteractionReply(str.__str__(greeting))

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        """Return the interaction's reply to the conversation so far."""
        if self._is_closed:
            raise EpisodeError(f"{self._where} was used after close(); use one session per trajectory")
        return await self._bounded(partial(self._reply, messages))

    async def calculate_score(self) -> float | None:
        """Return the score of the whole trajectory, or None if it has none or the interaction never started."""
        if self._instance.instance_id is None:
            return None
        checked_score = partial(self._checked_score, self._instance.instance_id)
        try:
            return await run_bounded(
                checked_score,
                timeout_s=self._config.close_timeout_s,
                name=f"calculate_score of {self._where}",
            )
        except DeadlineExpired as error:
            raise InteractionBug(
                f"calculate_score of {self._where} {error}; fix it, or raise close_timeout_s"
            ) from error
        except InteractionBug:
            raise
        except Exception as error:
            raise InteractionBug(
                f"calculate_score of {self._where} raised {describe_error(error)}; fix it"
            ) from error

    async def close(self) -> list[Incident]:
        """Finalize the interaction if it was started, and return the incidents of the session.

        Finalization completes even if the caller is cancelled. An error of the interaction becomes an incident and is
        never raised. A second call only returns the incidents.
        """
        self._is_closed = True
        await close_instances(
            [self._instance],
            what="its interaction",
            timeout_s=self._config.close_timeout_s,
            incidents=self._incidents,
        )
        return list(self._incidents)

    async def _bounded(self, function: Callable[[], Awaitable[ResultT]]) -> ResultT:
        try:
            return await run_bounded(function, timeout_s=self._config.timeout_s, name=self._where)
        except DeadlineExpired as error:
            raise InteractionBug(f"{self._where} {error}; fix it, or raise interaction_timeout_s") from error
        except (InteractionUnavailable, InteractionBug, EnvironmentUnavailable):
            raise
        except Exception as error:
            raise InteractionBug(f"{self._where} raised {describe_error(error)}; fix it") from error

    async def _start(self, instance_id: str) -> None:
        self._greeting = await self._interaction.start_interaction(instance_id, **self._kwargs)

    async def _reply(self, messages: Sequence[Message]) -> InteractionReply:
        instance_id = await self._instance.open()
        returned = await self._interaction.generate_response(
            instance_id, copied(list(messages)), **self._kwargs
        )
        return read_reply(returned, where=self._where)

    async def _checked_score(self, instance_id: str) -> float | None:
        score = await self._interaction.calculate_score(instance_id)
        return None if score is None else read_score(score, where=f"calculate_score of {self._where}")


def read_reply(returned: Any, *, where: str) -> InteractionReply:
    """Return the reply that `generate_response` returned, after validation."""
    parts: tuple[Any, ...] = cast(tuple[Any, ...], returned) if isinstance(returned, tuple) else ()
    if len(parts) != 4:
        raise InteractionBug(
            f"{where} returned {describe_value(returned)}; return (is_over, content, score, extra)"
        )
    is_over, content, score, extra = parts
    if not isinstance(is_over, bool):
        raise InteractionBug(f"{where} returned {describe_value(is_over)} as is_over; return a bool")
    if not isinstance(content, str):
        raise InteractionBug(f"{where} returned {describe_value(content)} as content; return a str")
    if not isinstance(extra, dict):
        raise InteractionBug(f"{where} returned {describe_value(extra)} as extra; return a dict")
    score = read_score(score, where=where)
    extra = plain_mapping(cast(dict[Any, Any], extra), where=f"extra of {where}")
    return InteractionReply(str.__str__(content), score=score, is_over=is_over, extra=extra)


def read_score(score: Any, *, where: str) -> float:
    """Return `score` as a float."""
    number = as_reward(score)
    if number is None:
        raise InteractionBug(
            f"{where} returned {describe_value(score)} as its score; return a finite number {REWARD_LIMIT}"
        )
    return number
