"""First prompts from cached renders: one for each pair of system prompt and tools, with a slot for the question."""

from __future__ import annotations

import marshal
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from agent_loop.chat.cached_render import CachedRender
from agent_loop.chat.encoding import ControlledEncoder
from agent_loop.chat.lru_cache import LruCache
from agent_loop.chat.rendering import Renderer
from agent_loop.chat.slot_check import CopyRule, RenderTexts, SlotCheck, split_at_slots
from agent_loop.types import IntArray, Message

MAX_RENDERS = 64
"""Pairs of system prompt and tools whose renders are kept."""

_CLOCK = "strftime_now"
_FORMAT = re.compile(_CLOCK + r"\(\s*(?:'([^'\\]*)'|\"([^\"\\]*)\")\s*\)")


class CachedPrompts:
    """Encodes prompts of one user message, with or without a system prompt before it.

    Args:
        renderer: Renderer of the template.
        check: Decides whether the template need not run again.
        encoder: Encoder of the tokenizer.
        chat_template: Source of the template.
    """

    def __init__(
        self, renderer: Renderer, *, check: SlotCheck, encoder: ControlledEncoder, chat_template: str
    ) -> None:
        self._renderer = renderer
        self._check = check
        self._encoder = encoder
        formats = _FORMAT.findall(chat_template)
        self._has_readable_clock = len(formats) == chat_template.count(_CLOCK)
        self._clock_formats = sorted({single or double for single, double in formats})
        self._rules: dict[tuple[bool, bool], CopyRule | None] = {}
        """Rules by presence of a system prompt and of tools."""
        self._renders: LruCache[CachedRender | None] = LruCache(MAX_RENDERS)

    def ids(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]]) -> IntArray | None:
        """Return the tokens of a prompt, shape [num_tokens], or None if the template has to run.

        Raises:
            ChatTemplateError: The template refuses the messages.
        """
        key = self._key(messages, tools)
        if key is None:
            return None
        render = self._render_with(messages, tools)
        shape = (len(messages) > 1, bool(tools))
        if shape not in self._rules:
            self._rules[shape] = self._check.find_rule(render, num_slots=1)
        rule = self._rules[shape]
        if rule is None:
            return None
        cached = self._renders.get(key, lambda: self._cached(render))
        if cached is None:
            return None
        return cached.ids([self._check.copied(messages[-1]["content"], rule=rule)])

    def _cached(self, render: RenderTexts) -> CachedRender | None:
        parts = split_at_slots(render, num_slots=1)
        return None if parts is None else CachedRender(parts, encoder=self._encoder)

    def _key(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> bytes | None:
        """Return all inputs of the template except the question, its clock included; None for other prompts."""
        is_question = [message.get("role") for message in messages] in (["user"], ["system", "user"])
        if not (is_question and self._has_readable_clock and all(map(_is_plain, messages))):
            return None
        now = datetime.now() if self._clock_formats else None
        clock = [now.strftime(text) for text in self._clock_formats] if now else []
        system = [message["content"] for message in messages[:-1]]
        try:
            return marshal.dumps((system, [dict(tool) for tool in tools], clock), 2)
        except ValueError:  # a schema may hold objects that marshal does not know
            return None

    def _render_with(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> RenderTexts:
        def render(texts: Sequence[str]) -> str:
            return self._renderer.text([*messages[:-1], {**messages[-1], "content": texts[0]}], tools=tools)

        return render


def _is_plain(message: Message) -> bool:
    return message.keys() == {"role", "content"} and isinstance(message["content"], str)
