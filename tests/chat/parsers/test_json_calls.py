"""The fast reader of JSON calls returns the same results as a simple reference."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from agent_loop.chat.parsers.completion_walker import find_first, skip_space
from agent_loop.chat.parsers.json_calls import JsonBody, read_body, read_call, scan_json

CLOSINGS, STOPS = ("```]", "]]"), ("<<", "[[")
PIECES = (
    '"',
    "\\",
    "\\ud800",
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "'",
    " ",
    "\n",
    "\u00a0",
    "1e999",
    "NaN",
    "nul",
    "a",
)

texts = st.lists(st.sampled_from([*PIECES, *CLOSINGS, *STOPS]), max_size=6).map("".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
calls = st.fixed_dictionaries({"name": texts, "arguments": values})


def reference_read(text: str) -> JsonBody:
    """Match the brackets first, then check for a closing tag."""
    scanned = scan_json(text, 0)
    after = skip_space(text, scanned.end)
    for closing in CLOSINGS:
        if scanned.is_closed and text.startswith(closing, after):
            return JsonBody(scanned.text, after + len(closing), is_closed=True)
    end, marker = find_first(text, 0, CLOSINGS + STOPS)
    is_closed = marker in CLOSINGS
    return JsonBody(text[:end], end + len(marker) * is_closed, is_closed)


def extent(body: JsonBody) -> tuple[str, int, bool]:
    return body.text.strip(), body.end, body.is_closed


def agree_on(text: str) -> bool:
    quick, careful = read_body(text, 0, closings=CLOSINGS, stops=STOPS), reference_read(text)
    return extent(quick) == extent(careful) and read_call(quick) == read_call(careful)


@given(value=calls | values, space=st.sampled_from(["", " ", "\n", "\u00a0", "\x0b"]), behind=texts)
@example(value={"name": "f", "arguments": {"text": "```]"}}, space="", behind="")
def test_the_fast_and_the_reference_reader_agree_on_valid_bodies(value: Any, space: str, behind: str) -> None:
    for written in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        for closing in (*CLOSINGS, *STOPS, ""):
            assert agree_on(f"{space}{written}{space}{closing}{behind}")


@given(value=calls | values, cut=st.integers(0, 40), piece=texts, behind=texts)
@example(value={"name": "f", "arguments": {"a": {"a": 1}}}, cut=0, piece="[" * 101 + "]" * 101, behind="")
def test_the_fast_and_the_reference_reader_agree_on_broken_bodies(
    value: Any, cut: int, piece: str, behind: str
) -> None:
    written = json.dumps(value, ensure_ascii=False)
    for broken in (written[:cut] + piece + written[cut:], written[:cut] + piece, piece):
        assert agree_on(f"{broken}```]{behind}")
        assert agree_on(f"{broken}]]{behind}```]")
