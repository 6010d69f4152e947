"""Encoding of untrusted text with `tokenizers`, without control tokens."""

from __future__ import annotations

import copy
import json
from functools import cached_property
from typing import Any, cast
from uuid import uuid4

from tokenizers import Tokenizer, pre_tokenizers

from agent_loop.chat.controls import is_control


class PlainTextEncoder:
    """Encodes any text without control tokens.

    Args:
        tokenizer: The `tokenizers` tokenizer. Not changed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._controls = {token.content for token in added.values() if is_control(token)}
        self._control_ids = {token_id for token_id, token in added.items() if is_control(token)}

    def encode(self, text: str, *, at_start: bool) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: The text.
            at_start: Whether the prompt begins with the text.
        """
        tokenizer = self._text_tokenizer if at_start else self._inner_text_tokenizer
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if not self._control_ids.isdisjoint(ids):
            tokenizer = self._strict_tokenizer if at_start else self._inner_strict_tokenizer
            ids = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def _text_tokenizer(self) -> Tokenizer:
        """Tokenizer with the same model and without added tokens."""
        return _without_added_tokens(self._tokenizer, self._tokenizer.model)

    @cached_property
    def _inner_text_tokenizer(self) -> Tokenizer:
        return _for_inner_text(self._text_tokenizer)

    @cached_property
    def _strict_tokenizer(self) -> Tokenizer:
        """Tokenizer whose model does not know the control tokens either, since some models find them as words."""
        model = _model_without(self._controls, self._tokenizer)
        return _without_added_tokens(self._tokenizer, model)

    @cached_property
    def _inner_strict_tokenizer(self) -> Tokenizer:
        return _for_inner_text(self._strict_tokenizer)


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
