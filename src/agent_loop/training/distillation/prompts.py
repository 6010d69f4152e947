"""Prompts of teachers: those of the policy, with a hint."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from agent_loop.chat.template import ChatTemplate
from agent_loop.config import TeacherConfig
from agent_loop.errors import ConfigError, DataError
from agent_loop.trajectory import Trajectory
from agent_loop.types import IntArray, Message

MAX_PROMPTS = 4096
"""Number of prompts that are kept, because the trajectories of a group share theirs."""


class TeacherPrompts:
    """Prompts of one teacher. Without a hint, they are the policy's own tokens.

    Args:
        config: The teacher.
        template: Chat template of the policy, which renders prompts with a hint.

    Raises:
        ConfigError: There is a hint, and the run has no chat template.
    """

    def __init__(self, config: TeacherConfig, *, template: object) -> None:
        self._hint, self._key = config.hint, config.hint_key
        self._template: ChatTemplate | None = None
        self._prompts: dict[tuple[bytes, str], IntArray] = {}
        if self._hint is None and self._key is None:
            return
        if not isinstance(template, ChatTemplate):
            raise ConfigError(
                "a teacher has a hint, which needs a manager with a chat template; unset the hint"
            )
        self._template = template

    def prompt(self, trajectory: Trajectory) -> IntArray:
        """Return the teacher's prompt for a trajectory; the response follows it.

        Raises:
            DataError: The row lacks the column of the hint, or a hint cannot be put into its prompt.
            ChatTemplateError: The template refuses the messages with the hint.
        """
        prompt_ids = trajectory.output.prompt_ids
        template = self._template
        if template is None:
            return prompt_ids
        hint = self._hint_of(trajectory)
        key = (prompt_ids.tobytes(), hint)
        if key not in self._prompts:
            if len(self._prompts) >= MAX_PROMPTS:
                self._prompts.clear()
            self._prompts[key] = _with_hint(trajectory, hint=hint, template=template)
        return self._prompts[key]

    def _hint_of(self, trajectory: Trajectory) -> str:
        texts = [] if self._hint is None else [self._hint]
        if self._key is not None:
            value = trajectory.row.get(self._key)
            if value is None:
                raise DataError(
                    f"the row of {trajectory.trajectory_id} has no column {self._key!r} for its hint; add it, or set "
                    "hint_key to another column"
                )
            texts.append(str(value))
        return "\n".join(texts)


def _with_hint(trajectory: Trajectory, *, hint: str, template: ChatTemplate) -> IntArray:
    messages, tools = _prompt_messages(trajectory.output.messages), trajectory.output.tool_schemas
    if not np.array_equal(template.open(messages, tools=tools), trajectory.output.prompt_ids):
        raise DataError(
            f"the prompt of {trajectory.trajectory_id} is not what the chat template writes for its first messages, so "
            "no hint can be put into it; use a teacher without a hint for such rows"
        )
    return template.open(_hinted(messages, hint), tools=tools)


def _prompt_messages(messages: Sequence[Message]) -> list[Message]:
    """Return the messages before the first completion of the policy."""
    return list(takewhile(lambda message: message.get("role") != "assistant", messages))


def _hinted(messages: Sequence[Message], hint: str) -> list[Message]:
    """Return messages whose last user message begins with the hint.

    Raises:
        DataError: There is no user message.
    """
    last = max((n for n, message in enumerate(messages) if message.get("role") == "user"), default=None)
    if last is None:
        raise DataError("a prompt has no user message, so no hint can be put before it")
    content: Any = messages[last].get("content")
    parts: Any = f"{hint}\n\n{content or ''}"
    if isinstance(content, list):
        parts = [{"type": "text", "text": f"{hint}\n\n"}, *content]
    return [*messages[:last], {**messages[last], "content": parts}, *messages[last + 1 :]]
