"""Finding the format of tool calls by the text of a chat template."""

from __future__ import annotations

from agent_loop.chat.parsers.base import ToolParser
from agent_loop.errors import ConfigError


def detect_format(chat_template: str) -> str:
    """The name of the parser for what a chat template writes. Parsers of one's own take part by `recognises`.

    Raises:
        ConfigError: The template is of no known format, or of several.
    """
    parsers = ToolParser.registered()
    names = sorted(name for name, parser in parsers.items() if parser.recognises(chat_template))
    if len(names) == 1:
        return names[0]
    found = f"fits {', '.join(names)}" if names else "shows no known format of tool calls"
    raise ConfigError(
        f"rollout.multi_turn.format is 'auto', but the chat template {found}; "
        f"name one of: {', '.join(names or sorted(parsers))}"
    )
