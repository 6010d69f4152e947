"""Texts that are cut at the start of a line have the tokens of the whole text."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from agent_loop.chat.byte_level import CHARS
from agent_loop.chat.cached_render import CachedRender
from agent_loop.chat.encoding import ControlledEncoder
from agent_loop.chat.line_cuts import first_line_start, last_line_start
from tests.chat.byte_level import CONTROLS, PATTERNS, like, untrained
from tests.harness import examples

PIECES = [
    "\n",
    "\n\n",
    "\r\n",
    " ",
    "  ",
    "\t",
    "/",
    "//",
    ".",
    ".\n",
    "...",
    "'s",
    "'",
    "{",
    "@",
    "<",
    "A",
    "a",
    "12",
]
texts = st.lists(
    st.sampled_from([*PIECES, *CONTROLS, "é", "e\u0301", "\u0301", "\u0338", "你", "\u2028", "\u00a0"])
    | st.text(max_size=3),
    max_size=8,
).map("".join)
lines = st.tuples(texts, texts).map("\n".join)


@cache
def joining(family: str) -> Any:
    """Return a tokenizer of a family that joins a newline with any character of ASCII beside it, unless the pattern
    splits the two. Every missing split shows in the ids."""
    newline = "\u010a"  # as byte-level vocabularies write it
    beside = [char for char in sorted(CHARS) if char.isascii() or char == "\u0120"]
    merges = [*((newline, char) for char in beside), *((char, newline) for char in beside)]
    tokens = [*sorted(CHARS), *(left + right for left, right in merges)]
    tokenizer: Any = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    parts = like(family)
    tokenizer.pre_tokenizer, tokenizer.decoder = parts.pre_tokenizer, parts.decoder
    if parts.normalizer is not None:
        tokenizer.normalizer = parts.normalizer
    tokenizer.add_special_tokens(CONTROLS)
    return tokenizer


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("family", PATTERNS)
def test_the_patterns_of_all_families_cut_lines(family: str) -> None:
    assert ControlledEncoder(like(family)).cuts_lines
    assert ControlledEncoder(joining(family)).cuts_lines
    assert not ControlledEncoder(like(family), choice="tokenizers").cuts_lines


def test_a_tokenizer_with_a_newline_in_a_control_token_is_not_cut() -> None:
    tokenizer = like("qwen2").from_str(like("qwen2").to_str())
    assert ControlledEncoder(tokenizer).cuts_lines
    tokenizer.add_special_tokens(["<end>\n<"])
    assert not ControlledEncoder(tokenizer).cuts_lines


def test_a_tokenizer_with_an_unknown_pattern_is_not_cut() -> None:
    tokenizer = untrained()
    tokenizer.pre_tokenizer.use_regex = False
    tokenizer.add_special_tokens(CONTROLS)
    assert not ControlledEncoder(tokenizer).cuts_lines


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("tokenizer_of", [like, joining])
@pytest.mark.parametrize("family", PATTERNS)
@examples(200)
@given(before=texts, after=texts)
def test_the_tokens_on_the_sides_of_a_cut_are_those_of_the_whole_text(
    tokenizer_of: Callable[[str], Any], family: str, before: str, after: str
) -> None:
    encoder = ControlledEncoder(tokenizer_of(family))
    whole = f"{encoder.mask(before)}\n{encoder.mask(after)}"
    expected = ControlledEncoder(tokenizer_of(family), choice="tokenizers").encode(whole)
    for cut in {first_line_start(whole), last_line_start(whole)} - {None}:
        assert cut is not None
        left = encoder.encode_cut(whole[:cut], next_character=whole[cut])
        right = encoder.encode_cut(whole[cut:], next_character="")
        assert left is None or right is None or left + right == expected


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("tokenizer_of", [like, joining])
@pytest.mark.parametrize("family", PATTERNS)
@examples(100)
@given(first=lines, second=lines, around=st.lists(lines, min_size=3, max_size=3), has_anchors=st.booleans())
def test_cached_renders_that_are_cut_have_the_tokens_of_the_whole_text(
    tokenizer_of: Callable[[str], Any],
    family: str,
    first: str,
    second: str,
    around: list[str],
    has_anchors: bool,
) -> None:
    tokenizer = tokenizer_of(family)
    encoder, reference = ControlledEncoder(tokenizer), ControlledEncoder(tokenizer, choice="tokenizers")
    parts = [encoder.mask(part) for part in around]
    if has_anchors:
        parts[0], parts[2] = f"<|im_start|>{parts[0]}", f"{parts[2]}<|im_end|>"
    first, second = encoder.mask(first), encoder.mask(second)
    expected = reference.encode(f"{parts[0]}{first}{parts[1]}{second}{parts[2]}")
    render = CachedRender(parts, encoder=encoder)
    assert render.ids([first, second]).tolist() == expected
    assert render.with_first(first).ids([second]).tolist() == expected


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("tokenizer_of", [like, joining])
@pytest.mark.parametrize("family", PATTERNS)
def test_no_character_at_the_start_of_a_line_joins_the_line_before_it(
    tokenizer_of: Callable[[str], Any], family: str
) -> None:
    encoder = ControlledEncoder(tokenizer_of(family))
    reference = ControlledEncoder(tokenizer_of(family), choice="tokenizers")
    for before, char in product(
        ["", "a", ".", " ", "\n", "\r", " \n", ".\n", "/\n", "'"], map(chr, range(33, 127))
    ):
        cut = first_line_start(f"\n{char}")
        assert (cut is None) == (char in "/@")
        if cut is not None:
            left = encoder.encode_cut(f"{before}\n", next_character=char)
            right = encoder.encode_cut(f"{char}s.\n/ x", next_character="")
            assert left is not None
            assert right is not None
            assert left + right == reference.encode(f"{before}\n{char}s.\n/ x")


def test_cuts_are_visible_characters_of_ascii_behind_a_newline() -> None:
    assert (first_line_start("a\n\n/b\n@c\n é\n{d\ne"), last_line_start("a\nb\n{c\n/\n@\n")) == (12, 4)
    assert (first_line_start("a b"), last_line_start("\n")) == (None, None)
