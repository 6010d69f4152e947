"""The Granite 3 format: `<|tool_call|>[{"name": ..., "arguments": {...}}]`. Granite 4 writes the Hermes format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent_loop.chat.parsers.completion_walker import THINK, CompletionWalker
from agent_loop.chat.parsers.json_calls import as_json
from agent_loop.chat.parsers.mistral import read_listed_calls
from agent_loop.chat.parsers.tool_parser import ToolParser
from agent_loop.types import ParsedCompletion


@ToolParser.register("granite")
class GraniteToolParser(ToolParser):
    """Parser of the Granite 3 format. Some models write `<tool_call>`. A call ends with its JSON."""

    call_start = "<|tool_call|>"
    stream_stops = (call_start, "<tool_call>")
    reasoning_marks = (THINK,)

    def parse(self, text: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCompletion:
        return _WALKER.read(text)

    def forced_call(self, name: str | None, *, chat_template: str) -> str | None:
        return f"{self.call_start}[" + ("" if name is None else f'{{"name": {as_json(name)}, "arguments":')

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        return cls.call_start in chat_template and "<|start_of_role|>" in chat_template


_WALKER = CompletionWalker(
    dict.fromkeys(GraniteToolParser.stream_stops, read_listed_calls), ends=("<|end_of_text|>",)
)
