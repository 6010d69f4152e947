"""The parts of a byte-level BPE tokenizer that `tiktoken` needs to return the same ids.

`tokenizers` joins the pair that comes first in a list of merges; `tiktoken` joins the pair whose token has the lowest
id. Both take the same steps if ids increase along the list and every token is the encoding of its own text; see
docs/design/008-encoder.md for the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer, models

from agent_loop.chat.controls import is_control

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Pattern by which `tokenizers` splits text if a byte-level pre-tokenizer has no pattern."""

BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Pattern of the names that SentencePiece vocabularies give to single bytes."""

_WHOLE = r"[\s\S]+"
_READ_ALIKE = re.compile(
    r"(?:\\[pP]\{\w+\}|\\[sSrnt]|\\[^\w]|\[\^?|\(\?(?:i?:|!|=)|\{\d+(?:,\d*)?\}|[^\\^$.{}&\[])*"
)
"""Matches patterns that mean the same to every engine: no anchors, no dots, no intersections of classes."""


class OtherTokenizer(Exception):
    """Raised if another encoder cannot replace a tokenizer. The message is the reason."""


@dataclass(frozen=True, slots=True)
class ByteLevelBpe:
    """Parts of a byte-level BPE tokenizer."""

    ranks: Mapping[bytes, int]
    """Ids of the texts that merges can make. Lower ids are merged first."""
    pattern: str
    """Pattern that splits a text into pieces, which are encoded separately."""
    is_composed: bool
    """Whether texts are normalised to Unicode's composed form (NFC) first."""
    control_ids: Mapping[str, int]
    """Ids of the added tokens."""
    token_bytes: Sequence[bytes]
    """Bytes of the tokens by id; empty for ids without a token."""


def read_byte_level(tokenizer: Tokenizer) -> ByteLevelBpe:
    """Return the parts of a tokenizer.

    Raises:
        OtherTokenizer: The tokenizer does or may do something that `tiktoken` does not.
    """
    described = cast(dict[str, Any], json.loads(tokenizer.to_str()))
    is_composed = _is_composed(described["normalizer"] or {"type": "Sequence", "normalizers": []})
    control_ids = _control_ids(tokenizer.get_added_tokens_decoder(), is_composed=is_composed)
    model = cast(dict[str, Any], described["model"])
    _require(model["type"] == "BPE", f"its model is {model['type']}, not BPE")
    for field in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        _require(not model.get(field), f"its model has a {field}")
    vocab = cast(dict[str, int], model["vocab"])
    _require(CHARS.issubset(vocab), "its vocabulary lacks some of the 256 bytes")
    token_bytes = _token_bytes({**vocab, **control_ids})
    decoder = cast(dict[str, Any], described["decoder"] or {})
    _require(decoder.get("type") == "ByteLevel", "its decoder is not byte-level")
    return ByteLevelBpe(
        ranks={token_bytes[token_id]: token_id for token_id in _made_ids(model, set(control_ids.values()))},
        pattern=_pattern(described["pre_tokenizer"] or {}),
        is_composed=is_composed,
        control_ids=control_ids,
        token_bytes=token_bytes,
    )


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
        return GPT2_PATTERN if stages[0]["use_regex"] else _WHOLE
    is_one_split = len(stages) == 2 and stages[0]["type"] == "Split" and not stages[1]["use_regex"]
    _require(is_one_split, "it splits in several stages")
    split = stages[0]
    keeps_matches = (split["behavior"], split["invert"]) in (("Isolated", False), ("Removed", True))
    _require(keeps_matches, f"it splits by {split['behavior']}")
    pattern = split["pattern"].get("Regex", "")
    _require(bool(pattern), "it splits by a fixed text")
    _require(
        _READ_ALIKE.fullmatch(pattern) is not None, f"engines may read its pattern differently: {pattern}"
    )
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
