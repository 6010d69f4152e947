"""Detects the end of the first tool call of a completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent_loop.chat.template import ChatTemplate
from agent_loop.completions.detokenizer import StreamDetokenizer


class FirstCallEnd:
    """Detector of the end of a turn's first call, for `parallel_tool_calls: false`.

    The text is parsed only where a text that ends calls occurs, since a call may contain that text in a string.

    Args:
        template: Chat template of the model. Its parser has `first_call_ends`.
        tools: Tools that the model may call.
        prefix: Text of the turn before the completion, with the opening of reasoning that the prompt wrote.
    """

    def __init__(self, template: ChatTemplate, *, tools: Sequence[Mapping[str, Any]], prefix: str) -> None:
        self._parser = template.tool_parser
        self._tools = tools
        self._stream = StreamDetokenizer(template.encoder.decode)
        self._text = prefix
        self._ends = self._parser.first_call_ends
        self._longest = max(map(len, self._ends))

    def __call__(self, token_ids: Sequence[int]) -> bool:
        """Add tokens, and return whether they complete the first call."""
        added = self._stream.feed(token_ids)
        self._text += added
        recent = self._text[-(len(added) + self._longest - 1) :]
        if not added or not any(end in recent for end in self._ends):
            return False
        return bool(self._parser.parse(self._text, tools=self._tools).tool_calls)
