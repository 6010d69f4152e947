"""First prompts from cached renders: one for each list of tools, with slots for the system prompt and the question."""

from __future__ import annotations

import marshal
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from agent_loop.chat.cached_render import CachedRender
from agent_loop.chat.encoding import ControlledEncoder
from agent_loop.chat.lru_cache import LruCache
from agent_loop.chat.probes import PROBE_TOOLS
from agent_loop.chat.rendering import Renderer
from agent_loop.chat.slot_check import CopyRule, RenderTexts, SlotCheck, split_at_slots
from agent_loop.types import IntArray, Message

MAX_HEADS = 64
"""Lists of tools whose renders are kept."""
MAX_PROMPTS = 64
"""Pairs of system prompt and tools whose renders are kept."""

_CLOCK = "strftime_now"
_FORMAT = re.compile(_CLOCK + r"\(\s*(?:'([^'\\]*)'|\"([^\"\\]*)\")\s*\)")


@dataclass(frozen=True, slots=True)
class _Head:
    """Render with slots for the system prompt and the question, and the rules by which their texts are copied."""

    render: CachedRender
    rules: tuple[CopyRule, ...]


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Render with a slot for the question, and the rule by which its text is copied."""

    render: CachedRender
    rule: CopyRule


class CachedPrompts:
    """Encodes prompts of one user message, with or without a system prompt before it.

    The template runs once for each list of tools, if the check finds that it copies system prompts, and otherwise once
    for each pair of system prompt and tools.

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
        """Rules of the question by presence of a system prompt and of tools."""
        self._head_rules: dict[bool, tuple[CopyRule, ...] | None] = {}
        """Rules of the system prompt and the question, by presence of tools."""
        self._heads: LruCache[_Head | None] = LruCache(MAX_HEADS)
        self._prompts: LruCache[_Prompt | None] = LruCache(MAX_PROMPTS)

    def ids(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]]) -> IntArray | None:
        """Return the tokens of a prompt, shape [num_tokens], or None if the template has to run.

        Raises:
            ChatTemplateError: The template refuses the messages.
        """
        tools_key = self._tools_key(messages, tools)
        if tools_key is None:
            return None
        key = (tools_key, *(message["content"] for message in messages[:-1]))
        prompt = self._prompts.get(key, lambda: self._prompt(messages, tools, tools_key))
        if prompt is None:
            return None
        return prompt.render.ids([self._check.copied(messages[-1]["content"], rule=prompt.rule)])

    def _tools_key(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> bytes | None:
        """Return all inputs of the template except the texts, its clock included; None for other prompts."""
        is_question = [message.get("role") for message in messages] in (["user"], ["system", "user"])
        if not (is_question and self._has_readable_clock and all(map(_is_plain, messages))):
            return None
        now = datetime.now() if self._clock_formats else None
        clock = [now.strftime(text) for text in self._clock_formats] if now else []
        try:
            return marshal.dumps(([dict(tool) for tool in tools], clock), 2)
        except ValueError:  # a schema may hold objects that marshal does not know
            return None

    def _prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], tools_key: bytes
    ) -> _Prompt | None:
        if len(messages) > 1 and messages[0]["content"].strip():
            head = self._heads.get(tools_key, lambda: self._head(messages, tools))
            if head is not None:
                text = self._check.copied(messages[0]["content"], rule=head.rules[0])
                return _Prompt(head.render.with_first(text), head.rules[1])
        rule = self._rule(messages, tools)
        parts = None if rule is None else split_at_slots(self._render_with(messages, tools), num_slots=1)
        if rule is None or parts is None:
            return None
        return _Prompt(CachedRender(parts, encoder=self._encoder), rule)

    def _head(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> _Head | None:
        has_tools = bool(tools)
        if has_tools not in self._head_rules:
            render = self._render_with(messages, _sample_of(tools), num_slots=2)
            self._head_rules[has_tools] = self._check.find_rules(render, may_be_blank=(False, True))
        rules = self._head_rules[has_tools]
        parts = rules and split_at_slots(self._render_with(messages, tools, num_slots=2), num_slots=2)
        return _Head(CachedRender(parts, encoder=self._encoder), rules) if rules and parts else None

    def _rule(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> CopyRule | None:
        shape = (len(messages) > 1, bool(tools))
        if shape not in self._rules:
            self._rules[shape] = self._check.find_rule(
                self._render_with(messages, _sample_of(tools)), num_slots=1
            )
        return self._rules[shape]

    def _render_with(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, num_slots: int = 1
    ) -> RenderTexts:
        """Return a function that renders the messages with other texts in the last of them."""
        kept, filled = messages[:-num_slots], messages[-num_slots:]

        def render(texts: Sequence[str]) -> str:
            changed = [{**message, "content": text} for message, text in zip(filled, texts, strict=True)]
            return self._renderer.text([*kept, *changed], tools=tools)

        return render


def _sample_of(tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return tools for the check: rules depend on whether there are tools, not on which."""
    return PROBE_TOOLS[:1] if tools else ()


def _is_plain(message: Message) -> bool:
    return message.keys() == {"role", "content"} and isinstance(message["content"], str)
