"""Byte-level BPE with `tiktoken`, which is several times faster than `tokenizers` and returns the same ids.

`tokenizers` joins the pair that comes first in a list of merges; `tiktoken` joins the pair whose token has the lowest
id. Both take the same steps if ids increase along the list and every token is the encoding of its own text; see
docs/design/008-encoder.md for the reason. Both split texts by a pattern. The patterns here are those whose splits the
tests compare.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import tiktoken
from tokenizers import AddedToken, Tokenizer, decoders, models

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Pattern by which `tokenizers` splits text if a byte-level pre-tokenizer has no pattern."""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_MARK = r" ?[^\s\p{L}\p{N}]+"
_PATTERNS = frozenset(
    {
        GPT2_PATTERN,
        r"[\s\S]+",
        # Qwen2, Qwen2.5, Qwen3
        rf"{_CONTRACTIONS}|{_BEFORE_WORD}\p{{L}}+|\p{{N}}|{_MARK}[\r\n]*|{_SPACES}",
        # Qwen3.5
        rf"{_CONTRACTIONS}|{_BEFORE_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        # Llama 3, GLM 4
        rf"{_CONTRACTIONS}|{_BEFORE_WORD}\p{{L}}+|\p{{N}}{{1,3}}|{_MARK}[\r\n]*|{_SPACES}",
        # gpt-oss
        rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE_WORD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
        rf"|\p{{N}}{{1,3}}|{_MARK}[\r\n/]*|{_SPACES}",
    }
)

BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Pattern of the names that SentencePiece vocabularies give to single bytes."""

MAX_CHARACTERS = 250_000
"""Longest text that is encoded at once; `tiktoken`'s search for its pattern fails on a million spaces."""


class OtherTokenizer(Exception):
    """Raised if `tiktoken` cannot replace a tokenizer. The message is the reason."""


