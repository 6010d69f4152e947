"""The Hermes format: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen2.5, Qwen3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent_loop.chat.parsers.base import ToolParser
from agent_loop.chat.parsers.json_calls import read_body, read_call
from agent_loop.chat.parsers.walking import THINK, Block, Walker, malformed
from agent_loop.types import ParsedCompletion

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@ToolParser.register("hermes")
class HermesToolParser(ToolParser):
    """One object per block; two are malformed. Arguments are an object, or left out where there are none."""

    call_start = OPEN
    thoughts = (THINK,)

    def parse(self, text: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCompletion:
        return _WALKER.read(text)

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        others = ("<function=", "<arg_key>")
        return OPEN in chat_template and not any(other in chat_template for other in others)


def _read_block(text: str, start: int) -> Block:
    body = read_body(text, start, closings=(CLOSE,), stops=_STOPS)
    if not body.is_closed:
        return Block((malformed(body.text, f"the call is not closed with {CLOSE}"),), body.end)
    return Block((read_call(body),), body.end)


_STOPS = (OPEN, THINK.opening, THINK.closing)
_WALKER = Walker({OPEN: _read_block})
