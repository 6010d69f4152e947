"""Parser for formats that only a tokenizer's response template describes.

A response template (`transformers` 5.13 and later) names regions of a completion: how each opens and closes, and how
its body becomes a field of the message. The parser of `transformers` raises an error if one call is broken, returns
calls that are cut off, drops all text but the last, and takes quadratic time. So only its loading of the template and
its parsing of a single body are used here, and each body is validated before and after.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agent_loop.chat.parsers.completion_walker import malformed
from agent_loop.chat.parsers.json_calls import JsonFault, as_call, decode_json
from agent_loop.chat.parsers.tool_parser import ToolParser
from agent_loop.chat.parsers.untyped_values import parameter_schemas, read_value
from agent_loop.errors import ConfigError
from agent_loop.types import MalformedCall, ParsedCompletion, ToolCall

MAX_SECONDS = 1.0
"""Time limit of all searches in one completion, since a template may contain any regular expression."""

MAX_BODY_CHARS = 50_000
"""Maximum length of a call; longer calls are malformed, since parsing some bodies takes quadratic time."""

CALLS = "tool_calls"
REASONING = frozenset({"reasoning_content", "reasoning", "thinking", "thought"})


class ResponseTemplateParser(ToolParser):
    """Parses completions by a tokenizer's `response_template`.

    A call counts if its region is closed and its body is parsed completely. Text outside of regions, and regions with
    unknown names, are content.

    Args:
        response_template: The tokenizer's response template.
        prompt: A rendered prompt. The beginning of the assistant's turn in it belongs to the completion.

    Raises:
        ConfigError: The installed `transformers` cannot load the template.
    """

    reads_end_tokens = True

    def __init__(self, response_template: Any, *, prompt: str = "") -> None:
        try:
            from transformers.utils.chat_parsing import content_parsers, response_templates

            spec: Any = cast(Any, response_templates).load_response_template(response_template)
        except (ImportError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"rollout.multi_turn.format is 'auto', and the tokenizer's response_template cannot be used: {error}; "
                f"name one of: {', '.join(sorted(ToolParser.registered()))}"
            ) from error
        self._process_field: Any = cast(Any, content_parsers).process_field
        self._fields: Mapping[str, Any] = spec.fields
        self._implicit = cast("str | None", spec.implicit)
        self._openings = {name: field for name, field in self._fields.items() if field.open_re is not None}
        has_anchor = spec.start_anchor_re.search(prompt) is not None
        self._opened = cast(str, spec.truncate_past_last_anchor(prompt)) if has_anchor else ""
        literals = getattr(self._fields.get(CALLS), "open_literals", None)
        self.call_start = str(literals[0]) if literals and len(literals) == 1 else ""

    def parse(self, text: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCompletion:
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall | MalformedCall] = []
        text = self._opened + text
        searches = _Searches(text)
        position = 0
        try:
            while position < len(text):
                opening, field = searches.first(self._openings, position)
                start = opening.start() if opening else len(text)
                content.append(self._content(text[position:start], searches))
                if opening is None:
                    break
                closing = field.close_re and searches.next(field.close_re, opening.end())
                end = closing.end() if closing else len(text)
                position = max(end, start + 1)
                body = text[opening.end() : closing.start() if closing else end]
                if end == start:  # the region opens and closes on nothing
                    content.append(self._content(text[start:position], searches))
                elif field.name in REASONING:
                    reasoning.append(body.strip())
                elif field.name != CALLS:
                    content.append(body)
                elif closing:
                    captures = {key: value for key, value in opening.groupdict().items() if value is not None}
                    calls += self._read_calls(body, field, captures, tools=tools, searches=searches)
                else:
                    calls.append(malformed(text[start:], "the call is not closed"))
        except TimeoutError:
            error = f"the completion took over {MAX_SECONDS:g} s to read; write less"
            calls.append(malformed(text[position:], error))
        return ParsedCompletion(
            "".join(content).strip(), tuple(calls), "\n".join(reasoning) if reasoning else None
        )

    def _content(self, text: str, searches: _Searches) -> str:
        """Return the text between regions, without the text that closes the message."""
        closing = None if self._implicit is None else self._fields[self._implicit].close_re
        return text if closing is None else closing.sub("", text, timeout=searches.seconds_left())

    def _read_calls(
        self,
        body: str,
        field: Any,
        captures: Mapping[str, str],
        *,
        tools: Sequence[Mapping[str, Any]],
        searches: _Searches,
    ) -> list[ToolCall | MalformedCall]:
        if len(body) > MAX_BODY_CHARS:
            error = f"the call is longer than {MAX_BODY_CHARS} characters; write less"
            return [malformed(body[:MAX_BODY_CHARS], error)]
        if fault := _fault_in(body, field, searches):
            return [malformed(body, fault)]
        try:
            value = self._process_field(body, field, captures)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            return [malformed(body, f"the call cannot be read: {' '.join(str(error).split())[:300]}")]
        values = cast(list[Any], value) if isinstance(value, list) else [value]
        return [_call_in(each, text=body, field=field, tools=tools) for each in values]


class _Searches:
    """Searches in one completion, all within the time limit. Each opening is searched once."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._deadline = time.monotonic() + MAX_SECONDS
        self._found: dict[str, Any] = {}

    def next(self, pattern: Any, start: int) -> Any:
        """Return a match at or after a position, or None."""
        return pattern.search(self._text, start, timeout=self.seconds_left())

    def first(self, openings: Mapping[str, Any], position: int) -> tuple[Any, Any]:
        """Return the match and the field of the next opening, the longest of several at one position, or None."""
        for name, field in openings.items():
            known = self._found.get(name, self)
            if known is self or (known is not None and known.start() < position):
                self._found[name] = self.next(field.open_re, position)
        found = [(match.start(), -match.end(), name) for name, match in self._found.items() if match]
        _, _, name = min(found, default=(0, 0, ""))
        return self._found.get(name), openings.get(name)

    def seconds_left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


