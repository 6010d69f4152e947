"""Which added tokens are control tokens, and at which of them a text can be cut."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken


def is_control(token: AddedToken) -> bool:
    """Whether a token means something else than its text; words and runs of spaces mean themselves."""
    is_word = not token.content.strip() or token.content.replace(" ", "").isalnum()
    return bool(token.content) and (token.special or not is_word)


def anchors(added: Iterable[AddedToken], *, is_normalised: bool) -> frozenset[str]:
    """The control tokens that are found wherever their text stands, whatever stands around it.

    Others would be missed where a longer token begins with them or an earlier one runs into them.

    Args:
        added: All added tokens of a tokenizer.
        is_normalised: The tokenizer has a normaliser.
    """
    texts = {token.content for token in added if token.content}
    beginnings = {text[:end] for text in texts for end in range(1, len(text))}
    behind_first = "\0".join(text[1:] for text in texts)
    overlapped = {end for text in texts for end in _ends(text) if end in texts or end in beginnings}
    return frozenset(
        token.content
        for token in added
        if is_control(token)
        and not token.single_word
        and not (token.normalized and is_normalised)
        and token.content not in beginnings
        and not any(token.content.startswith(end) for end in overlapped)
        and token.content not in behind_first
    )


def _ends(text: str) -> Iterable[str]:
    return (text[start:] for start in range(1, len(text)))
