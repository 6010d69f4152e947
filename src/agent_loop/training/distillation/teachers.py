"""Teachers: models on servers of their own that score the tokens of the policy's trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile
from typing import Any

import numpy as np

from agent_loop.chat.template import ChatTemplate
from agent_loop.config import Config, DistillationConfig, ModelConfig, RolloutConfig, TeacherConfig
from agent_loop.errors import ConfigError, DataError
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.servers.base import Ability, AsyncServerBase
from agent_loop.servers.factory import create_servers
from agent_loop.servers.scores import TokenScores, checked_scores
from agent_loop.training.advantages.estimate import SOURCE
from agent_loop.training.policy import load_vocabulary, refuse_other_vocabulary
from agent_loop.trajectory import Trajectory
from agent_loop.types import IntArray, Message

CLOSE_TIMEOUT_S = 30.0
HINT_TOKENS = 1024
"""Tokens that the context of a teacher with a hint is longer by."""


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


@dataclass(slots=True, eq=False)
class Teacher:
    """A teacher and its started server."""

    name: str
    config: TeacherConfig
    server: AsyncServerBase
    template: ChatTemplate
    """Chat template of the policy, which writes prompts with a hint."""
    context_length: int
    num_candidates: int
    _slots: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.config.max_concurrent)

    def hint(self, trajectory: Trajectory) -> str | None:
        """Return what the teacher is told beside the prompt; None if it reads the policy's own tokens."""
        texts = [] if self.config.hint is None else [self.config.hint]
        if self.config.hint_key is not None:
            value = trajectory.row.get(self.config.hint_key)
            if value is None:
                raise DataError(
                    f"the row of {trajectory.trajectory_id} has no column {self.config.hint_key!r} for its hint; add "
                    "it, or set hint_key to another column"
                )
            texts.append(str(value))
        return "\n".join(texts) if texts else None

    def prompt(self, trajectory: Trajectory) -> IntArray:
        """Return the teacher's prompt for a trajectory; the response follows it."""
        output, hint = trajectory.output, self.hint(trajectory)
        if hint is None:
            return output.prompt_ids
        messages = list(takewhile(lambda message: message.get("role") != "assistant", output.messages))
        if not np.array_equal(self.template.open(messages, tools=output.tool_schemas), output.prompt_ids):
            raise DataError(
                f"the prompt of {trajectory.trajectory_id} is not what the chat template writes for its first "
                "messages, so no hint can be put into it; use a teacher without a hint for such rows"
            )
        return self.template.open(_hinted(messages, hint), tools=output.tool_schemas)

    async def score(self, token_ids: IntArray, *, start: int) -> TokenScores:
        """Return the scores of the tokens of a text from `start` on, at most `timeout_s` after a slot is free."""
        vocab_size = self.template.vocab_size
        num_candidates = min(self.num_candidates, vocab_size)
        async with self._slots, asyncio.timeout(self.config.timeout_s):
            scores = await self.server.score(token_ids, start=start, top_logprobs=num_candidates)
        scores = checked_scores(
            scores,
            num_scores=len(token_ids) - start,
            top_logprobs=num_candidates,
            server=self.server.name,
        )
        return _without_other_ids(scores, vocab_size=vocab_size)


def _hinted(messages: Sequence[Message], hint: str) -> list[Message]:
    """Return messages whose last user message begins with the hint."""
    last = max((n for n, message in enumerate(messages) if message.get("role") == "user"), default=None)
    if last is None:
        raise DataError("a prompt has no user message, so no hint can be put before it")
    content: Any = messages[last].get("content")
    parts: Any = f"{hint}\n\n{content or ''}"
    if isinstance(content, list):
        parts = [{"type": "text", "text": f"{hint}\n\n"}, *content]
    return [*messages[:last], {**messages[last], "content": parts}, *messages[last + 1 :]]


class Teachers:
    """The teachers of a run."""

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
async def open_teachers(config: Config, *, template: ChatTemplate) -> AsyncGenerator[Teachers | None]:
    """Start the servers of all teachers, and close them at the end. None without teachers."""
    settings = config.distillation
    if not settings.teachers:
        yield None
        return
    async with AsyncExitStack() as stack:
        teachers: dict[str, Teacher] = {}
        for name, each in settings.teachers.items():
            has_hint = each.hint is not None or each.hint_key is not None
            length = each.context_length or (
                config.rollout.prompt_length + config.rollout.response_length + has_hint * HINT_TOKENS
            )
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
                template=template,
                context_length=length,
                num_candidates=settings.num_candidates,
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


def refuse_other_teachers(config: Config, *, tokenizer: Any = None) -> None:
    """Raise an error unless the tokenizers of policy and teachers give each token the same id."""
    if not config.distillation.teachers:
        return
    own_path = config.model.tokenizer_path or config.model.path
    own = load_vocabulary(own_path, config) if tokenizer is None else dict[str, int](tokenizer.get_vocab())
    for name, teacher in config.distillation.teachers.items():
        key, path = f"distillation.teachers.{name}", teacher.tokenizer_path or teacher.path
        if not path and teacher.server_url is None:
            continue  # the policy's own model
        if not path:
            raise ConfigError(
                f"{key} is at {teacher.server_url}, and its vocabulary has to be compared with the policy's; set "
                f"{key}.tokenizer_path"
            )
        try:
            other = load_vocabulary(path, config)
        except ConfigError as error:
            raise ConfigError(f"{error}; set {key}.tokenizer_path, to compare its vocabulary") from error
        refuse_other_vocabulary(own, other, key=key, path=path)
