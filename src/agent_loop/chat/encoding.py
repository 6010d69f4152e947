"""Text to tokens, with control over who may write control tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, cast

from tokenizers import Tokenizer

MASK_OPEN, MASK_CLOSE = "\ue000", "\ue001"


class ControlledEncoder:
    """Encodes rendered templates in which foreign text (of users, tools, environments) may not speak control tokens.

    Before rendering, `mask` replaces every control token's text in foreign text by a stand-in; `encode` writes the
    template's own control tokens as ids and puts the stand-ins' text back as plain text. Text without stand-ins is
    encoded in one piece, exactly as the tokenizer would.

    Args:
        tokenizer: The `tokenizers` tokenizer. Not changed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._plain_tokenizer: Tokenizer | None = None
        added = tokenizer.get_added_tokens_decoder()
        self._id_of = {token.content: token_id for token_id, token in added.items()}
        self._controls = sorted(self._id_of, key=len, reverse=True)
        pattern = "|".join(re.escape(control) for control in self._controls)
        self._control_pattern = re.compile(f"({pattern})") if pattern else None

    def mask(self, text: str) -> str:
        """Foreign text in which no control token stands, for rendering."""
        if self._control_pattern is None:
            return text
        return self._control_pattern.sub(
            lambda found: f"{MASK_OPEN}{self._controls.index(found[0])}{MASK_CLOSE}", text
        )

    def unmask(self, text: str) -> str:
        """The text as it was before `mask`."""
        return re.sub(f"{MASK_OPEN}([0-9]{{1,9}}){MASK_CLOSE}", self._masked_text, text)

    def encode(self, rendered: str) -> list[int]:
        """Token ids of a rendered template, masked text as plain text."""
        if MASK_OPEN not in rendered or self._control_pattern is None:
            return self._tokenizer.encode(rendered, add_special_tokens=False).ids
        ids: list[int] = []
        for piece in self._control_pattern.split(rendered):
            if piece in self._id_of:
                ids.append(self._id_of[piece])
            elif piece:
                ids += self.encode_plain(self.unmask(piece))
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of foreign text: none of them is a control token."""
        if self._control_pattern is None or self._control_pattern.search(text) is None:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._plain_tokenizer is None:
            self._plain_tokenizer = _without_control_tokens(self._tokenizer)
        return self._plain_tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, control tokens written out."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _masked_text(self, stand_in: re.Match[str]) -> str:
        index = int(stand_in[1])
        return self._controls[index] if index < len(self._controls) else stand_in[0]


def _without_control_tokens(tokenizer: Tokenizer) -> Tokenizer:
    description = cast(dict[str, Any], json.loads(tokenizer.to_str()))
    description["added_tokens"] = []
    description["post_processor"] = None
    return Tokenizer.from_str(json.dumps(description))
