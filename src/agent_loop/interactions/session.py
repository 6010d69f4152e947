"""The interaction of one trajectory: started at first use, bounded in time, finalized exactly once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

from agent_loop.errors import EpisodeError, InteractionBug, InteractionUnavailable
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
    """The time limits of one trajectory's interaction."""

    timeout_s: float
    """One reply, the start before the first included."""
    close_timeout_s: float
    """`calculate_score`, and `finalize_interaction`."""


@dataclass(frozen=True, slots=True)
class InteractionReply:
    """What the interaction answered one turn with."""

    content: str
    score: float = 0.0
    """Of the assistant turn that is answered."""
    is_over: bool = False
    """The trajectory ends here; `content` is recorded but not shown to the model."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the interaction found worth recording."""


class InteractionSession:
    """The interaction of one trajectory. Single use.

    Args:
        interaction: Started before its first reply; finalized by `close`, once, even if the start failed.
        config: The time limits.
        interaction_kwargs: The row's; all but `name` are given to `start_interaction` and `generate_response`.
    """

    def __init__(
        self,
        interaction: BaseInteraction,
        *,
        config: InteractionSessionConfig,
        interaction_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._interaction = interaction
        self._config = config
        self._kwargs = {key: value for key, value in (interaction_kwargs or {}).items() if key != "name"}
        self._where = f"interaction {interaction.name!r}"
        self._instance = TrajectoryInstance(
            self._where,
            open_as=self._start,
            close_as=interaction.finalize_interaction,
        )
        self._first_words: Any = None
        self._incidents: list[Incident] = []
        self._is_closed = False

    def fresh(self) -> InteractionSession:
        """Another session with the same interaction, started anew."""
        return InteractionSession(self._interaction, config=self._config, interaction_kwargs=self._kwargs)

    @property
    def num_open(self) -> int:
        """1 between the start and the close, else 0."""
        return self._instance.num_open

    @property
    def opens_conversation(self) -> bool:
        """Whether `greet` has to be asked before the model speaks."""
        return self._interaction.opens_conversation

    @property
    def on_replay(self) -> OnReplay:
        """What the interaction declares."""
        return OnReplay(self._interaction.on_replay)

    async def open(self) -> None:
        """Starts the interaction without a reply, if it is not started.

        Raises:
            Exception: Whatever `start_interaction` raises.
        """
        await run_bounded(self._instance.open, timeout_s=self._config.timeout_s, name=self._where)

    async def greet(self) -> InteractionReply:
        """What the interaction opens the conversation with, empty if it has nothing to say.

        Raises:
            InteractionBug: It raised, took too long, or returned no text.
            InteractionUnavailable: What it needs cannot be reached.
        """
        await self._bounded(self._instance.open)
        words = "" if self._first_words is None else self._first_words
        if not isinstance(words, str):
            raise InteractionBug(
                f"start_interaction of {self._where} returned {describe_value(words)}; return a str, or None"
            )
        return InteractionReply(str.__str__(words))

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        """The answer to the conversation so far.

        Raises:
            InteractionBug: It raised, took too long, or returned something that is no reply.
            InteractionUnavailable: What it needs cannot be reached.
            EpisodeError: The session is closed.
        """
        if self._is_closed:
            raise EpisodeError(f"{self._where} was used after close(); use one session per trajectory")
        return await self._bounded(partial(self._reply, messages))

    async def calculate_score(self) -> float | None:
        """The verdict on the whole trajectory; None if there is none, or the interaction was not used.

        Raises:
            InteractionBug: It raised, took too long, or is no number.
        """
        if self._instance.instance_id is None:
            return None
        verdict = partial(self._verdict, self._instance.instance_id)
        try:
            return await run_bounded(
                verdict, timeout_s=self._config.close_timeout_s, name=f"calculate_score of {self._where}"
            )
        except DeadlineExpired as error:
            raise InteractionBug(
                f"calculate_score of {self._where} {error}; mend it, or raise close_timeout_s"
            ) from error
        except InteractionBug:
            raise
        except Exception as error:
            raise InteractionBug(
                f"calculate_score of {self._where} raised {describe_error(error)}; mend it"
            ) from error

    async def close(self) -> list[Incident]:
        """Finalizes the interaction if it was started, to the end even if cancelled meanwhile.

        Returns what went wrong; never raises for its fault. A second call finalizes nothing and returns the same.
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
            raise InteractionBug(f"{self._where} {error}; mend it, or raise interaction_timeout_s") from error
        except (InteractionUnavailable, InteractionBug):
            raise
        except Exception as error:
            raise InteractionBug(f"{self._where} raised {describe_error(error)}; mend it") from error

    async def _start(self, instance_id: str) -> None:
        self._first_words = await self._interaction.start_interaction(instance_id, **self._kwargs)

    async def _reply(self, messages: Sequence[Message]) -> InteractionReply:
        instance_id = await self._instance.open()
        returned = await self._interaction.generate_response(
            instance_id, copied(list(messages)), **self._kwargs
        )
        return read_reply(returned, where=self._where)

    async def _verdict(self, instance_id: str) -> float | None:
        score = await self._interaction.calculate_score(instance_id)
        return None if score is None else read_score(score, where=f"calculate_score of {self._where}")


def read_reply(returned: Any, *, where: str) -> InteractionReply:
    """What `generate_response` returned, checked.

    Raises:
        InteractionBug: It is no reply.
    """
    parts: tuple[Any, ...] = cast(tuple[Any, ...], returned) if isinstance(returned, tuple) else ()
    if len(parts) != 4:
        raise InteractionBug(
            f"{where} returned {describe_value(returned)}; return (is_over, content, score, extra)"
        )
    is_over, content, score, extra = parts
    if not isinstance(is_over, bool):
        raise InteractionBug(f"{where} returned {describe_value(is_over)} in the first place; return a bool")
    if not isinstance(content, str):
        raise InteractionBug(f"{where} returned {describe_value(content)} as its content; return a str")
    if not isinstance(extra, dict):
        raise InteractionBug(f"{where} returned {describe_value(extra)} in the fourth place; return a dict")
    score = read_score(score, where=where)
    extra = plain_mapping(cast(dict[Any, Any], extra), where=f"extra of {where}")
    return InteractionReply(str.__str__(content), score=score, is_over=is_over, extra=extra)


def read_score(score: Any, *, where: str) -> float:
    """Raises: InteractionBug: It is not a number that can be a reward."""
    number = as_reward(score)
    if number is None:
        raise InteractionBug(
            f"{where} returned {describe_value(score)} as its score; return a finite number {REWARD_LIMIT}"
        )
    return number
