"""The interaction of one trajectory: started at first use, bounded in time, finalized exactly once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from agent_loop.boundary import (
    DeadlineExpired,
    OnReplay,
    TrajectoryInstance,
    as_finite_number,
    close_instances,
    describe_error,
    describe_value,
    run_bounded,
)
from agent_loop.errors import EpisodeError, InteractionBug
from agent_loop.interactions.base import BaseInteraction
from agent_loop.trajectory import Incident
from agent_loop.types import Message


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
            open_as=partial(interaction.start_interaction, **self._kwargs),
            close_as=interaction.finalize_interaction,
        )
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
    def on_replay(self) -> OnReplay:
        """What the interaction declares."""
        return OnReplay(self._interaction.on_replay)

    async def open(self) -> None:
        """Starts the interaction without a reply, if it is not started.

        Raises:
            Exception: Whatever `start_interaction` raises.
        """
        await run_bounded(self._instance.open, timeout_s=self._config.timeout_s)

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        """The answer to the conversation so far.

        Raises:
            InteractionBug: It raised, took too long, or returned something that is no reply.
            EpisodeError: The session is closed.
        """
        if self._is_closed:
            raise EpisodeError(f"{self._where} was used after close(); use one session per trajectory")
        try:
            returned = await run_bounded(partial(self._reply, messages), timeout_s=self._config.timeout_s)
        except DeadlineExpired as error:
            raise InteractionBug(f"{self._where} {error}; mend it, or raise interaction_timeout_s") from error
        except Exception as error:
            raise InteractionBug(f"{self._where} raised {describe_error(error)}; mend it") from error
        return _read_reply(returned, where=self._where)

    async def calculate_score(self) -> float | None:
        """The verdict on the whole trajectory; None if there is none, or the interaction was not used.

        Raises:
            InteractionBug: It raised, took too long, or is no number.
        """
        if self._instance.instance_id is None:
            return None
        verdict = partial(self._interaction.calculate_score, self._instance.instance_id)
        try:
            score = await run_bounded(verdict, timeout_s=self._config.close_timeout_s)
        except DeadlineExpired as error:
            raise InteractionBug(
                f"calculate_score of {self._where} {error}; mend it, or raise close_timeout_s"
            ) from error
        except Exception as error:
            raise InteractionBug(
                f"calculate_score of {self._where} raised {describe_error(error)}; mend it"
            ) from error
        return None if score is None else _read_score(score, where=f"calculate_score of {self._where}")

    async def close(self) -> list[Incident]:
        """Finalizes the interaction if it was started, to the end even if cancelled meanwhile.

        Returns what went wrong; never raises for its fault. A second call finalizes nothing and returns the same.
        """
        self._is_closed = True
        await close_instances(
            [self._instance], timeout_s=self._config.close_timeout_s, incidents=self._incidents
        )
        return list(self._incidents)

    async def _reply(self, messages: Sequence[Message]) -> Any:
        instance_id = await self._instance.open()
        return await self._interaction.generate_response(instance_id, list(messages), **self._kwargs)


def _read_reply(returned: Any, *, where: str) -> InteractionReply:
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
    score = _read_score(score, where=where)
    return InteractionReply(content, score=score, is_over=is_over, extra=cast(dict[str, Any], extra))


def _read_score(score: Any, *, where: str) -> float:
    number = as_finite_number(score)
    if number is None:
        raise InteractionBug(f"{where} returned {describe_value(score)} as its score; return a finite number")
    return number
