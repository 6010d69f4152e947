"""The Hermes format: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen2.5, Qwen3)."""

from __future__ import annotations

import json
from typing import Any, cast

from agent_loop.chat.parsers.base import ToolParser, split_reasoning
from agent_loop.types import MalformedCall, ParsedCompletion, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@ToolParser.register("hermes")
class HermesToolParser(ToolParser):
    """Calls inside `<think>` are not calls. A call that is not closed, or whose JSON is wrong, is malformed."""

    call_start = OPEN

    def parse(self, text: str) -> ParsedCompletion:
        reasoning, spoken = split_reasoning(text)
        calls: list[ToolCall | MalformedCall] = []
        before, *blocks = spoken.split(OPEN)
        content = [before]
        for block in blocks:
            body, closed, after = block.partition(CLOSE)
            calls.append(
                _read_call(body) if closed else _malformed(body, f"the call is not closed with {CLOSE}")
            )
            content.append(after)
        return ParsedCompletion("".join(content).strip(), tuple(calls), reasoning)


def _read_call(body: str) -> ToolCall | MalformedCall:
    try:
        call = json.loads(body)
    except (json.JSONDecodeError, RecursionError) as error:
        return _malformed(body, f"the call is not valid JSON: {error}")
    if not isinstance(call, dict):
        return _malformed(body, 'the call must be a JSON object with "name" and "arguments"')
    fields = cast(dict[str, Any], call)
    name, arguments = fields.get("name"), fields.get("arguments", {})
    if not isinstance(name, str) or not name:
        return _malformed(body, 'the call has no "name", or it is not a string')
    if not isinstance(arguments, dict):
        return _malformed(body, '"arguments" must be a JSON object')
    return ToolCall(name, cast(dict[str, Any], arguments))


def _malformed(body: str, error: str) -> MalformedCall:
    return MalformedCall(text=body.strip(), error=error)
