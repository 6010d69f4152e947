from __future__ import annotations

import json
import logging
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from agent_loop.chat.byte_level import MAX_CHARACTERS, OtherTokenizer, TiktokenEncoder
from agent_loop.chat.encoding import ControlledEncoder
from agent_loop.errors import ConfigError
from tests.chat.byte_level import (
    CONTROLS,
    PATTERNS,
    TEXTS,
    like,
    split_by,
    trained,
    untrained,
)
from tests.harness import examples, is_nightly
from tests.helpers import small_tokenizer

FAMILIES = list(PATTERNS)
PIECES = [
    *CONTROLS,
    *TEXTS,
    "<|im_",
    "<",
    "'s",
    "'LL",
    "'\u017f",
    "  ",
    "\n\n",
    "\r\n",
    "\u0301",
    "é",
    "12",
    "a",
]
texts = st.text() | st.lists(st.sampled_from(PIECES) | st.text(max_size=4)).map("".join)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("family", FAMILIES)
@examples(150)
@given(text=texts)
def test_ids_equal_those_of_tokenizers_or_are_none(family: str, text: str) -> None:
    tokenizer = like(family)
    ids = TiktokenEncoder(tokenizer).encode(text)
    assert ids in (ids_of(tokenizer, text), None)
    assert ids is not None or not text.isascii()


@pytest.mark.parametrize("family", FAMILIES)
@examples(60)
@given(text=texts, before=st.sampled_from(["", *CONTROLS]), after=st.sampled_from(["", *CONTROLS]))
def test_masked_and_plain_text_has_the_same_ids_in_both_libraries(
    family: str, text: str, before: str, after: str
) -> None:
    quick, slow = ControlledEncoder(like(family)), ControlledEncoder(like(family), choice="tokenizers")
    rendered = f"{before}{slow.mask(text)}{after}"
    assert quick.mask(text) == slow.mask(text)
    assert quick.encode(rendered) == slow.encode(rendered)
    assert quick.encode_plain(text) == slow.encode_plain(text)
    assert quick.control_ids.isdisjoint(quick.encode_plain(text))


@pytest.mark.parametrize("family", FAMILIES)
@examples(100)
@given(ids=st.lists(st.integers(0, 1000)))
def test_any_ids_decode_to_the_same_text(family: str, ids: list[int]) -> None:
    """Also ids that split characters, and ids that are not in the vocabulary."""
    tokenizer = like(family)
    assert TiktokenEncoder(tokenizer).decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)


def test_the_tokenizers_of_the_tests_are_encoded_by_tiktoken() -> None:
    backend = small_tokenizer().backend_tokenizer
    for text in (*TEXTS, "".join(PIECES)):
        assert TiktokenEncoder(backend).encode(text) == ids_of(backend, text)


def with_model(**changes: Any) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        described = json.loads(like("gpt2").to_str())
        described["model"] |= changes
        return Tokenizer.from_str(json.dumps(described))

    return make


def with_swapped_ids() -> Tokenizer:
    """Return a tokenizer in which the ids of the first two merged tokens are swapped."""
    described = json.loads(like("gpt2").to_str())
    vocab, merges = described["model"]["vocab"], described["model"]["merges"]
    first, second = ("".join(merge) for merge in merges[:2])
    vocab[first], vocab[second] = vocab[second], vocab[first]
    return Tokenizer.from_str(json.dumps(described))


def with_unmade_word() -> Tokenizer:
    """Return a tokenizer whose vocabulary has a word that merges cannot reach."""
    described = json.loads(like("llama3").to_str())
    described["added_tokens"] = []
    described["model"]["vocab"] |= {"unmadeword": len(described["model"]["vocab"])}
    return Tokenizer.from_str(json.dumps(described))


def with_part(name: str, part: Any) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        tokenizer = untrained()
        setattr(tokenizer, name, part)
        return trained(tokenizer)

    return make


