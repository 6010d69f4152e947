"""Tests of the parsers of all formats."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from agent_loop.chat.parsers import ToolParser, detect_parser
from agent_loop.errors import ConfigError
from agent_loop.types import MalformedCall, ParsedCompletion, ToolCall
from tests.chat.parsers.formats import FORMATS, Format, dumps
from tests.harness import examples

every_format = pytest.mark.parametrize("written", FORMATS, ids=lambda written: written.name)

ADD = ToolCall("add", {"a": 1, "b": -2.5})
SAY = ToolCall("say.it_2", {"text": 'Line 1\n"Line" \\2 {x} 你好 🎉', "loud": True, "to": None})
NEST = ToolCall("nest-3", {"list": [1, [2, "three"], {}], "map": {"k": {"l": [None, False]}}, "none": []})
NOTHING = ToolCall("nothing", {})


def parse(written: Format, text: str) -> ParsedCompletion:
    return ToolParser.get(written.name).parse(text)


def with_ids(calls: list[ToolCall], written: Format) -> list[ToolCall]:
    if not written.has_ids:
        return calls
    return [
        ToolCall(call.name, call.arguments, f"functions.{call.name}:{index}")
        for index, call in enumerate(calls)
    ]


@every_format
def test_rendered_calls_are_parsed_back(written: Format) -> None:
    calls = with_ids([ADD, SAY, NEST, NOTHING], written)
    parsed = parse(written, written.render(calls))
    assert list(parsed.calls) == calls
    assert parsed.content == ""
    assert parsed.reasoning is None


@every_format
def test_types_are_kept(written: Format) -> None:
    [call] = parse(written, written.render(with_ids([ADD], written))).tool_calls
    assert [type(value) for value in call.arguments.values()] == [int, float]


@every_format
@pytest.mark.parametrize("name", ["a\nb", "a\r\u2028\x1b[2Jb", "long" * 5000])
def test_the_error_of_a_malformed_call_is_one_short_line(written: Format, name: str) -> None:
    """The error is sent to the model, and the model chose the name of the tool."""
    text = written.render([ToolCall(name, {name: name, "b": 1})])
    malformed = [
        call for end in range(len(text) - 60, len(text)) for call in parse(written, text[:end]).calls
    ]
    doubled = text.replace('"b"', dumps(name)).replace("b:", f"{name}:").replace(">b<", f">{name}<")
    malformed += parse(written, doubled.replace("=b>", f"={name}>")).calls
    malformed += parse(written, text.replace('{"', "{'")).calls
    for call in malformed:
        if isinstance(call, MalformedCall):
            assert call.error.isprintable()
            assert len(call.error) <= 400


@every_format
def test_a_completion_without_calls_is_its_text(written: Format) -> None:
    assert parse(written, "It is 7.") == ParsedCompletion("It is 7.")
    assert parse(written, "") == ParsedCompletion("")


@every_format
def test_a_call_inside_reasoning_is_not_a_call(written: Format) -> None:
    opening, closing = written.reasoning
    [call] = with_ids([ADD], written)
    inner = (
        written.render([call]).removesuffix("<|call|>").replace("<|channel|>", "").replace("<|message|>", "")
    )
    parsed = parse(written, f"{opening}Or {inner}?{closing}{written.render([call])}")
    assert parsed.calls == (call,)
    assert parsed.reasoning == f"Or {inner}?"
    assert parsed.content == ""


@every_format
def test_truncated_reasoning_has_no_calls(written: Format) -> None:
    opening, _ = written.reasoning
    parsed = parse(written, f"{opening}I think")
    assert parsed == ParsedCompletion("", (), "I think")


@pytest.mark.parametrize(
    "written", [written for written in FORMATS if written.name != "gpt-oss"], ids=lambda written: written.name
)
def test_reasoning_that_the_generation_prompt_opened_ends_at_its_closing_tag(written: Format) -> None:
    _, closing = written.reasoning
    [call] = with_ids([ADD], written)
    parsed = parse(written, f"Perhaps {written.render([call])}\n{closing}\nYes. {written.render([call])}")
    assert parsed.calls == (call,)
    assert parsed.reasoning == f"Perhaps {written.render([call])}"
    assert parsed.content == "Yes."


@every_format
def test_a_truncated_call_is_malformed(written: Format) -> None:
    parsed = parse(written, f"{written.cut}")
    [call] = parsed.calls
    assert isinstance(call, MalformedCall)
    assert parsed.content == ""


@every_format
def test_a_completion_that_stops_at_the_start_of_a_call_has_an_unfinished_call(written: Format) -> None:
    start = ToolParser.get(written.name).call_start
    if start:
        [call] = parse(written, f"Let me see. {start}").calls
        assert isinstance(call, MalformedCall)


@every_format
def test_errors_are_sentences_for_the_model(written: Format) -> None:
    [call] = parse(written, written.cut).malformed_calls
    assert len(call.error.split()) > 3
    assert "\n" not in call.error


@every_format
@given(data=st.data())
def test_parsers_raise_for_no_text(written: Format, data: st.DataObject) -> None:
    pieces = data.draw(
        st.lists(st.sampled_from([*written.markers, '"', "\\", "{", "}", "'", " ", "x"]) | st.text())
    )
    assert isinstance(parse(written, "".join(pieces)), ParsedCompletion)


@every_format
@examples(40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_arguments_are_parsed_back(written: Format, data: st.DataObject) -> None:
    names = st.from_regex(r"\A[a-z_]{1,8}\Z")
    plain = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>|"))
    text = (
        plain.filter(lambda text: not reads_as_json(text))
        if written.writes_bare_text
        else plain | marked(written)
    )
    arguments = data.draw(
        st.lists(st.dictionaries(names, json_values(text, keys=names)), min_size=1, max_size=3)
    )
    calls = with_ids([ToolCall(f"tool_{index}", fields) for index, fields in enumerate(arguments)], written)
    assert list(parse(written, written.render(calls)).calls) == calls


def json_values(text: st.SearchStrategy[str], *, keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    leaves = (
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
    )
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=6,
    )


def marked(written: Format) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from([*written.markers, '"', "\\"]), max_size=4).map("".join)


def reads_as_json(text: str) -> bool:
    """Return whether a bare text is parsed as another type if there is no schema."""
    first = text.strip()[:1]
    return first in '0123456789-[{tfnTFN"' or text.startswith("\n")


@pytest.mark.nightly(keep=9)
@every_format
@pytest.mark.parametrize(
    "filler", ["", '"', "\\", "[", "{", '{"a":', "a ", '{"name": "f", "parameters": ', "'", "\n"]
)
def test_time_is_linear_in_the_text(written: Format, filler: str) -> None:
    for unit in (*written.markers, written.cut):
        short, long = (seconds_for(written, unit + filler, num_chars=num) for num in (25_000, 100_000))
        assert long < 4 * short * 2.5 + 0.1, unit


def seconds_for(written: Format, unit: str, *, num_chars: int) -> float:
    """Return the smaller CPU time of two runs."""
    text = unit * (num_chars // len(unit))
    times: list[float] = []
    for _ in range(2):
        start = time.process_time()
        parse(written, text)
        times.append(time.process_time() - start)
    return min(times)


@pytest.mark.nightly(keep=2)
@every_format
def test_a_megabyte_of_openings_takes_as_long_as_four_quarters(written: Format) -> None:
    quarter, whole = (seconds_for(written, written.cut, num_chars=num) for num in (250_000, 1_000_000))
    assert whole < 4 * quarter * 2.5 + 0.1


@every_format
@pytest.mark.parametrize("bracket", ["[", '{"a":', "{a:"])
def test_deep_nesting_is_malformed_and_not_a_crash(written: Format, bracket: str) -> None:
    closing = {"[": "]"}.get(bracket, "}")
    for depth in (150, 100_000):
        value = "[" + bracket * depth + ("1" if ":" in bracket else "") + closing * depth + "]"
        marked = written.render(with_ids([ToolCall("f", {"a": 12345})], written)).replace("12345", value)
        calls = parse(written, marked).calls
        assert all(is_flat(call) for call in calls)


def is_flat(call: ToolCall | MalformedCall) -> bool:
    return isinstance(call, MalformedCall) or isinstance(call.arguments["a"], str)


def test_all_formats_are_tested() -> None:
    ours = {
        name
        for name, parser in ToolParser.registered().items()
        if parser.__module__.startswith("agent_loop.")
    }
    assert {written.name for written in FORMATS} == ours


def test_a_template_of_an_unknown_format_is_refused_with_the_known_formats() -> None:
    with pytest.raises(ConfigError, match=r"no known format.*deepseek_v3, gemma, glm, gpt-oss, hermes"):
        detect_parser("{{ messages }}")


def test_a_template_of_several_formats_is_refused_with_their_names() -> None:
    with pytest.raises(ConfigError, match="fits hermes, mistral"):
        detect_parser("<tool_call> [TOOL_CALLS]")
