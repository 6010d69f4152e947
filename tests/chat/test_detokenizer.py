from __future__ import annotations

import time
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from agent_loop.chat.detokenizer import StopTextMatcher, StreamDetokenizer
from tests.helpers import small_tokenizer

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
