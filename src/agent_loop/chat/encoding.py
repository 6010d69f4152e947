"""Encoding of rendered text, in which only the template can write control tokens."""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, TypeAlias, cast
from uuid import uuid4

from tokenizers import Encoding, Tokenizer, pre_tokenizers

from agent_loop.chat.byte_level import OtherTokenizer, TiktokenEncoder, is_control
from agent_loop.errors import ConfigError

EncoderChoice: TypeAlias = Literal["auto", "tokenizers", "tiktoken"]
"""The library that encodes. `auto` is `tiktoken` where it returns the same ids."""

MASK_OPEN = "@mask"
"""Start of every mask. Plain ASCII, which templates do not change when they quote, escape or print text."""
_MASK = re.compile(rf"{MASK_OPEN}\.([0-9a-f]{{1,6}});")

_log = logging.getLogger(__name__)


class ControlledEncoder:
    """Encodes rendered templates so that the text of messages cannot become a control token.

    Before rendering, `mask` replaces the first character of every control token in a text by a placeholder. `encode`
    encodes the template's own control tokens as ids, and the masked characters as plain text. Text without masks is
    encoded exactly as the tokenizer encodes it.

    Args:
        tokenizer: The `tokenizers` tokenizer. Not changed.
        reserved: More strings that are masked in untrusted text.
        searched: Texts around reasoning, which templates search in the text of an assistant.
        choice: The library that encodes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        reserved: Sequence[str] = (),
        searched: Iterable[str] = (),
        choice: EncoderChoice = "auto",
    ) -> None:
        self._tokenizer = tokenizer
        self._quick = _quick_encoder(tokenizer, choice)
        self._text_tokenizers: dict[tuple[bool, bool], Tokenizer] = {}
        added = tokenizer.get_added_tokens_decoder()
        self._controls = {token_id: token.content for token_id, token in added.items() if is_control(token)}
        self.control_ids = frozenset(self._controls)
        """Ids of all added tokens, special or not, except words and runs of spaces."""
        words = {*self._controls.values(), *reserved, MASK_OPEN}
        self._word_start = _starts_of(words)
        self._first_characters = {word[0] for word in words}
        self._searched = re.compile(f"({'|'.join(map(re.escape, searched)) or '(?!)'})")
        # The tokenizer looks for such tokens in the normalised text: `<TOOL>` may be found as `<tool>`.
        self._finds_normalised = any(token.normalized for token in added.values())

    def mask(self, text: str) -> str:
        """Return the text for rendering, without control tokens in it."""

        def mask_of(char: str) -> str:
            return f"{MASK_OPEN}.{ord(char):x};"

        text = text if text.isascii() else _encodable(text)
        normalise = self._normalise
        if normalise is not None and self._word_start.search(normalise(text)):
            starts = self._first_characters
            return "".join(
                mask_of(char) if char in starts or normalise(char) != char else char for char in text
            )
        if not any(map(text.__contains__, self._first_characters)):  # the usual case
            return text
        return self._word_start.sub(lambda found: mask_of(found[0]), text)

    def mask_assistant(self, text: str) -> str:
        """Return the text of an assistant for rendering, without control tokens other than those of `searched`."""
        parts = self._searched.split(text)
        return "".join(part if number % 2 else self.mask(part) for number, part in enumerate(parts))

    def unmask(self, text: str) -> str:
        """Return the text as it was before `mask`."""
        return _MASK.sub(lambda found: chr(int(found[1], 16)), text)

    def encode(self, rendered: str) -> list[int]:
        """Return the token ids of a rendered template. Masked text is encoded as plain text."""
        read = self.unmask if MASK_OPEN in rendered else str
        ids = self._quick.encode(rendered, read=read) if self._quick else None
        if ids is not None:
            return ids
        encoding = self._tokenizer.encode(rendered, add_special_tokens=False)
        return self._with_masks_as_text(rendered, encoding) if MASK_OPEN in rendered else encoding.ids

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of untrusted text. None of them is a control token."""
        text = _encodable(text)
        ids = self._quick.encode_text(text) if self._quick else None
        if ids is not None:
            return ids
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids if self.control_ids.isdisjoint(ids) else self._encode_text(text, at_start=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, control tokens included."""
        if self._quick is not None:
            return self._quick.decode(token_ids)
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    @property
    def token_bytes(self) -> Sequence[bytes] | None:
        """Bytes of each token id, or None if the text of tokens may differ from their bytes."""
        return None if self._quick is None else self._quick.token_bytes

    @property
    def control_texts(self) -> list[str]:
        """Texts of the control tokens, in the order of their ids."""
        return [self._controls[token_id] for token_id in sorted(self._controls)]

    def control_spans(self, rendered: str) -> list[tuple[int, int]]:
        """Return the start and end of each control token in a text, in characters."""
        encoding = self._tokenizer.encode(rendered, add_special_tokens=False)
        both = zip(encoding.ids, encoding.offsets, strict=True)
        return [span for token_id, span in both if token_id in self.control_ids]

    def shared(self, rendered: str, other: str) -> str:
        """Return the common beginning of two rendered texts, without a cut through a control token of the first."""
        length = num_shared(rendered, other)
        for start, end in self.control_spans(rendered):
            if start < length < end:
                length = start
        return rendered[:length]

    def _with_masks_as_text(self, rendered: str, encoding: Encoding) -> list[int]:
        """Return the ids with the tokens of each stretch that contains masks replaced."""
        ids: list[int] = []
        stretch: list[int] = []
        start = 0

        def end_stretch(end: int) -> None:
            text = rendered[start:end]
            if MASK_OPEN in text:
                ids.extend(self._encode_text(self.unmask(text), at_start=start == 0))
            else:
                ids.extend(stretch)
            stretch.clear()

        for token_id, (token_start, token_end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self.control_ids:
                end_stretch(token_start)
                ids.append(token_id)
                start = token_end
            else:
                stretch.append(token_id)
        end_stretch(len(rendered))
        return ids

    def _encode_text(self, text: str, *, at_start: bool) -> list[int]:
        ids = self._quick.encode_text(text) if self._quick else None
        if ids is not None:
            return ids
        ids = (
            self._text_tokenizer(at_start=at_start, is_strict=False)
            .encode(text, add_special_tokens=False)
            .ids
        )
        if self.control_ids.isdisjoint(ids):
            return ids
        return (
            self._text_tokenizer(at_start=at_start, is_strict=True).encode(text, add_special_tokens=False).ids
        )

    def _text_tokenizer(self, *, at_start: bool, is_strict: bool) -> Tokenizer:
        """Return a tokenizer with the same model and without added tokens.

        The model of a strict one does not know the control tokens either, since some models find them as words.
        """
        key = at_start, is_strict
        if key not in self._text_tokenizers:
            words = set(self._controls.values())
            model = _model_without(words, self._tokenizer) if is_strict else self._tokenizer.model
            plain = _without_added_tokens(self._tokenizer, model)
            self._text_tokenizers[key] = plain if at_start else _for_inner_text(plain)
        return self._text_tokenizers[key]

    @cached_property
    def _normalise(self) -> Any:
        if self._tokenizer.normalizer is None or not self._finds_normalised:
            return None
        return self._tokenizer.normalizer.normalize_str


def _quick_encoder(tokenizer: Tokenizer, choice: EncoderChoice) -> TiktokenEncoder | None:
    if choice == "tokenizers":
        return None
    try:
        return TiktokenEncoder(tokenizer)
    except OtherTokenizer as error:
        if choice == "tiktoken":
            raise ConfigError(
                f"model.encoder is tiktoken, which does not support the tokenizer: {error}; set model.encoder=auto"
            ) from error
        _log.info(
            "tokenizers encodes texts, because the faster tiktoken does not support the tokenizer: %s", error
        )
        return None


def num_shared(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the number of leading characters or tokens that both share."""
    differing = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differing, min(len(first), len(second)))


