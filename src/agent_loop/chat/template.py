"""Chat templates: encode messages to tokens, and parse completions."""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from agent_loop.chat.bridge import BridgeBuilder
from agent_loop.chat.encoding import ControlledEncoder, EncoderChoice
from agent_loop.chat.multimodal import Encoded, MediaProcessor, ReadMedium, load_media_processor
from agent_loop.chat.parsers import ReasoningMarks, ToolParser, detect_parser
from agent_loop.chat.rendering import NO_VARIABLES, SENTINEL, Renderer
from agent_loop.chat.sources import Medium, split_media
from agent_loop.errors import ChatTemplateError, ConfigError
from agent_loop.trajectory.attachments import AttachmentKind
from agent_loop.types import IntArray, Message, ParsedCompletion, TokenIds, ToolCall, as_token_ids

MAX_OPENING_TOKENS = 32
"""Number of tokens at the end of a generation prompt in which an opening of reasoning is searched."""
RENDERED_NAMES = ("raise_exception", "strftime_now")
"""Functions that templates call."""
NO_KINDS: frozenset[AttachmentKind] = frozenset()
MAX_PROMPTS = 64
"""First prompts whose tokens are kept, because the trajectories of a group share theirs."""
MAX_VARIANTS = 16
"""Sets of variables whose prepared templates are kept."""


