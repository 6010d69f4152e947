"""Messages to tokens and back: the first prompt in full, then only what each turn adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from agent_loop.chat.encoding import ControlledEncoder
from agent_loop.chat.parsers import ToolParser
from agent_loop.errors import ChatTemplateError, ConfigError
from agent_loop.types import IntArray, Message, ParsedCompletion, TokenIds, as_token_ids

SENTINEL = "\ue010the assistant's turn\ue011"
"""Stands for an assistant turn that is never encoded; what a template writes after it is the bridge."""

TRUSTED_ROLES = frozenset({"assistant"})
"""Whose text may hold control tokens: the model's own earlier turns."""


class ChatTemplate:
    """A tokenizer's chat template, used without ever rendering or encoding history twice.

    Args:
        tokenizer: A fast `transformers` tokenizer with a chat template.
        tool_parser: A `ToolParser` or the name of one.

    Raises:
        ChatTemplateError: The tokenizer is not a fast one, has no chat template, or has one that cannot be bridged.
    """

    def __init__(self, tokenizer: Any, *, tool_parser: ToolParser | str = "hermes") -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ChatTemplateError(
                f"{type(tokenizer).__name__} is not a fast tokenizer; load one that has a tokenizer.json"
            )
        if not tokenizer.chat_template:
            raise ChatTemplateError(
                "the tokenizer has no chat template; give one with model.chat_template_path"
            )
        self.tokenizer = tokenizer
        self.tool_parser = ToolParser.get(tool_parser) if isinstance(tool_parser, str) else tool_parser
        self._encoder = ControlledEncoder(backend)
        self._close_ids = self._prove_bridge()

    @property
    def pad_token_id(self) -> int:
        """Fills the unused places of a batch; the end token where the tokenizer has no pad token."""
        for token_id in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token_id is not None:
                return int(token_id)
        return 0

    def open(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> IntArray:
        """The first prompt, up to where the model speaks.

        Args:
            messages: The conversation so far.
            tools: OpenAI function schemas.

        Returns:
            Token ids, shape [num_tokens].

        Raises:
            ChatTemplateError: The template does not accept these messages.
        """
        return as_token_ids(self._encoder.encode(self._render(self._masked(messages), tools=tools)))

    def bridge(self, messages: Sequence[Message], *, last_token_id: int | None = None) -> IntArray:
        """What a turn adds after the model's tokens: the close of its turn, the messages, the next prompt to speak.

        Args:
            messages: The new messages, one or more; consecutive ones are rendered together.
            last_token_id: The model's last token. If it is the token that closes a turn, it is not written again.

        Returns:
            Token ids, shape [num_tokens]; none of them was sampled.

        Raises:
            ChatTemplateError: The template does not accept these messages after an assistant turn.
        """
        rendered = self._render([*_STAND_IN, *self._masked(messages)])
        ids = self._encoder.encode(self._after_sentinel(rendered))
        return as_token_ids(ids[self._num_sampled_close_tokens(ids, last_token_id) :])

    def parse(self, token_ids: TokenIds) -> ParsedCompletion:
        """Reads one completion; its closing token, if it has one, is not part of the text."""
        ids = as_token_ids(token_ids).tolist()
        if ids and (ids[-1] in self._close_ids or ids[-1] == self.tokenizer.eos_token_id):
            ids.pop()
        return self.tool_parser.parse(self._encoder.decode(ids))

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; control tokens in it count as text."""
        return self._encoder.encode_plain(text)

    def decode(self, token_ids: TokenIds) -> str:
        """The text of any tokens, control tokens written out."""
        return self._encoder.decode(as_token_ids(token_ids).tolist())

    def call_start_ids(self) -> tuple[int, ...]:
        """The token that opens a tool call, where the format has one that is a single token; else nothing."""
        start = self.tool_parser.call_start
        ids = self._encoder.encode(start) if start else []
        return (ids[0],) if len(ids) == 1 else ()

    def _num_sampled_close_tokens(self, ids: Sequence[int], last_token_id: int | None) -> int:
        """How many leading tokens of a bridge the model has already said: those up to its closing token."""
        if last_token_id is None:
            return 0
        for position, token_id in enumerate(ids[: max(len(self._close_ids), 1)]):
            if token_id == last_token_id:
                return position + 1
        return 0

    def _prove_bridge(self) -> list[int]:
        """The tokens with which the template closes an assistant turn.

        Raises:
            ChatTemplateError: An assistant turn, or a reply after it, does not come out in one piece.
        """
        closed = self._after_sentinel(self._render(_STAND_IN, add_generation_prompt=False))
        for role in ("user", "tool"):
            self._after_sentinel(self._render([*_STAND_IN, {"role": role, "content": "x"}]))
        return self._encoder.encode(closed)

    def _after_sentinel(self, rendered: str) -> str:
        _, found, after = rendered.partition(SENTINEL)
        if not found:
            raise ChatTemplateError(
                f"the chat template cannot be bridged: it leaves out the assistant turn before {rendered[-60:]!r}"
            )
        return after

    def _masked(self, messages: Sequence[Message]) -> list[Message]:
        return [
            message if message.get("role") in TRUSTED_ROLES else {**message, "content": self._mask(message)}
            for message in messages
        ]

    def _mask(self, message: Message) -> Any:
        content = message.get("content")
        if isinstance(content, str):
            return self._encoder.mask(content)
        if isinstance(content, list):
            parts = cast(list[dict[str, Any]], content)
            return [
                {**part, "text": self._encoder.mask(part["text"])}
                if isinstance(part.get("text"), str)
                else part
                for part in parts
            ]
        return content

    def _render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        try:
            rendered = self.tokenizer.apply_chat_template(
                list(messages),
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


_STAND_IN: list[Message] = [{"role": "user", "content": "-"}, {"role": "assistant", "content": SENTINEL}]


def load_chat_template(
    path: str,
    *,
    tool_parser: ToolParser | str = "hermes",
    chat_template_path: str | None = None,
    trust_remote_code: bool = False,
) -> ChatTemplate:
    """Loads a tokenizer with its chat template from a folder or the hub.

    Raises:
        ConfigError: There is no tokenizer at that place, or no template file.
        ChatTemplateError: The template cannot be used.
    """
    from transformers import AutoTokenizer  # late: importing transformers takes seconds

    if not path:
        raise ConfigError("model.path is not set; give a folder or a hub name with a model and its tokenizer")
    try:
        tokenizer = cast(Any, AutoTokenizer).from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer can be loaded from {path!r}: {error}") from error
    if chat_template_path is not None:
        file = Path(chat_template_path)
        if not file.is_file():
            raise ConfigError(f"model.chat_template_path is {chat_template_path!r}: no such file")
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    return ChatTemplate(tokenizer, tool_parser=tool_parser)
