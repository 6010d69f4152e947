"""Teachers: models on servers of their own that score the tokens of the policy's trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from agent_loop.chat.template import ChatTemplate
from agent_loop.config import Config, DistillationConfig, ModelConfig, RolloutConfig, TeacherConfig
from agent_loop.errors import ConfigError
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.servers.base import Ability, AsyncServerBase
from agent_loop.servers.factory import create_servers
from agent_loop.servers.scores import TokenScores, checked_scores
from agent_loop.training.advantages.sources import SOURCE
from agent_loop.training.distillation.prompts import TeacherPrompts
from agent_loop.trajectory import Trajectory
from agent_loop.types import IntArray

CLOSE_TIMEOUT_S = 30.0
HINT_TOKENS = 1024
"""Tokens that the context of a teacher with a hint is longer by."""


class PolicyTemplate(Protocol):
    """The part of the policy's chat template that every manager has."""

    @property
    def tokenizer(self) -> Any: ...


class NotTaught(StrEnum):
    """Reasons why a teacher did not score a trajectory."""

    TOO_LONG = "too_long"
    """The text is longer than the teacher's context."""
    ATTACHMENTS = "attachments"
    """The trajectory has images or videos, which teachers cannot score."""
    HINT = "hint"
    """The hint cannot be put into the prompt."""
    SERVER = "server"
    """The server failed, did not reply in time, or refused the text."""


class Teacher:
    """A teacher and its started server.

    Args:
        name: Name in `distillation.teachers`.
        config: Settings of the teacher.
        server: Server of the teacher.
        prompts: Prompts of the teacher.
        context_length: Most tokens of a text.
        num_candidates: Number of likeliest tokens to return at each place.
        vocab_size: Number of token ids of the policy.
    """

    def __init__(
        self,
        name: str,
        *,
        config: TeacherConfig,
        server: AsyncServerBase,
        prompts: TeacherPrompts,
        context_length: int,
        num_candidates: int,
        vocab_size: int,
    ) -> None:
        self.name = name
        self.prompts = prompts
        self.context_length = context_length
        self._timeout_s = config.timeout_s
        self._server = server
        self._num_candidates = min(num_candidates, vocab_size)
        self._vocab_size = vocab_size
        self._slots = asyncio.Semaphore(config.max_concurrent)

    async def score(self, token_ids: IntArray, *, start: int) -> TokenScores:
        """Return the scores of the tokens of a text from `start` on, in at most `timeout_s` from the first free slot.

        Raises:
            ServerError: See `AsyncServerBase.score`.
            TimeoutError: The server did not reply in time.
        """
        async with self._slots, asyncio.timeout(self._timeout_s):
            scores = await self._server.score(token_ids, start=start, top_logprobs=self._num_candidates)
        scores = checked_scores(
            scores,
            num_scores=len(token_ids) - start,
            top_logprobs=self._num_candidates,
            server=self._server.name,
        )
        return _without_other_ids(scores, vocab_size=self._vocab_size)


class Teachers:
    """The teachers of a run.

    Args:
        config: Settings of the distillation.
        teachers: Teachers by name.
    """

    def __init__(self, config: DistillationConfig, teachers: Mapping[str, Teacher]) -> None:
        self.numbers = {name: number for number, name in enumerate(config.teachers)}
        """Number of each teacher, by name."""
        self._of_source = {
            source: teachers[name] for name, each in config.teachers.items() for source in each.sources
        }
        self._of_others = next(
            (teachers[name] for name, each in config.teachers.items() if not each.sources), None
        )

    def of(self, trajectory: Trajectory) -> Teacher | None:
        """Return the teacher of a trajectory's data source; None if it has none."""
        source = trajectory.row.get(SOURCE)
        return self._of_source.get(source, self._of_others) if isinstance(source, str) else self._of_others


@asynccontextmanager
async def open_teachers(config: Config, *, template: PolicyTemplate) -> AsyncGenerator[Teachers | None]:
    """Start the servers of all teachers, and close them at the end. None without teachers.

    Args:
        config: All settings.
        template: Chat template of the policy, which renders the prompts of teachers with a hint.

    Raises:
        ConfigError: A server cannot be created as configured, or does not offer scores.
        ServerError: A server did not start.
    """
    settings = config.distillation
    if not settings.teachers:
        yield None
        return
    async with AsyncExitStack() as stack:
        teachers: dict[str, Teacher] = {}
        for name, each in settings.teachers.items():
            prompts = TeacherPrompts(each, template=template)
            has_hint = each.hint is not None or each.hint_key is not None
            length = config.rollout.prompt_length + config.rollout.response_length + has_hint * HINT_TOKENS
            length = each.context_length or length
            server = _create_server(name, config=config, context_length=length)
            stack.push_async_callback(run_shielded, server.close, timeout_s=CLOSE_TIMEOUT_S)
            await server.start()
            await server.wake_up()
            if Ability.SCORE not in server.abilities:
                raise ConfigError(
                    f"distillation.teachers.{name} is on {type(server).__name__}, which cannot score the tokens of a "
                    "text; choose another engine"
                )
            teachers[name] = Teacher(
                name,
                config=each,
                server=server,
                prompts=prompts,
                context_length=length,
                num_candidates=settings.num_candidates,
                vocab_size=_vocab_size(template),
            )
        yield Teachers(settings, teachers)


def _create_server(name: str, *, config: Config, context_length: int) -> AsyncServerBase:
    teacher = config.distillation.teachers[name]
    model: ModelConfig = config.model.model_copy(
        update={
            "path": teacher.path or config.model.path,
            "tokenizer_path": teacher.tokenizer_path,
            "lora_rank": 0,
            "base_bits": None,
        }
    )
    rollout = RolloutConfig(
        engine=teacher.engine,
        engine_kwargs=teacher.engine_kwargs,
        server_urls=[] if teacher.server_url is None else [teacher.server_url],
        prompt_length=1,
        response_length=context_length - 1,
        start_timeout_s=config.rollout.start_timeout_s,
        on_weight_update="keep",
        deterministic=config.rollout.deterministic and teacher.server_url is None,
    )
    try:
        [server] = create_servers(model, rollout=rollout)
    except ConfigError as error:
        raise ConfigError(f"the server of distillation.teachers.{name} cannot be created: {error}") from error
    server.name = f"teacher {name!r}"
    return server


def _without_other_ids(scores: TokenScores, *, vocab_size: int) -> TokenScores:
    """Return scores whose candidates are ids of the policy. Embeddings may have different numbers of unused rows."""
    if scores.top_ids is None or scores.top_logprobs is None:
        return scores
    is_known = (scores.top_ids >= 0) & (scores.top_ids < vocab_size)
    if is_known.all():
        return scores
    return TokenScores(
        scores.logprobs,
        np.where(is_known, scores.top_ids, 0),
        np.where(is_known, scores.top_logprobs, -np.inf),
    )


def _vocab_size(template: PolicyTemplate) -> int:
    """Return the number of token ids of the policy."""
    return template.vocab_size if isinstance(template, ChatTemplate) else len(template.tokenizer)
