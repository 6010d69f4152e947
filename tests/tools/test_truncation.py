import re
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from agent_loop.tools.results import MARKERS, TruncateSide, truncate_tokens

SIDES: list[TruncateSide] = ["left", "right", "middle"]


@cache
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(["one two three (truncated)... hello world\n\n"] * 50, trainer)
    return made


def encode(text: str) -> list[int]:
    return tokenizer().encode(text).ids


def decode(ids: list[int]) -> str:
    return tokenizer().decode(ids, skip_special_tokens=False)


def truncate(text: str, *, max_tokens: int, side: TruncateSide) -> tuple[str, bool]:
    return truncate_tokens(text, max_tokens=max_tokens, side=side, encode=encode, decode=decode)


pieces = st.sampled_from(["one", " two", "(trunc", "...", "\n", "\n\n", " ", "é", "🙂", "世"])
words = st.lists(pieces).map("".join)


@given(text=st.text() | words, max_tokens=st.integers(0, 60), side=st.sampled_from(SIDES))
def test_the_result_holds_the_ends_of_the_text_and_never_exceeds_the_limit(
    text: str, max_tokens: int, side: TruncateSide
) -> None:
    shortened, was_truncated = truncate(text, max_tokens=max_tokens, side=side)
    assert len(encode(shortened)) <= max_tokens
    assert was_truncated == (len(encode(text)) > max_tokens)
    if not was_truncated:
        assert shortened == text
    elif max_tokens >= 12:
        parts = shortened.split(MARKERS[side])
        joined = (
            (MARKERS[side].join(parts[:at]), MARKERS[side].join(parts[at:])) for at in range(1, len(parts))
        )
        assert any(text.startswith(head) and text.endswith(tail) for head, tail in joined)


@pytest.mark.parametrize(
    ("side", "start", "end"),
    [
        ("left", "one two", "...(truncated)"),
        ("right", "(truncated)...", "two three"),
        ("middle", "one two", "two three"),
    ],
)
def test_the_side_selects_the_part_that_is_kept(side: TruncateSide, start: str, end: str) -> None:
    shortened, _ = truncate("one two three" + " hello" * 100 + " one two three", max_tokens=20, side=side)
    assert shortened.startswith(start)
    assert shortened.endswith(end)
    assert MARKERS[side] in shortened


def test_a_cut_inside_a_character_drops_that_character() -> None:
    for max_tokens in range(5, 30):
        for side in SIDES:
            assert "\N{REPLACEMENT CHARACTER}" not in truncate("🙂" * 50, max_tokens=max_tokens, side=side)[0]


def test_a_cut_that_adds_a_token_at_the_marker_keeps_one_token_less() -> None:
    def encode_characters(text: str) -> list[int]:
        return [ord(character) for character in re.sub(r"(?<=a)(?=\.)", "|", text)]

    def decode_characters(ids: list[int]) -> str:
        return "".join(map(chr, ids))

    shortened, _ = truncate_tokens(
        "a" * 100, max_tokens=20, side="left", encode=encode_characters, decode=decode_characters
    )
    assert shortened == "aaaaa...(truncated)"


def test_only_the_ends_of_a_very_long_text_are_encoded() -> None:
    lengths: list[int] = []

    def encode_and_measure(text: str) -> list[int]:
        lengths.append(len(text))
        return encode(text)

    text = "hello world " * 100_000
    shortened, was_truncated = truncate_tokens(
        text, max_tokens=20, side="middle", encode=encode_and_measure, decode=decode
    )
    assert was_truncated
    assert shortened.startswith("hello world")
    assert max(lengths) < 1000
