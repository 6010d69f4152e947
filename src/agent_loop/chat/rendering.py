"""Messages to text by a tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from agent_loop.chat.encoding import ControlledEncoder
from agent_loop.errors import ChatTemplateError
from agent_loop.types import Message

SENTINEL = "@stand.in.for.the.assistant@"
"""Stands for what the assistant said; never encoded. Plain ASCII: templates trim, quote and escape what they write."""

TRUSTED_ROLES = frozenset({"assistant"})
"""Whose text may hold control tokens: the model's own earlier turns."""


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
                tools=[_each_text(dict(tool), self._encoder.mask) for tool in tools] or None,
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
            foreign = {key: value for key, value in message.items() if key != "role"}
            message = {**message, **_each_text(foreign, self._encoder.mask)}
        else:
            trusted = {key: value for key, value in message.items() if key != "tool_calls"}
            message = {**message, **_each_text(trusted, self._encoder.escape)}
            if message.get("tool_calls"):
                message["tool_calls"] = [self._named_safely(call) for call in message["tool_calls"]]
        if self.takes_parts and isinstance(message.get("content"), str):
            message = {**message, "content": [{"type": "text", "text": message["content"]}]}
        return message

    def _named_safely(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """A call whose name and id hold no control tokens; a reply may repeat both."""
        mask = self._encoder.mask
        safe = cast(dict[str, Any], _each_text(call, self._encoder.escape))
        safe["function"]["name"] = mask(call["function"]["name"])
        return {**safe, "id": mask(call["id"])} if "id" in call else safe

    def _writes_said(self) -> bool:
        said = [{"role": "user", "content": "-"}, {"role": "assistant", "content": SENTINEL}]
        try:
            return SENTINEL in self.text(said, add_generation_prompt=False)
        except ChatTemplateError:
            return False


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a value of lists and mappings with each text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        held = cast(Mapping[Any, Any], value)
        return {_each_text(key, change): _each_text(inner, change) for key, inner in held.items()}
    if isinstance(value, (list, tuple)):
        return [_each_text(inner, change) for inner in cast(Sequence[Any], value)]
    return value