def _fault_in(body: str, field: Any, searches: _Searches) -> str:
    """Return the error of a body that `transformers` would ignore, or "" if there is none."""
    arguments = cast(Mapping[str, Any], field.content_args or {})
    if field.content == "json" and not arguments.keys() & {
        "string_delims",
        "unquoted_keys",
        "allow_non_json",
    }:
        try:
            decode_json(body)
        except JsonFault as fault:
            return f"the call is not valid JSON: {fault}"
    if field.content == "xml-inline" and "tag_pattern" in arguments:
        import regex  # late: comes with transformers

        pattern: Any = cast(Any, regex).compile(str(arguments["tag_pattern"]), cast(Any, regex).DOTALL)
        left = pattern.sub("", body, timeout=searches.seconds_left())
        left = _CLOSING_TAG.sub("", left).strip(" \t\r\n,;")
        return f"the arguments hold {left[:60]!r}, which belongs to none of them" if left else ""
    if field.content == "kv-lines":
        separator = str(arguments.get("kv_sep", ":"))
        lines = body.split(str(arguments.get("line_sep", "\n")))
        bad = next((line for line in lines if line.strip() and separator not in line), None)
        return "" if bad is None else f"the line {bad.strip()[:60]!r} has no {separator!r}"
    return ""


def _call_in(
    value: Any, *, text: str, field: Any, tools: Sequence[Mapping[str, Any]]
) -> ToolCall | MalformedCall:
    call = as_call(value, text=text)
    if isinstance(call, MalformedCall):
        return call
    try:
        decode_json(json.dumps(call.arguments))
    except (ValueError, TypeError, RecursionError) as error:
        return malformed(text, f"the arguments are not JSON: {error}")
    if field.content == "json":
        return call
    schemas = parameter_schemas(tools, name=call.name)
    typed = {
        key: read_value(held, schema=schemas[key]) if key in schemas and isinstance(held, str) else held
        for key, held in call.arguments.items()
    }
    return ToolCall(call.name, typed, call.id)


_CLOSING_TAG = re.compile(r"</[^<>]*>")


def detect_parser(chat_template: str, *, response_template: Any = None, prompt: str = "") -> ToolParser:
    """Return the parser of the format that a chat template shows. User-defined parsers take part with `recognises`."""
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
