"""Text to tokens, with control over who may write control tokens."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, cast
from uuid import uuid4

from tokenizers import AddedToken, Encoding, Tokenizer, pre_tokenizers

MASK_OPEN, MASK_CLOSE = "\ue000", "\ue001"
_MASK = re.compile(f"{MASK_OPEN}([0-9a-f]{{1,6}}){MASK_CLOSE}")


class ControlledEncoder:
    """Encodes rendered templates in which foreign text (of users, tools, environments) may not speak control tokens.

    Before rendering, `mask` replaces the first character of every control token in foreign text by a stand-in;
    `encode` writes the template's own control tokens as ids and puts the masked characters back as plain text. Text
    without masks is encoded in one piece, exactly as the tokenizer would.

    Args:
        tokenizer: The `tokenizers` tokenizer. Not changed.
        reserved: More strings that foreign text may not hold while it is rendered.
    """

    def __init__(self, tokenizer: Tokenizer, *, reserved: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._controls = {token_id: token.content for token_id, token in added.items() if _is_control(token)}
        self.control_ids = frozenset(self._controls)
        """Of all added tokens, special or not, but words and runs of spaces, which mean themselves."""
        self._word_start = _starts_of({*self._controls.values(), *reserved, MASK_OPEN})
        # The tokenizer looks for such tokens in the normalised text: `<TOOL>` may be found as `<tool>`.
        self._finds_normalised = any(token.normalized for token in added.values())

    def mask(self, text: str) -> str:
        """Foreign text in which no control token stands, for rendering."""
        text = _encodable(text)
        masked = self._word_start.sub(_masked_start, text)
        normalise = self._normalise
        if normalise is not None and self._word_start.search(normalise(text)):
            masked = "".join(char if normalise(char) == char else _mask_of(char) for char in masked)
        return masked

    def escape(self, text: str) -> str:
        """Text that may speak control tokens, for rendering: nothing in it is taken for a mask."""
        return _encodable(text).replace(MASK_OPEN, _mask_of(MASK_OPEN))

    def unmask(self, text: str) -> str:
        """The text as it was before `mask`."""
        return _MASK.sub(lambda found: chr(int(found[1], 16)), text)

    def encode(self, rendered: str) -> list[int]:
        """Token ids of a rendered template, masked text as plain text."""
        encoding = self._tokenizer.encode(rendered, add_special_tokens=False)
        return self._with_masks_as_text(rendered, encoding) if MASK_OPEN in rendered else encoding.ids

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of foreign text: none of them is a control token."""
        text = _encodable(text)
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids if self.control_ids.isdisjoint(ids) else self._encode_text(text, at_start=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, control tokens written out."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    @property
    def control_texts(self) -> list[str]:
        """How the control tokens are written, in the order of their ids."""
        return [self._controls[token_id] for token_id in sorted(self._controls)]

    def control_spans(self, rendered: str) -> list[tuple[int, int]]:
        """Where control tokens stand in a text: start and end of each, in characters."""
        encoding = self._tokenizer.encode(rendered, add_special_tokens=False)
        both = zip(encoding.ids, encoding.offsets, strict=True)
        return [span for token_id, span in both if token_id in self.control_ids]

    def shared(self, rendered: str, other: str) -> str:
        """What two rendered texts begin with; a control token of the first is shared whole or not at all."""
        length = num_shared(rendered, other)
        for start, end in self.control_spans(rendered):
            if start < length < end:
                length = start
        return rendered[:length]

    def _with_masks_as_text(self, rendered: str, encoding: Encoding) -> list[int]:
        """Replaces the tokens of each stretch between control tokens that holds masks."""
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
        tokenizer = self._text_tokenizer if at_start else self._inner_text_tokenizer
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if not self.control_ids.isdisjoint(ids):
            tokenizer = self._strict_tokenizer if at_start else self._inner_strict_tokenizer
            ids = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def _normalise(self) -> Any:
        if self._tokenizer.normalizer is None or not self._finds_normalised:
            return None
        return self._tokenizer.normalizer.normalize_str

    @cached_property
    def _text_tokenizer(self) -> Tokenizer:
        """The same model without added tokens; costs nothing."""
        return _without_added_tokens(self._tokenizer, self._tokenizer.model)

    @cached_property
    def _inner_text_tokenizer(self) -> Tokenizer:
        return _for_inner_text(self._text_tokenizer)

    @cached_property
    def _strict_tokenizer(self) -> Tokenizer:
        """One whose model does not know the control tokens either: some models find them whole."""
        model = _model_without(set(self._controls.values()), self._tokenizer)
        return _without_added_tokens(self._tokenizer, model)

    @cached_property
    def _inner_strict_tokenizer(self) -> Tokenizer:
        return _for_inner_text(self._strict_tokenizer)


def num_shared(first: Sequence[object], second: Sequence[object]) -> int:
    """How many characters or tokens both begin with."""
    differing = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differing, min(len(first), len(second)))


def _is_control(token: AddedToken) -> bool:
    is_word = not token.content.strip() or token.content.replace(" ", "").isalnum()
    return bool(token.content) and (token.special or not is_word)


def _encodable(text: str) -> str:
    """The text with half surrogates, which no tokenizer takes, replaced; pairs of them become their character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _starts_of(words: Iterable[str]) -> re.Pattern[str]:
    """Matches the first character of each word; sorted by it, which `re` searches fastest."""
    rests: dict[str, list[str]] = {}
    for word in words:
        rests.setdefault(word[0], []).append(re.escape(word[1:]))
    return re.compile("|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()))


def _masked_start(found: re.Match[str]) -> str:
    return _mask_of(found[0])


def _mask_of(char: str) -> str:
    return f"{MASK_OPEN}{ord(char):x}{MASK_CLOSE}"


def _without_added_tokens(tokenizer: Tokenizer, model: Any) -> Tokenizer:
    plain = Tokenizer(model)
    if tokenizer.normalizer is not None:
        plain.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        plain.pre_tokenizer = tokenizer.pre_tokenizer
    return plain


def _for_inner_text(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer of text that does not begin the prompt: some put a space before the very first word."""
    pre_tokenizer = tokenizer.pre_tokenizer
    if not isinstance(pre_tokenizer, pre_tokenizers.Metaspace) or pre_tokenizer.prepend_scheme != "first":
        return tokenizer
    inner = _without_added_tokens(tokenizer, tokenizer.model)
    metaspace = copy.deepcopy(pre_tokenizer)
    metaspace.prepend_scheme = "never"
    inner.pre_tokenizer = metaspace
    return inner


def _model_without(words: set[str], tokenizer: Tokenizer) -> Any:
    """The tokenizer's model with the names of these tokens changed to something that no text holds."""
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
