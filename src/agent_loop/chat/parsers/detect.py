"""Finding the format of tool calls by the text of a chat template."""

from __future__ import annotations

from typing import Any

from agent_loop.chat.parsers.response_template import ResponseTemplateParser
from agent_loop.chat.parsers.tool_parser import ToolParser
from agent_loop.errors import ConfigError


def detect_parser(chat_template: str, *, response_template: Any = None, prompt: str = "") -> ToolParser:
    """The parser for what a chat template writes. Parsers of one's own take part by `recognises`.

    Args:
        chat_template: Its source.
        response_template: The tokenizer's own description of completions, for templates of no known format.
        prompt: Any rendered prompt.

    Raises:
        ConfigError: The template is of no known format, or of several.
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