def _encodable(text: str) -> str:
    """Return the text with surrogate pairs joined and lone surrogates replaced, which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _starts_of(words: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for the first character of each word, grouped by the character, which `re` searches fastest."""
    groups = groupby(sorted(words), key=lambda word: word[0])
    rests = {first: "|".join(re.escape(word[1:]) for word in group) for first, group in groups}
    return re.compile("|".join(f"{re.escape(first)}(?={rest})" for first, rest in rests.items()))


def _without_added_tokens(tokenizer: Tokenizer, model: Any) -> Tokenizer:
    plain = Tokenizer(model)
    if tokenizer.normalizer is not None:
        plain.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        plain.pre_tokenizer = tokenizer.pre_tokenizer
    return plain


def _for_inner_text(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer for text inside the prompt: some tokenizers put a space before the first word only."""
    pre_tokenizer = tokenizer.pre_tokenizer
    if not isinstance(pre_tokenizer, pre_tokenizers.Metaspace) or pre_tokenizer.prepend_scheme != "first":
        return tokenizer
    inner = _without_added_tokens(tokenizer, tokenizer.model)
    metaspace = copy.deepcopy(pre_tokenizer)
    metaspace.prepend_scheme = "never"
    inner.pre_tokenizer = metaspace
    return inner


def _model_without(words: set[str], tokenizer: Tokenizer) -> Any:
    """Return the tokenizer's model with these tokens renamed to strings that no text contains."""
    description = cast(dict[str, Any], json.loads(tokenizer.to_str()))
    description |= {"added_tokens": [], "post_processor": None}
    model = cast(dict[str, Any], description["model"])
    new_names = {word: f"{uuid4().hex} {uuid4().hex}" for word in words}
    vocab: Any = model["vocab"]
    if isinstance(vocab, list):
        pieces = cast(list[tuple[str, float]], vocab)
        model["vocab"] = [[new_names.get(piece, piece), score] for piece, score in pieces]
    else:
        model["vocab"] = {new_names.get(piece, piece): token_id for piece, token_id in vocab.items()}
    if "merges" in model:
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if words.isdisjoint(pair) and "".join(pair) not in words]
    if model.get("unk_token") in words:
        model["unk_token"] = new_names[model["unk_token"]]
    return Tokenizer.from_str(json.dumps(description)).model
