"""Detection of the format of tool calls by the source of a chat template."""

from __future__ import annotations

from typing import Any

from agent_loop.chat.parsers.response_template import ResponseTemplateParser
from agent_loop.chat.parsers.tool_parser import ToolParser
from agent_loop.errors import ConfigError


def detect_parser(chat_template: str, *, response_template: Any = None, prompt: str = "") -> ToolParser:
    """Return the parser of the format that a chat template shows. User-defined parsers take part with `recognises`.

    Args:
        chat_template: Source of the template.
        response_template: The tokenizer's response template, for templates of no known format.
        prompt: Any rendered prompt.

    Raises:
        ConfigError: The template shows no known format, or several formats.
    """
    parsers = ToolParser.registered()
    names = sorted(name for name, parser in parsers.items() if parser.recognises(chat_template))
    if len(names) == 1:
        return ToolParser.get(names[0])
    if not names and response_template is not None:
        return ResponseTemplateParser(response_template, prompt=prompt)
    unknown = "shows no known format of tool calls, and the tokenizer has no response_template"
    found = f"fits {', '.join(names)}" if names else unknown
    raise ConfigError(
        f"rollout.multi_turn.format is 'auto', but the chat template {found}; "
        f"name one of: {', '.join(names or sorted(parsers))}"
    )