class TiktokenEncoder:
    """Encodes and decodes like a tokenizer of `tokenizers`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        model_type: str = tokenizer.model.__class__.__name__
        _require(model_type == "BPE", f"its model is {model_type}, not BPE")
        _require(isinstance(tokenizer.decoder, decoders.ByteLevel), "its decoder is not byte-level")
        described = cast(dict[str, Any], json.loads(tokenizer.to_str()))  # seconds for a large vocabulary
        is_composed = _is_composed(described["normalizer"] or {"type": "Sequence", "normalizers": []})
        self._normalizer: Any = tokenizer.normalizer if is_composed else None
        self._control_ids = _control_ids(tokenizer.get_added_tokens_decoder(), is_composed=is_composed)
        model = cast(dict[str, Any], described["model"])
        for field in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            _require(not model.get(field), f"its model has a {field}")
        vocab = cast(dict[str, int], model["vocab"])
        _require(CHARS.issubset(vocab), "its vocabulary lacks some of the 256 bytes")
        self.token_bytes = token_bytes = _token_bytes({**vocab, **self._control_ids})
        """Bytes of the tokens by id; empty for ids without a token."""
        longest_first = sorted(map(re.escape, self._control_ids), key=len, reverse=True)
        self._controls = re.compile(f"({'|'.join(longest_first)})")
        self._first_characters = {text[0] for text in self._control_ids}
        self._encoding = tiktoken.Encoding(
            "byte-level",
            pat_str=_pattern(described["pre_tokenizer"] or {}),
            mergeable_ranks={token_bytes[i]: i for i in _made_ids(model, set(self._control_ids.values()))},
            special_tokens={},
        )

    def encode(self, text: str, *, read: Callable[[str], str] = str) -> list[int] | None:
        """Return the token ids of a text with control tokens, or None if the ids may differ from the tokenizer's.

        Args:
            text: The text.
            read: Applied to each stretch between control tokens before the stretch is encoded.
        """
        may_hold_controls = any(map(text.__contains__, self._first_characters))
        stretches = self._controls.split(text) if may_hold_controls else [text]
        ids: list[int] = []
        for number, stretch in enumerate(stretches):
            if number % 2:
                ids.append(self._control_ids[stretch])
            elif stretch:
                text_ids = self.encode_text(read(stretch))
                if text_ids is None:
                    return None
                ids += text_ids
        return ids

    def encode_text(self, text: str) -> list[int] | None:
        """Return the token ids of text without control tokens, or None if the ids may differ from the tokenizer's."""
        if len(text) > MAX_CHARACTERS:
            return None
        if not text.isascii():
            if any(unicodedata.category(char) in ("Cn", "Cs") for char in set(text)):
                return None  # the libraries may know other versions of Unicode
            if self._normalizer is not None and not unicodedata.is_normalized("NFC", text):
                text = self._normalizer.normalize_str(text)
        return self._encoding.encode_ordinary(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids. Unknown ids are left out."""
        known = self.token_bytes
        return b"".join([known[token_id] for token_id in token_ids if token_id < len(known)]).decode(
            "utf-8", "replace"
        )


def is_control(token: AddedToken) -> bool:
    """Return whether an added token is a control token, and not a word or a run of spaces."""
    is_word = not token.content.strip() or token.content.replace(" ", "").isalnum()
    return bool(token.content) and (token.special or not is_word)


def _control_ids(added: Mapping[int, AddedToken], *, is_composed: bool) -> dict[str, int]:
    for token in added.values():
        quirks = [name for name in ("lstrip", "rstrip", "single_word") if getattr(token, name)]
        quirks += ["normalized"] if is_composed and token.normalized else []
        _require(not quirks, f"its token {token.content!r} is one with {', '.join(quirks)}")
        _require(is_control(token), f"its token {token.content!r} is a word")
    _require(
        len({token.normalized for token in added.values()}) <= 1, "it looks for added tokens in two passes"
    )
    return {token.content: token_id for token_id, token in added.items()}


def _made_ids(model: dict[str, Any], added_ids: set[int]) -> list[int]:
    """Return the tokens that merges make: the tokens that are the encoding of their own text."""
    vocab = cast(dict[str, int], model["vocab"])
    merges: list[tuple[str, str]] = [(left, right) for left, right in model["merges"]]
    merged = [vocab[left + right] for left, right in merges]
    _require(all(a <= b for a, b in pairwise(merged)), "ids do not grow along its merges")
    _require(added_ids.isdisjoint(merged), "its merges make an added token")
    joined = models.BPE(vocab=vocab, merges=merges, cache_capacity=0)
    own = {token: token_id for token, token_id in vocab.items() if token_id not in added_ids}
    made = [own[token] for token in own if len(token) == 1 or len(joined.tokenize(token)) == 1]
    is_whole = not model["ignore_merges"] or len(made) == len(own)
    _require(is_whole, "it finds whole words that its merges do not make")
    return made


def _pattern(described: dict[str, Any]) -> str:
    """Return the pattern of `ByteLevel` alone, or of one `Split` before it."""
    stages = described.get("pretokenizers", [described])
    _require(stages[-1].get("type") == "ByteLevel", "its pre-tokenizer is not byte-level")
    _require(not stages[-1]["add_prefix_space"], "it puts a space before a text")
    if len(stages) == 1:
        return GPT2_PATTERN if stages[0]["use_regex"] else r"[\s\S]+"
    is_one_split = len(stages) == 2 and stages[0]["type"] == "Split" and not stages[1]["use_regex"]
    _require(is_one_split, "it splits in several stages")
    split = stages[0]
    keeps_matches = (split["behavior"], split["invert"]) in (("Isolated", False), ("Removed", True))
    _require(keeps_matches, f"it splits by {split['behavior']}")
    pattern = split["pattern"].get("Regex", "")
    _require(bool(pattern), "it splits by a fixed text")
    _require(pattern in _PATTERNS, f"it is not tested with the pattern of its splits: {pattern}")
    return pattern


def _is_composed(described: dict[str, Any]) -> bool:
    stages = described.get("normalizers", [described])
    others = [stage["type"] for stage in stages if stage["type"] != "NFC"]
    _require(not others, f"it normalises by {', '.join(others)}")
    return bool(stages)


def _token_bytes(ids: Mapping[str, int]) -> list[bytes]:
    token_bytes = [b""] * (max(ids.values()) + 1)
    for token, token_id in ids.items():
        token_bytes[token_id] = bytes_of(token) if CHARS.issuperset(token) else token.encode()
    return token_bytes


def _byte_of_char() -> dict[int, int]:
    """Return the byte of each character of byte-level vocabularies. Printable bytes are written as themselves, the
    others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + i: byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
CHARS = frozenset(map(chr, _BYTE_OF_CHAR))
"""Characters of byte-level vocabularies, one per byte."""


def bytes_of(token: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary."""
    return token.translate(_BYTE_OF_CHAR).encode("latin-1")


def bytes_of_name(name: str) -> bytes:
    """Return the bytes of a token that is part of a character, by its name in the vocabulary."""
    byte = BYTE_NAME.fullmatch(name)
    if byte:
        return bytes([int(byte[1], 16)])
    return bytes_of(name) if CHARS.issuperset(name) else name.encode()


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise OtherTokenizer(reason)
