"""Bridges from cached renders, with slots for the text of the replies."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from agent_loop.chat.cached_render import CachedRender
from agent_loop.chat.encoding import ControlledEncoder
from agent_loop.chat.lru_cache import LruCache
from agent_loop.chat.placeholder_turns import CallKey
from agent_loop.chat.slot_check import CopyRule, RenderTexts, SlotCheck, split_at_slots
from agent_loop.types import IntArray, Message

RenderReplies: TypeAlias = Callable[[Sequence[Message], Sequence[CallKey]], str]
"""Runs the template on replies and the calls that the replies answer; returns the text of the bridge."""

MAX_RENDERS = 512
MAX_SHAPES = 16
"""Sequences of roles that are checked; longer conversations of other shapes run the template."""

_FIELDS = frozenset({"role", "content", "name", "tool_call_id"})
_READS_IDS = re.compile(r"\bid\b|tool_call_id")
_OTHER_IDS = ("", "call_0aZ-9:1")


class CachedBridges:
    """Encodes bridges without running the template for each.

    Args:
        render: Runs the template.
        check: Decides whether the template need not run again.
        encoder: Encoder of the tokenizer.
        chat_template: Source of the template.
    """

    def __init__(
        self, render: RenderReplies, *, check: SlotCheck, encoder: ControlledEncoder, chat_template: str
    ) -> None:
        self._render = render
        self._check = check
        self._encoder = encoder
        self._may_read_ids = _READS_IDS.search(chat_template) is not None
        self._renders: LruCache[CachedRender | None] = LruCache(MAX_RENDERS)
        self._rules: dict[object, _BridgeRule] = {}

    def check_shape(self, key: str, replies: Sequence[Message], answered: Sequence[CallKey]) -> None:
        """Check whether bridges of this shape can be cached: bridges of the same key and the same roles."""
        rule = self._check.find_rule(self._render_with(replies, answered), num_slots=len(replies))
        reads_ids = rule is not None and self._reads_ids(replies, answered)
        self._rules[_shape(key, replies)] = _BridgeRule(rule, reads_ids)

    def ids(self, key: str, replies: Sequence[Message], answered: Sequence[CallKey]) -> IntArray | None:
        """Return the tokens of a bridge, shape [num_tokens], or None if the template has to run."""
        if not all(map(_is_plain, replies)):
            return None
        shape = _shape(key, replies)
        if shape not in self._rules:
            if len(self._rules) >= MAX_SHAPES:
                return None
            self.check_shape(key, replies, answered)
        rule, reads_ids = self._rules[shape]
        if rule is None:
            return None
        inputs = (key, _template_inputs(replies, answered, with_ids=reads_ids))
        cached = self._renders.get(inputs, lambda: self._cached(replies, answered))
        if cached is None:
            return None
        return cached.ids([self._check.copied(reply["content"], rule=rule) for reply in replies])

    def _cached(self, replies: Sequence[Message], answered: Sequence[CallKey]) -> CachedRender | None:
        parts = split_at_slots(self._render_with(replies, answered), num_slots=len(replies))
        return None if parts is None else CachedRender(parts, encoder=self._encoder)

    def _render_with(self, replies: Sequence[Message], answered: Sequence[CallKey]) -> RenderTexts:
        def render(texts: Sequence[str]) -> str:
            filled = [{**reply, "content": text} for reply, text in zip(replies, texts, strict=True)]
            return self._render(filled, answered)

        return render

    def _reads_ids(self, replies: Sequence[Message], answered: Sequence[CallKey]) -> bool:
        """Return whether the render depends on the ids of calls: the source names ids, or other ids change the
        render."""
        if self._may_read_ids:
            return True
        expected = self._render(replies, answered)
        others = (
            self._render(
                [{**reply, "tool_call_id": id_} for reply in replies],
                [CallKey(call.name, id_) for call in answered],
            )
            for id_ in _OTHER_IDS
        )
        return any(other != expected for other in others)


class _BridgeRule(NamedTuple):
    copy_rule: CopyRule | None
    """None if the template has to run for each bridge."""
    reads_ids: bool
    """Whether the render depends on the ids of calls."""


def _shape(key: str, replies: Sequence[Message]) -> object:
    """Return the key and the roles; consecutive replies of one role count once, however many there are."""
    return key, *map(itemgetter(0), groupby([reply.get("role") for reply in replies]))


def _template_inputs(replies: Sequence[Message], answered: Sequence[CallKey], *, with_ids: bool) -> object:
    """Return all inputs of the template except the texts. Ids are new in each turn, so they count only where the
    template reads them."""
    if with_ids:
        return (*[(r["role"], r.get("name"), r.get("tool_call_id")) for r in replies], *answered)
    return (*[(r["role"], r.get("name")) for r in replies], *[call.name for call in answered])


def _is_plain(reply: Message) -> bool:
    return isinstance(reply.get("content"), str) and _FIELDS.issuperset(reply)
