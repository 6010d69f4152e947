"""Encoding of text with control tokens, in tokens of either library, and decoding of streams."""

from __future__ import annotations

import json
import time
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from agent_loop.chat.byte_level import MAX_CHARACTERS, OtherTokenizer, TiktokenEncoder
from agent_loop.chat.detokenizer import StopTextMatcher, StreamDetokenizer
from agent_loop.chat.encoding import MASK_OPEN, ControlledEncoder
from agent_loop.errors import ConfigError
from tests.chat.byte_level import CONTROLS, PATTERNS, TEXTS, like, split_by, trained, untrained
from tests.harness import examples, is_nightly
from tests.helpers import small_tokenizer

SENTENCEPIECE_CONTROLS = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "[INST]",
    "<tool_call>",
    "</tool_call>",
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CHARACTERS = "\u2581abcdefghinostul<>|[]/_"


def metaspace_bpe() -> Tokenizer:
    """Return a tokenizer like Llama 2's: byte fallback, control tokens in the vocabulary, a space before the text."""
    pieces = ["<unk>", *SENTENCEPIECE_CONTROLS, *BYTES, *CHARACTERS]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    model = models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True, ignore_merges=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SENTENCEPIECE_CONTROLS])
    return tokenizer


def unigram() -> Tokenizer:
    """Return a tokenizer whose control tokens have the best scores, as in sentencepiece models."""
    pieces = [(text, 0.0) for text in ("<unk>", *SENTENCEPIECE_CONTROLS)]
    pieces += [*((byte, -9.0) for byte in BYTES), *((character, -5.0) for character in CHARACTERS)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SENTENCEPIECE_CONTROLS])
    return tokenizer


def lower_case() -> Tokenizer:
    """Return a tokenizer that searches for control tokens in the normalised text."""
    tokenizer: Any = Tokenizer.from_str(like("gpt2").to_str())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_tokens([AddedToken("<answer>", normalized=True)])
    return tokenizer


@cache
def encoder_of(kind: str) -> ControlledEncoder:
    return ControlledEncoder(KINDS_OF_TOKENIZERS[kind]())


