"""Classification of added tokens: control tokens, and anchors, at which a text can be cut."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken


def is_control(token: AddedToken) -> bool:
    """Return whether an added token is a control token, and not a word or a run of spaces."""
    is_word = not token.content.strip() or token.content.replace(" ", "").isalnum()
    return bool(token.content) and (token.special or not is_word)


def anchors(added: Iterable[AddedToken], *, is_normalised: bool) -> frozenset[str]:
    """Return the control tokens that a tokenizer finds whatever stands beside them.

    A tokenizer misses other control tokens where a longer token begins with them or an earlier token overlaps them.

    Args:
        added: All added tokens of a tokenizer.
        is_normalised: Whether the tokenizer has a normaliser.
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