class ChatTemplate:
    """A tokenizer's chat template. History is never rendered or encoded again.

    Args:
        tokenizer: A fast `transformers` tokenizer with a chat template.
        tool_parser: A `ToolParser`, its name, or `file.py:ClassName`. `auto` selects the parser of the format that the
            template shows, or else the tokenizer's response template.
        media: Processor of the images and videos in messages, or the reason why there is none.
        encoder: The library that encodes. Both libraries return the same ids.
        vocab_size: Number of rows of the model's embedding, which is often larger than the tokenizer. None takes the
            tokenizer's size. Completions with ids from this number on are refused.
        eos_token_ids: The model's end tokens, in addition to the tokenizer's and to the template's close of a turn.

    Raises:
        ChatTemplateError: The tokenizer is not fast, has no chat template, or its template cannot be bridged.
        ConfigError: No parser has that name or fits the template, or `encoder` does not support the tokenizer.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tool_parser: ToolParser | str = "hermes",
        media: MediaProcessor | str = "the model has no processor for them",
        encoder: EncoderChoice = "auto",
        vocab_size: int | None = None,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        self.variables = NO_VARIABLES
        """Further variables that the template gets, such as `enable_thinking`."""
        self._variant = lru_cache(MAX_VARIANTS)(self._make_variant)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ChatTemplateError(
                f"{type(tokenizer).__name__} is not a fast tokenizer; load one that has a tokenizer.json"
            )
        if not tokenizer.chat_template:
            raise ChatTemplateError("the tokenizer has no chat template; set model.chat_template_path")
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer) if vocab_size is None else vocab_size
        """Ids of completions are below this number."""
        eos = tokenizer.eos_token_id
        self.eos_token_ids: frozenset[int] = frozenset([*eos_token_ids, *([] if eos is None else [eos])])
        self.media = media
        self.media_kinds = NO_KINDS if isinstance(media, str) else media.kinds
        """Kinds of media that messages may contain."""
        self.encoder = ControlledEncoder(
            backend, reserved=[SENTINEL], searched=ToolParser.all_reasoning_texts(), choice=encoder
        )
        self._encode_prompt = lru_cache(MAX_PROMPTS)(self._encoded)
        self.renderer = Renderer(tokenizer, encoder=self.encoder)
        if tool_parser == "auto":
            tool_parser = self._detect_parser()
        self.tool_parser = ToolParser.get(tool_parser) if isinstance(tool_parser, str) else tool_parser
        self._prepare()

    def with_variables(self, variables: Mapping[str, Any]) -> ChatTemplate:
        """Return the template that gets these variables in each render, for example `{"enable_thinking": False}`, in
        addition to those that it has.

        Prompts and bridges of one conversation have to come from the same template. The last few are kept.

        Args:
            variables: JSON values by name. Control tokens in their texts are encoded as text.
        """
        if not variables:
            return self
        if reserved := sorted(variables.keys() & _reserved_names(self.tokenizer)):
            raise ChatTemplateError(
                f"{', '.join(reserved)} cannot be set as variables of the chat template, because the renderer sets "
                "them; leave them out"
            )
        return self._variant(json.dumps({**self.variables, **variables}, sort_keys=True))

    def mentions(self, variable: str) -> bool:
        """Return whether the source of the template contains the name of a variable."""
        return re.search(rf"\b{re.escape(variable)}\b", str(self.tokenizer.chat_template)) is not None

    def _make_variant(self, variables: str) -> ChatTemplate:
        variant = copy.copy(self)
        variant.variables = json.loads(variables)
        variant.renderer = Renderer(self.tokenizer, encoder=self.encoder, variables=variant.variables)
        variant._prepare()
        return variant

    def _prepare(self) -> None:
        """Prepare bridges for the variables of this template."""
        self.bridges = BridgeBuilder(self.renderer, encoder=self.encoder, eos_token_ids=self.eos_token_ids)
        self._opened_reasoning = self._find_opened_reasoning()
        needed = self.tool_parser.format_texts
        controls = self.encoder.control_ids
        self._format_ids = frozenset(i for i in controls if self.encoder.decode([i]) in needed)

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens at which the model may end a turn: the end tokens of the tokenizer and the model, and the template's
        close of a turn. Where the template writes no close, the opening token of the next role."""
        return self.bridges.end_ids

    def without_end(
        self, token_ids: Sequence[int], *, stopped: bool, keeps_close: bool | None = None
    ) -> Sequence[int]:
        """Return the tokens of a completion that are its text: all except the tokens that end the turn.

        Args:
            token_ids: The completion.
            stopped: Whether the server ended the completion at its last token. A control token there ends the turn,
                unless the format of tool calls or reasoning needs it.
            keeps_close: Keep the template's close of a turn. By default, it is kept if the tool parser reads it.
        """
        ends = self.text_end_ids(stopped=False, keeps_close=keeps_close)
        num_text = len(token_ids)
        if num_text and stopped:
            num_text -= token_ids[-1] in self.text_end_ids(stopped=True, keeps_close=keeps_close)
        while num_text and token_ids[num_text - 1] in ends:
            num_text -= 1
        return token_ids[:num_text]

    def text_end_ids(self, *, stopped: bool, keeps_close: bool | None = None) -> frozenset[int]:
        """Return the tokens that are not text at the end of a completion. See `without_end`."""
        if keeps_close is None:
            keeps_close = self.tool_parser.reads_end_tokens
        if keeps_close:
            return self.end_ids - self.bridges.close_ids
        ends = self.end_ids | self.encoder.control_ids if stopped else self.end_ids
        return ends - self._format_ids

    @property
    def pad_token_id(self) -> int:
        """Padding token; the end token if the tokenizer has no padding token."""
        for token_id in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token_id is not None:
                return int(token_id)
        return 0

    async def read(self, messages: Sequence[Message]) -> Sequence[ReadMedium]:
        """Read the images and videos in messages, in a thread. Pass the result to `open_encoded` or `bridge_encoded`,
        which otherwise read media on the event loop.
        """
        _, media = self._split(messages)
        return await self.media.read_in_thread(media) if media and not isinstance(self.media, str) else ()

    def open(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> IntArray:
        """Return the first prompt, with the generation prompt at its end.

        Args:
            messages: The conversation so far.
            tools: OpenAI function schemas.

        Returns:
            Token ids, shape [num_tokens].

        Raises:
            ChatTemplateError: The template refuses the messages, or the messages contain images.
        """
        return _ids_alone(self.open_encoded(messages, tools=tools))

    def open_encoded(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        read: Sequence[ReadMedium] | None = None,
    ) -> Encoded:
        """Return the first prompt with the images that are attached to its tokens. See `open` and `read`.

        Raises:
            ChatTemplateError: The template refuses the messages, or the model has no processor for their images.
            DataError: An image cannot be read.
        """
        messages, media = self._split([self.bridges.adapted(message) for message in messages])
        ids = self._encode_prompt(self.renderer.text(messages, tools=tools)).copy()
        return self._attached(ids, media, read)

    def bridge(
        self,
        messages: Sequence[Message],
        *,
        last_token_id: int | None = None,
        calls: Sequence[ToolCall] = (),
    ) -> IntArray:
        """Return what a turn adds after the model's tokens: the close of its turn, the messages, the generation prompt.

        Args:
            messages: The new messages, one or more.
            last_token_id: The model's last token. If it ends the turn, the bridge does not repeat it.
            calls: The calls that tool messages without `name` or `tool_call_id` answer, in the same order.

        Returns:
            Token ids, shape [num_tokens]. None of them was sampled.

        Raises:
            ChatTemplateError: The template refuses the messages after an assistant turn, or they contain images.
        """
        return _ids_alone(self.bridge_encoded(messages, last_token_id=last_token_id, calls=calls))

    def bridge_encoded(
        self,
        messages: Sequence[Message],
        *,
        last_token_id: int | None = None,
        calls: Sequence[ToolCall] = (),
        read: Sequence[ReadMedium] | None = None,
    ) -> Encoded:
        """Return a bridge with the images that are attached to its tokens. See `bridge` and `read`."""
        messages, media = self._split(messages)
        ids = self.bridges.ids(messages, last_token_id=last_token_id, calls=calls)
        return self._attached(ids, media, read)

    def parse(
        self,
        token_ids: TokenIds,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        context: TokenIds | None = None,
        stopped: bool = False,
    ) -> ParsedCompletion:
        """Parse one completion. The tokens that end the turn are not part of its text.

        Args:
            token_ids: The completion.
            tools: OpenAI function schemas. Formats that write arguments as bare text take their types from the schemas.
            context: The tokens before the completion. Their end may open reasoning. Without them, reasoning is open if
                every generation prompt of the template opens it.
            stopped: Whether the server ended the completion at its last token. See `without_end`.
        """
        ids = list(token_ids) if isinstance(token_ids, (list, tuple)) else as_token_ids(token_ids).tolist()
        text = self.encoder.decode(self.without_end(ids, stopped=stopped))
        opened = self._opened_reasoning if context is None else self._opened_at_end(context)
        if opened and not text.lstrip().startswith(opened.strip()):
            text = opened + text
        return self.tool_parser.read(text, tools=tools)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of plain text. Control tokens in the text are encoded as text."""
        return self.encoder.encode_plain(text)

    def decode(self, token_ids: TokenIds) -> str:
        """Return the text of tokens, control tokens included."""
        return self.encoder.decode(as_token_ids(token_ids).tolist())

    def opened_reasoning(self, context: TokenIds) -> ReasoningMarks | None:
        """Return the marks of the reasoning that is open at the end of the context; None if none is open."""
        opened = self._opened_at_end(context).strip()
        return next(
            (marks for marks in self.tool_parser.reasoning_marks if opened.startswith(marks.opening)), None
        )

    def call_start_ids(self) -> tuple[int, ...]:
        """Return the token that opens a tool call, or nothing if the format has no single token for it."""
        start = self.tool_parser.call_start
        ids = self.encoder.encode(start) if start else []
        return (ids[0],) if len(ids) == 1 else ()

    def _encoded(self, rendered: str) -> IntArray:
        return as_token_ids(self.encoder.encode(rendered))

    def _detect_parser(self) -> ToolParser:
        response_template = getattr(self.tokenizer, "response_template", None)
        prompt = ""
        if response_template is not None:
            with suppress(ChatTemplateError):
                prompt = self.renderer.text([{"role": "user", "content": "-"}])
        return detect_parser(
            str(self.tokenizer.chat_template), response_template=response_template, prompt=prompt
        )

    def _find_opened_reasoning(self) -> str:
        """Return the text with which every generation prompt opens reasoning, or "" if one does not open any."""
        opened: set[str] = set()
        for role in ("user", "tool"):
            with suppress(ChatTemplateError):
                opened.add(
                    self._opened_at_end(
                        self.bridges.ids([{"role": role, "content": "-"}], last_token_id=None)
                    )
                )
        return opened.pop() if len(opened) == 1 else ""

    def _opened_at_end(self, context: TokenIds) -> str:
        """Return the text with which the context opens reasoning, or "" if reasoning is not open at its end."""
        if not self.tool_parser.reasoning_marks:
            return ""
        end = self.decode(context[-MAX_OPENING_TOKENS:])
        for opening, _, label in self.tool_parser.reasoning_marks:
            before, found, behind = end.rpartition(opening)
            if found and not behind.strip().removeprefix(label):
                return end[len(before) :]
        return ""

    def _split(self, messages: Sequence[Message]) -> tuple[Sequence[Message], list[Medium]]:
        messages, media = split_media(messages)
        if media and isinstance(self.media, str):
            raise ChatTemplateError(
                f"messages contain {len(media)} images or videos, but the model cannot read them: {self.media}; "
                "set model.path to a vision-language model, or send text only"
            )
        return messages, media

    def _attached(
        self, token_ids: IntArray, media: Sequence[Medium], read: Sequence[ReadMedium] | None
    ) -> Encoded:
        if isinstance(self.media, str):
            return Encoded(token_ids)
        return self.media.encode(token_ids.tolist(), self.media.read(media) if read is None else read)


def load_chat_template(
    path: str,
    *,
    tool_parser: ToolParser | str = "hermes",
    chat_template_path: str | None = None,
    trust_remote_code: bool = False,
    encoder: EncoderChoice = "auto",
    model_path: str | None = None,
    variables: Mapping[str, Any] = NO_VARIABLES,
) -> ChatTemplate:
    """Load a tokenizer with its chat template from a folder or the hub.

    Args:
        path: Folder or hub name of the tokenizer.
        tool_parser, encoder: See `ChatTemplate`.
        chat_template_path: Jinja file that replaces the tokenizer's template.
        trust_remote_code: Run code that comes with the tokenizer.
        model_path: Folder or hub name of the model, if it differs from `path`. The model's config holds the size of the
            vocabulary.
        variables: See `ChatTemplate.with_variables`.
    """
    from transformers import AutoTokenizer  # late: importing transformers takes seconds

    if not path:
        raise ConfigError("model.path is not set; give a folder or a hub name with a model and its tokenizer")
    try:
        tokenizer = cast(Any, AutoTokenizer).from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        is_folder = str(path).startswith(("/", "./", "../", "~"))
        # transformers reports a missing folder as an invalid name on the hub
        reason = "the folder does not exist" if is_folder and not Path(path).exists() else str(error)
        raise ConfigError(
            f"no tokenizer can be loaded from {path!r}: {reason}; give a folder or a hub name with a model and its "
            "tokenizer"
        ) from error
    if chat_template_path is not None:
        file = Path(chat_template_path)
        if not file.is_file():
            raise ConfigError(f"model.chat_template_path is {chat_template_path!r}: no such file")
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    media = load_media_processor(path, tokenizer=tokenizer, trust_remote_code=trust_remote_code)
    model_path = model_path or path
    text_config = _text_config_at(model_path, trust_remote_code=trust_remote_code)
    vocab_size = getattr(text_config, "vocab_size", None)
    template = ChatTemplate(
        tokenizer,
        tool_parser=tool_parser,
        media=media,
        encoder=encoder,
        vocab_size=vocab_size if isinstance(vocab_size, int) and vocab_size > 0 else None,
        eos_token_ids=_eos_token_ids_at(model_path, text_config=text_config),
    )
    return template.with_variables(variables)


def _reserved_names(tokenizer: Any) -> frozenset[str]:
    """Return the names that a render sets itself: messages, options of the tokenizer, and its special tokens."""
    options = inspect.signature(tokenizer.apply_chat_template).parameters
    return frozenset({*options, "messages", *tokenizer.special_tokens_map, *RENDERED_NAMES})


def _text_config_at(path: str, *, trust_remote_code: bool) -> Any:
    """Return the config of a model's text, or None if there is none."""
    from transformers import AutoConfig  # late: importing transformers takes seconds

    try:
        return (
            cast(Any, AutoConfig).from_pretrained(path, trust_remote_code=trust_remote_code).get_text_config()
        )
    except (OSError, ValueError, KeyError):
        return None


def _eos_token_ids_at(path: str, *, text_config: Any) -> list[int]:
    """Return the end tokens of a model: those of its generation config, or else of its config."""
    from transformers import GenerationConfig  # late: importing transformers takes seconds

    ids = getattr(text_config, "eos_token_id", None)
    with suppress(OSError, ValueError):  # not every model has one
        ids = cast(Any, GenerationConfig).from_pretrained(path).eos_token_id or ids
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def _ids_alone(encoded: Encoded) -> IntArray:
    if encoded.attachments:
        raise ChatTemplateError(
            f"{len(encoded.attachments)} images or videos are attached to these messages, and token ids alone do not "
            "contain them; use open_encoded and bridge_encoded"
        )
    return encoded.token_ids
