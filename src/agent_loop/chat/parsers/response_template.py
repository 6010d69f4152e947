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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from agent_loop.chat.parsers.completion_walker import malformed
from agent_loop.chat.parsers.json_calls import JsonFault, as_call, decode_json, is_too_deep
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
        has_anchor = spec.start_anchor_re.search(prompt) is not None
        self._opened = cast(str, spec.truncate_past_last_anchor(prompt)) if has_anchor else ""
        literals = getattr(self._fields.get(CALLS), "open_literals", None)
        self.call_start = str(literals[0]) if literals and len(literals) == 1 else ""

    def parse(self, text: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCompletion:
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall | MalformedCall] = []
        walk = _Walk(self._opened + text, fields=self._fields, implicit=self._implicit)
        try:
            for region in walk.regions():
                if region.field is None or region.name not in (CALLS, *REASONING):
                    content.append(region.body)
                elif region.name == CALLS:
                    calls += self._read_calls(region, tools=tools, walk=walk)
                else:
                    reasoning.append(region.body.strip())
        except TimeoutError:
            rest = walk.text[walk.position :]
            calls.append(malformed(rest, f"the completion took over {MAX_SECONDS:g} s to read; write less"))
        return ParsedCompletion(
            "".join(content).strip(), tuple(calls), "\n".join(reasoning) if reasoning else None
        )

    def _read_calls(
        self, region: _Region, *, tools: Sequence[Mapping[str, Any]], walk: _Walk
    ) -> list[ToolCall | MalformedCall]:
        body, field = region.body, region.field
        if not region.is_closed:
            return [malformed(region.text, "the call is not closed")]
        if len(body) > MAX_BODY_CHARS:
            error = f"the call is longer than {MAX_BODY_CHARS} characters; write less"
            return [malformed(region.text[:MAX_BODY_CHARS], error)]
        if fault := _fault_in(body, field, walk):
            return [malformed(region.text, fault)]
        try:
            value = self._process_field(body, field, region.captures)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            return [malformed(region.text, f"the call cannot be read: {' '.join(str(error).split())[:300]}")]
        values = cast(list[Any], value) if isinstance(value, list) else [value]
        return [_call_in(each, text=region.text, field=field, tools=tools) for each in values]


class _Region(NamedTuple):
    """Region of a completion."""

    field: Any
    """Field of the template; None for text outside of all fields."""
    body: str
    text: str
    """Text of the region, its opening and closing included."""
    captures: Mapping[str, str]
    is_closed: bool

    @property
    def name(self) -> str:
        return "" if self.field is None else str(self.field.name)


class _Walk:
    """Splits a completion into regions, left to right. Each opening is searched once."""

    def __init__(self, text: str, *, fields: Mapping[str, Any], implicit: str | None) -> None:
        self.text = text
        self.position = 0
        self._implicit = None if implicit is None else fields[implicit]
        self._openings = {name: field for name, field in fields.items() if field.open_re is not None}
        self._found: dict[str, Any] = {}
        self._deadline = time.monotonic() + MAX_SECONDS

    def regions(self) -> Iterator[_Region]:
        """Yield all regions."""
        while self.position < len(self.text):
            start, field, opening = self._next_opening()
            if start > self.position:
                yield from self._outside(self.position, start)
            if opening is None:
                self.position = len(self.text)
                return
            closing = None if field.close_re is None else self.search(field.close_re, opening.end())
            body_end, end = (closing.start(), closing.end()) if closing else (len(self.text),) * 2
            captures = {key: value for key, value in opening.groupdict().items() if value is not None}
            body = self.text[opening.end() : body_end]
            if end > start:
                self.position = end
                yield _Region(field, body, self.text[start:end], captures, closing is not None)
            else:  # (it opens and closes on nothing)
                self.position = start + 1
                yield from self._outside(start, start + 1)

    def search(self, pattern: Any, start: int) -> Any:
        """Return a match at or after a position, or None."""
        return pattern.search(self.text, start, timeout=self._seconds_left())

    def leftover(self, pattern: str, body: str) -> str:
        """Return the text of a body that no match of a pattern covers."""
        import regex  # late: comes with transformers

        compiled: Any = cast(Any, regex).compile(pattern, cast(Any, regex).DOTALL)
        return cast(str, compiled.sub("", body, timeout=self._seconds_left()))

    def _seconds_left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def _next_opening(self) -> tuple[int, Any, Any]:
        """Return the start, the field and the match of the next opening; the longest of several at one position."""
        for name, field in self._openings.items():
            known = self._found.get(name, self)
            if known is self or (known is not None and known.start() < self.position):
                self._found[name] = self.search(field.open_re, self.position)
        found = [
            (match.start(), match.start() - match.end(), name) for name, match in self._found.items() if match
        ]
        if not found:
            return len(self.text), None, None
        start, _, name = min(found)
        return start, self._openings[name], self._found[name]

    def _outside(self, start: int, end: int) -> Iterator[_Region]:
        """Yield the text between regions, without the text that closes the message."""
        text = self.text[start:end]
        closing = None if self._implicit is None else self._implicit.close_re
        if closing is not None:
            text = cast(str, closing.sub("", text, timeout=self._seconds_left()))
        yield _Region(self._implicit, text, text, {}, is_closed=True)


def _fault_in(body: str, field: Any, walk: _Walk) -> str:
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
        left = _CLOSING_TAG.sub("", walk.leftover(str(arguments["tag_pattern"]), body)).strip(" \t\r\n,;")
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
    if is_too_deep(call.arguments):
        return malformed(text, "the arguments are nested too deep")
    try:
        json.dumps(call.arguments, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, TypeError):  # (half surrogates are a ValueError too)
        return malformed(text, "the arguments hold a number or a character that JSON cannot write")
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