KINDS_OF_TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": lambda: like("gpt2"),
    "byte-level, whole words first": lambda: like("llama3"),
    "metaspace": metaspace_bpe,
    "unigram": unigram,
    "lower case": lower_case,
}
KINDS = list(KINDS_OF_TOKENIZERS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("around", ["{}", "a {} b", "a{}b", "{0}{0}", "<{}>"])
def test_control_tokens_in_untrusted_text_are_encoded_as_plain_text(kind: str, around: str) -> None:
    encoder = encoder_of(kind)
    own = [encoder.encode("<|im_start|>")[0], encoder.encode("<|im_end|>")[0]]
    for text in [*encoder.control_texts, *map(str.upper, encoder.control_texts)]:
        untrusted = around.format(text)
        assert encoder.control_ids.isdisjoint(
            encoder.encode_plain(encoder.unmask(encoder.mask(untrusted)))
        ), text
        ids = encoder.encode(f"<|im_start|>{encoder.mask(untrusted)}<|im_end|>")
        assert [i for i in ids if i in encoder.control_ids] == own, text


@pytest.mark.parametrize("kind", KINDS[:4])
def test_untrusted_text_with_control_tokens_decodes_to_itself(kind: str) -> None:
    encoder = encoder_of(kind)
    untrusted = "said" + "".join(encoder.control_texts) + "and" + MASK_OPEN + ".3c;"
    decoded = encoder.decode(encoder.encode(f"<s>{encoder.mask(untrusted)}</s>"))
    assert decoded.replace("<s> said", "<s>said") == f"<s>{untrusted}</s>"


@pytest.mark.parametrize("kind", KINDS[:4])
def test_masks_do_not_change_tokens_outside_the_masked_text(kind: str) -> None:
    encoder = encoder_of(kind)
    before, after = "<s>hello the fox<|im_start|>", "<|im_end|>is tool"
    ids = encoder.encode(f"{before}{encoder.mask('a</s>')}{after}")
    own_before = encoder.encode(before)
    assert ids[: len(own_before)] == own_before
    assert encoder.encode(f"{before}x{after}")[-3:] == ids[-3:]


@given(st.lists(st.sampled_from([*"<>|/s[]INTim_endstart ", MASK_OPEN, ".", ":", "3c;", "\n"])).map("".join))
def test_unmasking_restores_the_text_without_control_tokens(text: str) -> None:
    encoder = encoder_of("byte-level")
    masked = encoder.mask(text)
    assert encoder.unmask(masked) == text
    assert encoder.control_ids.isdisjoint(encoder.encode(masked))
    assert encoder.decode(encoder.encode(masked)) == text


FAMILIES = list(PATTERNS)
PIECES = [*CONTROLS, *TEXTS, "<|im_", "<", "'s", "'LL", "'\u017f", "  ", "\n\n", "\r\n", "\u0301"]
PIECES += ["é", "12", "a"]
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
def test_other_tokenizers_are_encoded_by_tokenizers_and_refused_with_the_reason(reason: str) -> None:
    tokenizer = OTHERS[reason]()
    with pytest.raises(OtherTokenizer, match=reason):
        TiktokenEncoder(tokenizer)
    with pytest.raises(ConfigError, match=f"model.encoder is tiktoken.*{reason}"):
        ControlledEncoder(tokenizer, choice="tiktoken")
    if reason != "dropout":
        assert ControlledEncoder(tokenizer).encode("A hello <a> covid19") == ids_of(
            tokenizer, "A hello <a> covid19"
        )


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


BYTE_TOKENS = small_tokenizer().backend_tokenizer


def decode(token_ids: Sequence[int]) -> str:
    return BYTE_TOKENS.decode(token_ids, skip_special_tokens=False)


def in_parts(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    parts, start = [], 0
    for size in [*sizes, len(ids)]:
        parts.append(list(ids[start : start + size]))
        start += size
    return [part for part in parts if part]


def streamed(ids: Sequence[int], sizes: Sequence[int]) -> list[str]:
    stream = StreamDetokenizer(decode)
    return [*(stream.feed(part) for part in in_parts(ids, sizes)), stream.finish()]


@given(st.text(max_size=60), st.lists(st.integers(1, 5), max_size=60))
def test_only_whole_characters_are_returned(text: str, sizes: list[int]) -> None:
    ids = BYTE_TOKENS.encode(text, add_special_tokens=False).ids
    parts = streamed(ids, sizes)
    assert "".join(parts) == decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


@given(st.lists(st.integers(9, len(small_tokenizer()) - 1), max_size=200), st.lists(st.integers(1, 9)))
def test_streamed_text_equals_the_tokenizers_text(ids: list[int], sizes: list[int]) -> None:
    assert "".join(streamed(ids, sizes)) == decode(ids)


def test_a_long_completion_costs_as_much_per_token_as_a_short_one() -> None:
    def seconds(ids: Sequence[int]) -> float:
        started = time.process_time()
        streamed(ids, [1] * len(ids))
        return time.process_time() - started

    for unit in ([42], [241]):  # a letter, and a byte that never becomes a character
        short, long = min(seconds(unit * 500) for _ in range(3)), min(seconds(unit * 5000) for _ in range(2))
        assert long < 40 * short


def test_the_first_word_alone_loses_the_space_that_sentencepiece_puts_before_it() -> None:
    vocab = {"▁Hello": 0, "▁there": 1, "!": 2, "<unk>": 3}
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in vocab], unk_id=3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    stream = StreamDetokenizer(tokenizer.decode)
    assert [stream.feed([token]) for token in (0, 1, 1, 2)] == ["Hello", " there", " there", "!"]


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_a_text_ends_where_the_first_stop_text_begins(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    stream = StopTextMatcher(stops)
    given = ""
    for char in text:
        given += stream.feed(char)
        if stream.is_hit:
            break
    given += stream.finish()
    completed = [text[:end] for end in range(1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    if not stops or not completed:
        assert given == text
        assert not stream.is_hit
    else:
        assert stream.is_hit
        longest = max(len(stop) for stop in stops if completed[0].endswith(stop))
        assert given == completed[0][: len(completed[0]) - longest]


def test_a_possible_start_of_a_stop_text_is_held_back() -> None:
    stream = StopTextMatcher(["END"])
    assert [stream.feed(text) for text in ("one E", "N", "T E", "ND two")] == ["one ", "", "ENT ", ""]
    assert stream.is_hit
    assert stream.feed("more") == stream.finish() == ""
