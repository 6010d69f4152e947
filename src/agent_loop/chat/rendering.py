"""Rendering of messages with a tokenizer's chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from agent_loop.chat.encoding import ControlledEncoder
from agent_loop.errors import ChatTemplateError
from agent_loop.types import Message

SENTINEL = "@placeholder.for.the.assistant@"
"""Placeholder for the assistant's text; never encoded. Plain ASCII, since templates trim, quote and escape texts."""

TEXTS_WITH_MARKERS = frozenset({"content", "reasoning_content", "reasoning", "thinking"})
"""Fields of an assistant's message in which templates search for markers such as `</think>`."""

NO_VARIABLES: Mapping[str, Any] = {}

_LITERAL = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_TAG = re.compile(rf"\{{#.*?#\}}|\{{[{{%](?:{_LITERAL}|[^'\"])*?[%}}]\}}", re.DOTALL)
_STRING = re.compile(_LITERAL, re.DOTALL)
_METHODS = (
    "split|rsplit|partition|rpartition|startswith|endswith|removeprefix|removesuffix|find|rfind|index|rindex"
    "|count|replace"
)
_CALL = re.compile(rf"(?P<join>\.)\s*(?:{_METHODS})\s*\(\s*$|(?P<filter>\|)\s*replace\s*\(\s*$")
_IN = re.compile(r"\s*(?:not\s+)?in\s+(?=[A-Za-z_(])")
_NAME = re.compile(r"\s*[A-Za-z_]\w*|(?=\()")
_MORE = re.compile(r"\s*\.\s*\w+")
_OPENING = ("(", "[")


