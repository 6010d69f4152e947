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


class Renderer:
    """Renders messages with masked texts, so that no text can be mistaken for the template's own text.

    Only the marks of reasoning in an assistant's text are not masked, since templates split its content at `</think>`.
    """

    def __init__(
        self, tokenizer: Any, *, encoder: ControlledEncoder, variables: Mapping[str, Any] = NO_VARIABLES
    ) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._variables = _each_text(variables, encoder.mask)
        self._reasoning_key = _reasoning_key(str(tokenizer.chat_template))
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
                **self._variables,
            )
        except Exception as error:  # a template may raise anything, since Jinja runs its author's code
            roles = [message.get("role") for message in messages]
            raise ChatTemplateError(
                f"the chat template refuses messages with roles {roles}: {type(error).__name__}: "
                f"{self._encoder.unmask(str(error))}"
            ) from error
        return cast(str, rendered)

    def _masked(self, message: Message) -> Message:
        mask, mask_assistant = self._encoder.mask, self._encoder.mask_assistant
        is_assistant = message.get("role") == "assistant"
        # gpt-oss refuses a turn of calls with both text and reasoning.
        is_refused = bool(message.get("tool_calls") and message.get("content"))
        return self._in_parts(
            {
                self._reasoning_key if key == "reasoning_content" and not is_refused else key: _each_text(
                    value, mask_assistant if is_assistant and key in TEXTS_WITH_MARKERS else mask
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
