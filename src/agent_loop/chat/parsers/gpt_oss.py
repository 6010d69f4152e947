"""The harmony format of gpt-oss: messages with a channel, and calls as messages with a recipient:

```
<|channel|>analysis<|message|>...<|end|>
<|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>
<|start|>assistant<|channel|>final<|message|>...<|return|>
```
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agent_loop.chat.parsers.completion_walker import find_first, malformed
from agent_loop.chat.parsers.json_calls import read_arguments, read_body
from agent_loop.chat.parsers.tool_parser import ToolParser
from agent_loop.types import MalformedCall, ParsedCompletion, ToolCall

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"


@ToolParser.register("gpt-oss")
class GptOssToolParser(ToolParser):
    """Parser of the harmony format. The analysis channel is reasoning, a message to `functions.name` is a call, and all
    other messages are content.

    A completion begins after the generation prompt's `<|start|>assistant`: with a header without a start, or with plain
    text. The recipient may be in the role or in the channel, or the type may name the function, on any channel.
    `<|call|>` closes a call and ends the turn, as does `<|return|>`. The end of the text closes a call as well, since
    the last token of a turn may be missing. A commentary header without `<|message|>` is a malformed call.
    """

    call_ends = (CALL,)
    shown_by = (CHANNEL, MESSAGE)
    content_opening = f"{CHANNEL}final{MESSAGE}"

    def parse(self, text: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCompletion:
        reasoning: list[str] = []
        content: list[str] = []
        calls: list[ToolCall | MalformedCall] = []
        position = 0
        while position < len(text):
            header = _HEADER.match(text, position)
            recipient = _recipient_in(header[0]) if header else ""
            channel = (header["channel"] or "").strip().partition(" ")[0] if header else ""
            if header and recipient:
                call, position = _read_call(text, header.end(), recipient=recipient)
                calls.append(call)
                continue
            marker = next((each for each in (START, CHANNEL) if text.startswith(each, position)), "")
            start = header.end() if header else position + len(marker)
            end, marker = find_first(text, start, (START, CHANNEL, *_ENDS))
            if header:
                (reasoning if channel == "analysis" else content).append(text[start:end].strip())
            elif _CALL_HEADER.match(text[position:end]):
                error = f"the header of the call is not followed by {MESSAGE}"
                calls.append(malformed(text[position:end], error))
            else:
                words = _HEADER_WORDS.match(text, position)
                written = reasoning if words and words["channel"] == "analysis" else content
                written.append(text[words.end() if words else position : end].strip())
            position = end + len(marker) if marker in _ENDS else end
        return ParsedCompletion(
            "\n".join(filter(None, content)), tuple(calls), "\n".join(reasoning) if reasoning else None
        )

    def forced_call(self, name: str | None, *, chat_template: str) -> str | None:
        opening = f"{CHANNEL}commentary to=functions."
        return opening if name is None else f"{opening}{name} <|constrain|>json{MESSAGE}"


def _read_call(text: str, start: int, *, recipient: str) -> tuple[ToolCall | MalformedCall, int]:
    body = read_body(text, start, closings=(CALL, RETURN), stops=(START, CHANNEL, END))
    if not body.is_closed and body.end < len(text):
        return malformed(body.text, f"the call is not closed with {CALL}"), body.end
    return read_arguments(body, name=recipient.removeprefix("functions.")), body.end


def _recipient_in(header: str) -> str:
    """Return the recipient of a message, or "" if the model writes to itself, as in a forged tool reply."""
    found = _RECIPIENT.search(header)
    return found[found.lastindex or 0] if found and found[1] != "assistant" else ""


_ENDS = (END, CALL, RETURN)
_HEADER = re.compile(
    r"(?:<\|start\|>[^<]*+|\s*+(?:assistant\b)?+\s*+(?:to=[^\s<]++)?+\s*+)"
    r"(?:(?:<\|channel\|>|(?=(?:analysis|commentary|final)\b))(?P<channel>[^<]*+))?+"
    r"(?:<\|constrain\|>[^<]*+)?+<\|message\|>"
)
_HEADER_WORDS = re.compile(
    r"<\|start\|>(?:assistant)?+|<\|channel\|>(?P<channel>analysis|commentary|final)?+"
)
_CALL_HEADER = re.compile(
    r"(?:<\|start\|>|<\|channel\|>).*\bto=(?!assistant)|\s*+to=functions\.|<\|channel\|>commentary\b",
    re.DOTALL,
)
"""Beginning of a call, or of a commentary whose header is broken."""
_RECIPIENT = re.compile(r"\bto=([^\s<]++)|<\|constrain\|>\s*+(functions\.[^\s<]++)")
