"""Messages to text by a tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from agent_loop.chat.encoding import ControlledEncoder
from agent_loop.errors import ChatTemplateError
from agent_loop.types import Message

SENTINEL = "@stand.in.for.the.assistant@"
"""Stands for what the assistant said; never encoded. Plain ASCII: templates trim, quote and escape what they write."""

TRUSTED_ROLES = frozenset({"assistant"})
"""Whose text may hold control tokens: the model's own earlier turns."""

FOREIGN_FIELDS = ("content", "name", "tool_call_id")


class Renderer:
    """Renders messages in which foreign text is masked, so that it cannot be taken for the template's own.

    Args:
        tokenizer: A `transformers` tokenizer with a chat template.
        encoder: Masks foreign text. `SENTINEL` must be among its reserved strings.
    """

    def __init__(self, tokenizer: Any, *, encoder: ControlledEncoder) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder
        self.takes_parts = False
        """Content is a list of parts in this template; a string would be refused or left out."""
        self.takes_parts = not self._writes_said()
        self.takes_parts = self.takes_parts and self._writes_said()

    def text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """The rendered messages, masks still in them.

        Raises:
            ChatTemplateError: The template does not accept these messages.
        """
        try:
            rendered = self._tokenizer.apply_chat_template(
                [self._prepared(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except Exception as error:  # (a template may raise anything: Jinja runs the author's code)
            roles = [message.get("role") for message in messages]
            raise ChatTemplateError(
                f"the chat template refuses messages with roles {roles}: {type(error).__name__}: {error}"
            ) from error
        return cast(str, rendered)

    def _prepared(self, message: Message) -> Message:
        if message.get("role") not in TRUSTED_ROLES:
            foreign = {key: self._masked(message[key]) for key in FOREIGN_FIELDS if key in message}
            message = {**message, **foreign}
        elif message.get("tool_calls"):
            message = {**message, "tool_calls": [self._named_safely(call) for call in message["tool_calls"]]}
        if self.takes_parts and isinstance(message.get("content"), str):
            message = {**message, "content": [{"type": "text", "text": message["content"]}]}
        return message

    def _named_safely(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """A call whose name and id hold no control tokens; a reply may repeat both."""
        safe = {**call, "function": {**call["function"], "name": self._masked(call["function"]["name"])}}
        return {**safe, "id": self._masked(call["id"])} if "id" in call else safe

    def _masked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._encoder.mask(value)
        if isinstance(value, list):
            parts = cast(list[dict[str, Any]], value)
            return [
                {**part, "text": self._encoder.mask(part["text"])}
                if isinstance(part.get("text"), str)
                else part
                for part in parts
            ]
        return value

    def _writes_said(self) -> bool:
        said = [{"role": "user", "content": "-"}, {"role": "assistant", "content": SENTINEL}]
        try:
            return SENTINEL in self.text(said, add_generation_prompt=False)
        except ChatTemplateError:
            return False
