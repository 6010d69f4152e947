"""Messages to tokens and back: the first prompt in full, then only what each turn adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from agent_loop.chat.bridge import Bridge
from agent_loop.chat.encoding import ControlledEncoder, EncoderChoice
from agent_loop.chat.forms import FormProof
from agent_loop.chat.multimodal import Encoded, MediaProcessor, ReadMedium
from agent_loop.chat.parsers import ToolParser, detect_parser
from agent_loop.chat.parsers.completion_walker import ReasoningMarks
from agent_loop.chat.processors import load_media_processor
from agent_loop.chat.prompt_forms import PromptForms
from agent_loop.chat.rendering import SENTINEL, Renderer
from agent_loop.chat.sources import Medium, split_media
from agent_loop.errors import ChatTemplateError, ConfigError
from agent_loop.trajectory.attachments import AttachmentKind
from agent_loop.types import IntArray, Message, ParsedCompletion, TokenIds, ToolCall, as_token_ids

MAX_OPENING_TOKENS = 32
"""Where in a generation prompt reasoning may be opened, from its end."""
FEW_TOKENS = 4
"""Nearly always enough to see that it is not."""
MAX_ENDS = 256
"""So many ends of generation prompts are kept; a template has a few."""
NO_KINDS: frozenset[AttachmentKind] = frozenset()


class ChatTemplate:
    """A tokenizer's chat template, used without ever rendering or encoding history twice.

    Args:
        tokenizer: A fast `transformers` tokenizer with a chat template.
        tool_parser: A `ToolParser` or the name of one; `auto` is the one that the template's own calls are written for,
            or the tokenizer's own response template.
        media: Reads the images in messages; a string says why there is nothing that does.
        encoder: Which library encodes; the ids are the same.
        vocab_size: Number of rows of the model's embedding, which is often larger than the tokenizer; None takes the
            tokenizer's size. Completions with other ids are refused.

    Raises:
        ChatTemplateError: The tokenizer is not a fast one, has no chat template, or has one that cannot be bridged.
        ConfigError: There is no parser of that name, none that fits the template, or the encoder does not fit.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tool_parser: ToolParser | str = "hermes",
        media: MediaProcessor | str = "the model has no processor for them",
        encoder: EncoderChoice = "auto",
        vocab_size: int | None = None,
    ) -> None:
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
        self.vocab_size = len(tokenizer) if vocab_size is None else vocab_size
        """Ids of completions are below this."""
        self.media = media
        self.media_kinds = NO_KINDS if isinstance(media, str) else media.kinds
        """What messages may hold beside text."""
        self.encoder = ControlledEncoder(backend, reserved=[SENTINEL], choice=encoder)
        self.renderer = Renderer(tokenizer, encoder=self.encoder)
        if tool_parser == "auto":
            tool_parser = self._detect_parser()
        self.tool_parser = ToolParser.get(tool_parser) if isinstance(tool_parser, str) else tool_parser
        source = str(tokenizer.chat_template)
        proof = FormProof(mask=self.encoder.mask, chat_template=source)
        self.replies = Bridge(
            self.renderer,
            encoder=self.encoder,
            proof=proof,
            eos_token_id=cast("int | None", tokenizer.eos_token_id),
            chat_template=source,
        )
        self._prompts = PromptForms(self.renderer, proof=proof, encoder=self.encoder, chat_template=source)
        self._last_of_openings = _last_characters(self.tool_parser.reasoning_marks)
        self._may_open = lru_cache(MAX_ENDS)(self._ends_like_opening)
        self._opened_reasoning = self._find_opened_reasoning()

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens at which the model may end a turn: the tokenizer's end token and what the template closes turns
        with. Where a turn has no close of its own, the next role's opening token is among them."""
        return self.replies.end_ids

    @property
    def pad_token_id(self) -> int:
        """Fills the unused places of a batch; the end token where the tokenizer has no pad token."""
        for token_id in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token_id is not None:
                return int(token_id)
        return 0

    async def read(self, messages: Sequence[Message]) -> Sequence[ReadMedium]:
        """Reads the images and videos in messages in a thread of its own, for `open_encoded` and `bridge_encoded`,
        which would keep the event loop waiting.

        Raises:
            ChatTemplateError: There is nothing that reads them.
            DataError: One cannot be read.
        """
        _, media = self._split(messages)
        return await self.media.read_in_thread(media) if media and not isinstance(self.media, str) else ()

    def open(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> IntArray:
        """The first prompt, up to where the model speaks.

        Args:
            messages: The conversation so far.
            tools: OpenAI function schemas.

        Returns:
            Token ids, shape [num_tokens].

        Raises:
            ChatTemplateError: The template does not accept these messages, or they hold images.
        """
        return _ids_alone(self.open_encoded(messages, tools=tools))

    def open_encoded(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        read: Sequence[ReadMedium] | None = None,
        prefill: str = "",
    ) -> Encoded:
        """As `open`, with the images that are attached to the tokens.

        Args:
            messages: The conversation so far.
            tools: OpenAI function schemas.
            read: The images in the messages, if they were read before.
            prefill: Text with which the assistant's turn begins. Control tokens in it count as text.

        Raises:
            ChatTemplateError: The template does not accept these messages, has nothing that reads their images, or
                begins the assistant's turn with reasoning, in which no prefill belongs.
            DataError: An image cannot be read.
        """
        messages, media = self._split(messages)
        ids = None if prefill else self._prompts.ids(messages, tools=tools)
        if ids is None:
            rendered = self.renderer.text(messages, tools=tools)
            ids = as_token_ids(self.encoder.encode(rendered))
            if prefill and self._opened_at_end(ids):
                raise ChatTemplateError(
                    "the chat template begins each turn of the assistant with reasoning, so that its answer "
                    "cannot be begun for it; let the model answer from the beginning"
                )
            if prefill:
                ids = as_token_ids(self.encoder.encode(rendered + self.encoder.mask(prefill)))
        return self._attached(ids, media, read)

    def bridge(
        self,
        messages: Sequence[Message],
        *,
        last_token_id: int | None = None,
        calls: Sequence[ToolCall] = (),
    ) -> IntArray:
        """What a turn adds after the model's tokens: the close of its turn, the messages, the next prompt to speak.

        Args:
            messages: The new messages, one or more; consecutive ones are rendered together.
            last_token_id: The model's last token. If it is the token that ends a turn, it is not written again.
            calls: The calls that tool messages without `name` or `tool_call_id` answer, in the same order.

        Returns:
            Token ids, shape [num_tokens]; none of them was sampled.

        Raises:
            ChatTemplateError: The template does not accept these messages after an assistant turn, or they hold images.
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
        """As `bridge`, with the images that are attached to the tokens; `read` are those that were read before.

        Raises:
            ChatTemplateError: The template does not accept these messages after an assistant turn, or has nothing
                that reads their images.
            DataError: An image cannot be read.
        """
        messages, media = self._split(messages)
        ids = self.replies.ids(messages, last_token_id=last_token_id, calls=calls)
        return self._attached(ids, media, read)

    def parse(
        self,
        token_ids: TokenIds,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        context: TokenIds | None = None,
    ) -> ParsedCompletion:
        """Reads one completion; the tokens that end the turn, if it has them, are not part of the text.

        Args:
            token_ids: The completion.
            tools: OpenAI function schemas; formats that write arguments as bare text take their types from them.
            context: What the model was given. Its end may open reasoning, which nothing else tells where the completion
                is cut; without it, that is so where every generation prompt does it.
        """
        ids = list(token_ids) if isinstance(token_ids, (list, tuple)) else as_token_ids(token_ids).tolist()
        end_ids = frozenset[int]() if self.tool_parser.reads_end_tokens else self.replies.end_ids
        while ids and ids[-1] in end_ids:
            ids.pop()
        text = self.encoder.decode(ids)
        opened = self._opened_reasoning if context is None else self._opened_at_end(context)
        if opened and not text.lstrip().startswith(opened.strip()):
            text = opened + text
        return self.tool_parser.parse(text, tools=tools)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; control tokens in it count as text."""
        return self.encoder.encode_plain(text)

    def decode(self, token_ids: TokenIds) -> str:
        """The text of any tokens, control tokens written out."""
        return self.encoder.decode(as_token_ids(token_ids).tolist())

    def call_start_ids(self) -> tuple[int, ...]:
        """The token that opens a tool call, where the format has one that is a single token; else nothing."""
        start = self.tool_parser.call_start
        ids = self.encoder.encode(start) if start else []
        return (ids[0],) if len(ids) == 1 else ()

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
        """What every generation prompt opens reasoning with; nothing if one does not."""
        opened: set[str] = set()
        for role in ("user", "tool"):
            with suppress(ChatTemplateError):
                opened.add(
                    self._opened_at_end(
                        self.replies.ids([{"role": role, "content": "-"}], last_token_id=None)
                    )
                )
        return opened.pop() if len(opened) == 1 else ""

    def _opened_at_end(self, context: TokenIds) -> str:
        if not self.tool_parser.reasoning_marks:
            return ""
        if not self._may_open(*map(int, context[-FEW_TOKENS:])):
            return ""
        end = self.decode(context[-MAX_OPENING_TOKENS:])
        for opening, _, label in self.tool_parser.reasoning_marks:
            before, found, behind = end.rpartition(opening)
            if found and not behind.strip().removeprefix(label):
                return end[len(before) :]
        return ""

    def _ends_like_opening(self, *token_ids: int) -> bool:
        return self.encoder.decode(token_ids).rstrip()[-1:] in self._last_of_openings

    def _split(self, messages: Sequence[Message]) -> tuple[Sequence[Message], list[Medium]]:
        messages, media = split_media(messages)
        if media and isinstance(self.media, str):
            raise ChatTemplateError(
                f"messages hold {len(media)} images or videos, but nothing reads them: {self.media}; "
                "name a vision-language model with model.path, or send text only"
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
) -> ChatTemplate:
    """Loads a tokenizer with its chat template from a folder or the hub.

    Args:
        path: Of the tokenizer.
        tool_parser, encoder: See `ChatTemplate`.
        chat_template_path: A Jinja file that replaces the tokenizer's own template.
        trust_remote_code: Run code that comes with the tokenizer.
        model_path: Of the model, if it is not with its tokenizer. Its config tells the size of the vocabulary.

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
        is_folder = str(path).startswith(
            ("/", "./", "../", "~")
        )  # transformers takes it for a name on the hub
        reason = "there is no such folder" if is_folder and not Path(path).exists() else str(error)
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
    vocab_size = _vocab_size_at(model_path or path, trust_remote_code=trust_remote_code)
    return ChatTemplate(
        tokenizer, tool_parser=tool_parser, media=media, encoder=encoder, vocab_size=vocab_size
    )


def _vocab_size_at(path: str, *, trust_remote_code: bool) -> int | None:
    """Return the number of rows of a model's embedding, or None if there is no config that tells."""
    from transformers import AutoConfig  # late: importing transformers takes seconds

    try:
        config = cast(Any, AutoConfig).from_pretrained(path, trust_remote_code=trust_remote_code)
        vocab_size = getattr(config.get_text_config(), "vocab_size", None)
    except (OSError, ValueError, KeyError):
        return None
    return vocab_size if isinstance(vocab_size, int) and vocab_size > 0 else None


def _last_characters(reasoning_marks: Sequence[ReasoningMarks]) -> frozenset[str]:
    """One of these ends a text that opens reasoning, as far as can be seen of it: white space left out, and in bytes
    that may be no whole character."""
    texts = [text for opening, _, label in reasoning_marks for text in (opening, label)]
    return frozenset({"", "\ufffd", *(text.rstrip()[-1:] for text in texts)})


def _ids_alone(encoded: Encoded) -> IntArray:
    if encoded.attachments:
        raise ChatTemplateError(
            f"{len(encoded.attachments)} images or videos are attached to these messages, and token ids alone leave "
            "them out; use an episode, or open_encoded and bridge_encoded"
        )
    return encoded.token_ids
