"""The Hermes format: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen2.5, Qwen3)."""

from __future__ import annotations

from agent_loop.chat.parsers.completion_walker import THINK
from agent_loop.chat.parsers.json_calls import as_json
from agent_loop.chat.parsers.tool_parser import ToolParser


@ToolParser.register("hermes")
class HermesToolParser(ToolParser):
    """Parser of the Hermes format. A block holds one object; two are malformed."""

    call_start = "<tool_call>"
    call_end = "</tool_call>"
    reasoning_marks = (THINK,)

    def forced_call(self, name: str | None, *, chat_template: str) -> str | None:
        opening = f"{self.call_start}\n"
        return opening if name is None else f'{opening}{{"name": {as_json(name)}, "arguments":'

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        others = ("<function=", "<arg_key>")
        return cls.call_start in chat_template and not any(other in chat_template for other in others)