class Renderer:
    """Renders messages with masked texts, so that no text can be mistaken for the template's own text.

    Templates can search the masked text of an assistant: a template that splits content at `</think>` still does, and
    writes its own `</think>` after the reasoning.
    """

    def __init__(
        self, tokenizer: Any, *, encoder: ControlledEncoder, variables: Mapping[str, Any] = NO_VARIABLES
    ) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._variables = _each_text(variables, encoder.mask)
        self._reasoning_key = _reasoning_key(str(tokenizer.chat_template))
        self._rewritten: dict[str, str | None] = {}
        """Rewritten templates by source; None where rewriting changes nothing."""
        self.takes_parts = False
        """Whether the template demands content as a list of parts, and refuses or leaves out strings."""
        self.takes_parts = not self._renders_assistant()
        self.takes_parts = self.takes_parts and self._renders_assistant()

    def text(
        self,
        messages: Sequence[Message],
        *,
        after: Sequence[Message] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the rendered text of messages, with the masks in it.

        Args:
            messages: Messages whose texts are masked.
            after: Trusted messages before `messages`. Only the names and ids of their calls are masked.
            tools: OpenAI function schemas.
            add_generation_prompt: End with the opening of the assistant's next turn.
        """
        mask = self._encoder.mask
        try:
            shown = [_each_text(dict(tool), mask) for tool in tools] or None
            rendered = self._tokenizer.apply_chat_template(
                [*map(self._own, after), *map(self._masked, messages)],
                tools=shown,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self._options(shown),
                **self._variables,
            )
        except Exception as error:  # a template may raise anything, since Jinja runs its author's code
            roles = [message.get("role") for message in messages]
            raise ChatTemplateError(
                f"the chat template refuses messages with roles {roles}: {type(error).__name__}: "
                f"{self._encoder.unmask(str(error))}"
            ) from error
        return cast(str, rendered)

    def _options(self, tools: Any) -> dict[str, str]:
        """Return the rewritten template, if it differs from the tokenizer's template."""
        source = cast(str, self._tokenizer.get_chat_template(None, tools))
        if source not in self._rewritten:
            rewritten = _searching_masked_text(source, mask=self._encoder.mask_searchable)
            self._rewritten[source] = None if rewritten == source else rewritten
        rewritten = self._rewritten[source]
        return {} if rewritten is None else {"chat_template": rewritten}

    def _masked(self, message: Message) -> Message:
        mask, mask_searchable = self._encoder.mask, self._encoder.mask_searchable
        is_assistant = message.get("role") == "assistant"
        # gpt-oss refuses a turn of calls with both text and reasoning.
        is_refused = bool(message.get("tool_calls") and message.get("content"))
        return self._in_parts(
            {
                self._reasoning_key if key == "reasoning_content" and not is_refused else key: _each_text(
                    value, mask_searchable if is_assistant and key in TEXTS_WITH_MARKERS else mask
                )
                for key, value in message.items()
            }
        )

    def _own(self, message: Message) -> Message:
        if message.get("tool_calls"):
            message = {**message, "tool_calls": [self._named_safely(call) for call in message["tool_calls"]]}
        return self._in_parts(message)

    def _in_parts(self, message: Message) -> Message:
        """Return the message, with its text as a part if the template demands parts."""
        if self.takes_parts and isinstance(message.get("content"), str):
            return {**message, "content": [{"type": "text", "text": message["content"]}]}
        return message

    def _named_safely(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call whose name and id contain no control tokens. A reply may repeat both."""
        mask, function = self._encoder.mask, call["function"]
        safe = {**call, "function": {**function, "name": mask(function["name"])}}
        return {**safe, "id": mask(call["id"])} if "id" in call else safe

    def _renders_assistant(self) -> bool:
        messages = [{"role": "user", "content": "-"}, {"role": "assistant", "content": SENTINEL}]
        try:
            return SENTINEL in self.text([], after=messages, add_generation_prompt=False)
        except ChatTemplateError:
            return False


def _reasoning_key(source: str) -> str:
    """Return the key of a message under which a template reads reasoning."""
    keys = ("reasoning_content", "thinking", "reasoning")
    return next((key for key in keys if re.search(rf"""[.'"]{key}\b""", source)), keys[0])


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of nested lists and mappings with each text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        held = cast(Mapping[Any, Any], value)
        return {_each_text(key, change): _each_text(inner, change) for key, inner in held.items()}
    if isinstance(value, (list, tuple)):
        return [_each_text(inner, change) for inner in cast(Sequence[Any], value)]
    return value


def _searching_masked_text(chat_template: str, *, mask: Callable[[str], str]) -> str:
    """Return the template with its searches changed to work on masked text.

    Templates extract reasoning from an assistant's content: `'</think>' in content`, `content.split('</think>')`. The
    rewritten template first replaces the string in the searched text by its masked form, and then searches for the
    masked form. So a text that the template copies contains no control token.
    """

    def rewritten(tag: re.Match[str]) -> str:
        return tag[0] if tag[0].startswith("{#") else _with_masked_searches(tag[0], mask)

    return _TAG.sub(rewritten, chat_template)


def _with_masked_searches(code: str, mask: Callable[[str], str]) -> str:
    """Return the rewritten code of one tag. Changes start at the end, so that earlier positions stay valid."""
    for found in reversed(list(_STRING.finditer(code))):
        masked = mask(found[0])
        if masked == found[0]:
            continue
        (start, end), replaced = found.span(), f"replace({found[0]}, {masked})"
        if (call := _CALL.search(code, 0, start)) is not None:
            join = call["join"] or call["filter"]
            before, opening = code[: call.start()], code[call.start() : start]
            code = f"{before}{join}{replaced}{opening}{masked}{code[end:]}"
        elif (word := _IN.match(code, end)) is not None:
            operand_end = _operand_end(code, word.end())
            code = f"{code[:start]}{masked}{code[end:operand_end]}|{replaced}{code[operand_end:]}"
    return code


def _operand_end(code: str, start: int) -> int:
    """Return the end of an operand: a name or a parenthesis, and the attributes, items and calls after it."""
    name = _NAME.match(code, start)
    end = start if name is None else name.end()
    while True:
        if (more := _MORE.match(code, end)) is not None:
            end = more.end()
        elif code[end : end + 1] in _OPENING:
            end = _closed(code, end)
        else:
            return end


def _closed(code: str, start: int) -> int:
    """Return the position after the bracket that closes the bracket at `start`."""
    depth, position = 0, start
    while position < len(code):
        if (string := _STRING.match(code, position)) is not None:
            position = string.end()
            continue
        depth += (code[position] in "([") - (code[position] in ")]")
        position += 1
        if not depth:
            break
    return position
