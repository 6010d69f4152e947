"""Texts of tokens by the stored vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from agent_loop.errors import DataError
from agent_loop.storage import pieces_of, read_vocabulary, text_of, write_vocabulary
from tests.helpers import small_tokenizer
from tests.training.fakes import tiny_tokenizer

TEXT = "<|im_start|>user\nvier ☃ and 日本<|im_end|>\n"


def test_byte_level_tokens_join_to_the_text(tmp_path: Path) -> None:
    tokenizer = small_tokenizer()
    write_vocabulary(tmp_path / "vocabulary.json", tokenizer)
    pieces = read_vocabulary(tmp_path / "vocabulary.json")
    ids = tokenizer.backend_tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert len(pieces) == len(tokenizer)
    assert text_of(ids, pieces) == TEXT
    assert any(isinstance(pieces[token], list) for token in ids), (
        "a snowman is three tokens, none of them text"
    )
    assert pieces[tokenizer.convert_tokens_to_ids("<|im_end|>")] == "<|im_end|>"


def test_tokens_with_spaces_keep_them() -> None:
    names = ["<0x41>", "▁hello", "lo", "<unk>"]
    backend = Tokenizer(
        models.BPE({name: number for number, name in enumerate(names)}, [], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert pieces_of(tokenizer) == [[0x41], " hello", "lo", "<unk>"]
    assert text_of([1, 2, 0, 99], pieces_of(tokenizer)) == " helloloA<99>"


def test_tokens_of_a_word_level_vocabulary_are_unchanged() -> None:
    assert pieces_of(tiny_tokenizer())[:3] == ["0", "1", "2"]


@pytest.mark.parametrize("text", ["not JSON", "[]", json.dumps({"version": 2, "pieces": []})])
def test_an_invalid_vocabulary_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match="vocabulary"):
        read_vocabulary(path)