def with_token(*tokens: AddedToken, family: str = "gpt2") -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        tokenizer = Tokenizer.from_str(like(family).to_str())
        tokenizer.add_tokens(list(tokens))
        return tokenizer

    return make


def unigram() -> Tokenizer:
    return Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))


OTHERS = {
    "not BPE": unigram,
    "dropout": with_model(dropout=0.1),
    "end_of_word_suffix": with_model(end_of_word_suffix="x"),
    "ids do not grow": with_swapped_ids,
    "whole words that its merges do not make": with_unmade_word,
    "a space before a text": with_part("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "not byte-level": with_part("pre_tokenizer", pre_tokenizers.Whitespace()),
    "several stages": with_part(
        "pre_tokenizer",
        pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    ),
    "not tested with the pattern": with_part("pre_tokenizer", split_by(r"^\w+|[\s\S]")),
    "normalises by Lowercase": with_part("normalizer", normalizers.Lowercase()),
    "lstrip": with_token(AddedToken("<a>", lstrip=True)),
    "rstrip": with_token(AddedToken("<a>", rstrip=True)),
    "single_word": with_token(AddedToken("<a>", single_word=True)),
    "normalized": with_token(AddedToken("<a>", normalized=True), family="qwen2"),
    "two passes": with_token(AddedToken("<a>", normalized=True)),
    "is a word": with_token(AddedToken("covid19", normalized=False)),
    "merges make an added token": with_token(AddedToken("he", normalized=False, special=True)),
}


@pytest.mark.parametrize("reason", OTHERS)
def test_other_tokenizers_are_encoded_by_tokenizers_and_the_reason_is_logged(
    reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = OTHERS[reason]()
    with pytest.raises(OtherTokenizer, match=reason):
        TiktokenEncoder(tokenizer)
    with pytest.raises(ConfigError, match=f"model.encoder is tiktoken.*{reason}"):
        ControlledEncoder(tokenizer, choice="tiktoken")
    with caplog.at_level(logging.INFO, logger="agent_loop.chat.encoding"):
        encoder = ControlledEncoder(tokenizer)
    [record] = caplog.records
    assert reason in record.getMessage()
    if reason != "dropout":
        assert encoder.encode("A hello <a> covid19") == ids_of(tokenizer, "A hello <a> covid19")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_known_character_is_split_equally(family: str) -> None:
    """The libraries may implement other versions of Unicode; both have to know the characters that Python knows."""
    tokenizer = like(family)
    encoder = TiktokenEncoder(tokenizer)
    known = [c for c in map(chr, range(0x30000)) if unicodedata.category(c) not in ("Cn", "Cs")]
    for start in range(0, len(known), 64 if is_nightly() else 64 * 8):
        beside = [f"a{c}a A{c}1{c} {c}{c}\n{c}.{c}'s a'{c}你{c}" for c in known[start : start + 64]]
        text = "\n".join(beside)
        assert encoder.encode(text) == ids_of(tokenizer, text)


@pytest.mark.parametrize("text", ["new \U00016105 script", "a" * (MAX_CHARACTERS + 1), "\u0378"])
def test_text_with_uncertain_splits_is_encoded_by_tokenizers(text: str) -> None:
    tokenizer = like("qwen2")
    assert TiktokenEncoder(tokenizer).encode(text) is None
    assert ControlledEncoder(tokenizer).encode(f"<|im_start|>{text}") == ids_of(
        tokenizer, f"<|im_start|>{text}"
    )


def test_tokens_that_merges_cannot_reach_are_never_encoded() -> None:
    """A vocabulary may contain tokens that its merges cannot reach."""
    described = json.loads(like("gpt2").to_str())
    vocab = described["model"]["vocab"]
    vocab["qz"] = max(vocab.values(), default=0) + 100
    tokenizer = Tokenizer.from_str(json.dumps(described))
    assert TiktokenEncoder(tokenizer).encode("qz aqz") == ids_of(tokenizer, "qz aqz")
