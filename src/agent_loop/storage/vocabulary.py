"""Text of each token, for readers that have no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from agent_loop.chat.byte_level import BYTE_NAME, CHARS, bytes_of
from agent_loop.errors import DataError
from agent_loop.storage.exclusive import whole_file
from agent_loop.storage.schema import VOCABULARY_VERSION

Piece: TypeAlias = str | list[int]
"""Text of a token, or its bytes if these are not valid text."""
ANCHOR = "a"


def write_vocabulary(path: Path, tokenizer: Any) -> None:
    """Write the text of each token of a Hugging Face tokenizer.

    Raises:
        OSError: The file cannot be written.
    """
    pieces = pieces_of(tokenizer)
    text = json.dumps(
        {"version": VOCABULARY_VERSION, "pieces": pieces}, ensure_ascii=False, separators=(",", ":")
    )
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_vocabulary(path: Path) -> list[Piece]:
    """Return the text or bytes of each token, by its id.

    Raises:
        DataError: The file is damaged, or has a later version.
    """
    try:
        form = json.loads(path.read_text(encoding="utf-8"))
        version, pieces = form["version"], form["pieces"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{str(path)!r} cannot be read as a vocabulary ({error}); copy it again, or move it elsewhere to see "
            "tokens by their numbers"
        ) from error
    if version != VOCABULARY_VERSION:
        raise DataError(
            f"{str(path)!r} is a vocabulary of version {version}, and this reads {VOCABULARY_VERSION}; upgrade "
            "agent-loop"
        )
    return pieces


def text_of(token_ids: Iterable[int], pieces: Sequence[Piece]) -> str:
    """Return the text of tokens. Tokens outside the vocabulary become their number."""
    parts: list[bytes] = []
    for token in token_ids:
        piece: Piece = pieces[token] if 0 <= token < len(pieces) else f"<{token}>"
        parts.append(piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else bytes(piece))
    return b"".join(parts).decode("utf-8", "replace")


def pieces_of(tokenizer: Any) -> list[Piece]:
    """Return the text or bytes of each token of a Hugging Face tokenizer, by its id."""
    names: dict[int, str] = {number: name for name, number in tokenizer.get_vocab().items()}
    added: dict[int, str] = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    read = _reader(tokenizer)
    pieces: list[Piece] = [""] * (max({*names, *added}, default=-1) + 1)
    for number, name in names.items():
        pieces[number] = read(name)
    for number, name in added.items():
        pieces[number] = name
    return pieces


def _reader(tokenizer: Any) -> Callable[[str], Piece]:
    """Return a function from a name in the vocabulary to the text or bytes of its token."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    decoder: Any = getattr(backend, "decoder", None)
    if decoder is None:
        return str
    described = backend.to_str()
    if '"ByteLevel"' in json.dumps(json.loads(described)["decoder"]):
        return _read_byte_level
    first = decoder.decode([ANCHOR])

    def read(name: str) -> Piece:
        """Decode the token after another token, since some decoders strip a space from the first token."""
        byte = BYTE_NAME.fullmatch(name)
        return [int(byte[1], 16)] if byte else decoder.decode([ANCHOR, name]).removeprefix(first)

    return read


def _read_byte_level(name: str) -> Piece:
    if not CHARS.issuperset(name):
        return name
    read = bytes_of(name)
    try:
        return read.decode("utf-8")
    except UnicodeDecodeError:
        return list(read)
