"""Tests of the parsers of all formats, and of the texts that open a forced call."""

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


def every_format_but(*names: str) -> pytest.MarkDecorator:
    formats = [written for written in FORMATS if written.name not in names]
    return pytest.mark.parametrize("written", formats, ids=lambda written: written.name)


every_format = every_format_but()

ADD = ToolCall("add", {"a": 1, "b": -2.5})
SAY = ToolCall("say.it_2", {"text": 'Line 1\n"Line" \\2 {x} 你好 🎉', "loud": True, "to": None})
NEST = ToolCall("nest-3", {"list": [1, [2, "three"], {}], "map": {"k": {"l": [None, False]}}, "none": []})
NOTHING = ToolCall("nothing", {})


PIECES = [
    *('"', "\\", "'", " ", "\n", "x", "1", ",", ";", "k:", "a=", "[", "]", "{", "}", "{}", "[a(", ")", "to="),
    *(
        '{"name":"a","arguments":{}}',
        '[{"name":"a","arguments":{}}]',
        "[a(b='c')]",
        "{'name':",
        '"parameters":',
    ),
]
"""Parts of calls in any format."""


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
    assert parsed == ParsedCompletion("", tuple(calls))
    assert [dumps(call.arguments) for call in parsed.tool_calls] == [dumps(call.arguments) for call in calls]


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
def test_a_completion_without_calls_is_its_text_or_its_reasoning(written: Format) -> None:
    assert parse(written, "It is 7.") == ParsedCompletion("It is 7.")
    assert parse(written, "") == ParsedCompletion("")
    assert parse(written, f"{written.reasoning[0]}I think") == ParsedCompletion("", (), "I think")


@every_format
def test_a_call_inside_reasoning_is_not_a_call(written: Format) -> None:
    opening, closing = written.reasoning
    [call] = with_ids([ADD], written)
    inner = written.render([call]).removesuffix("<|call|>")
    inner = inner.replace("<|channel|>", "").replace("<|message|>", "")
    parsed = parse(written, f"{opening}Or {inner}?{closing}{written.render([call])}")
    assert parsed.calls == (call,)
    assert parsed.reasoning == f"Or {inner}?"
    assert parsed.content == ""


@every_format_but("gpt-oss")
def test_reasoning_that_the_generation_prompt_opened_ends_at_its_closing_tag(written: Format) -> None:
    _, closing = written.reasoning
    [call] = with_ids([ADD], written)
    parsed = parse(written, f"Perhaps {written.render([call])}\n{closing}\nYes. {written.render([call])}")
    assert parsed.calls == (call,)
    assert parsed.reasoning == f"Perhaps {written.render([call])}"
    assert parsed.content == "Yes."


@every_format
def test_a_truncated_call_is_malformed(written: Format) -> None:
    parsed = parse(written, written.cut)
    [call] = parsed.calls
    assert isinstance(call, MalformedCall)
    assert parsed.content == ""
    if start := ToolParser.get(written.name).call_start:
        [call] = parse(written, f"Let me see. {start}").calls
        assert isinstance(call, MalformedCall)


@every_format_but("llama3_json", "granite")  # they have no marks between calls
def test_a_call_after_a_malformed_call_is_parsed(written: Format) -> None:
    [call] = with_ids([ADD], written)
    opening = "<|end|><|start|>assistant" if written.name == "gpt-oss" else "\n"
    first, second = parse(written, f"{written.cut}{opening}{written.render([call])}").calls
    assert isinstance(first, MalformedCall)
    assert second == call


@every_format
@given(data=st.data())
def test_parsers_raise_for_no_text(written: Format, data: st.DataObject) -> None:
    pieces = data.draw(st.lists(st.sampled_from([*written.markers, *PIECES]) | st.text()))
    assert isinstance(parse(written, "".join(pieces)), ParsedCompletion)


@pytest.mark.nightly(keep=6)
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
    registered = ToolParser.registered().items()
    ours = {name for name, parser in registered if parser.__module__.startswith("agent_loop.")}
    assert {written.name for written in FORMATS} == ours


@pytest.mark.parametrize(
    ("chat_template", "named"),
    [("{{ messages }}", "deepseek_v3, deepseek_v4, gemma"), ("<tool_call> [TOOL_CALLS]", "hermes, mistral")],
)
def test_a_template_of_no_or_several_formats_is_refused_with_their_names(
    chat_template: str, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        detect_parser(chat_template)


# Sources of templates that show a dialect.
MISTRAL_2025 = "[TOOL_CALLS]name[ARGS]"
MISTRAL_WITH_IDS = "[TOOL_CALLS]name[CALL_ID]id[ARGS]"
SOURCES = {"gemma": "<|tool_call>", "deepseek_v3": "```json", "pythonic": "<|tool_call_start|>"}
SEVERAL_PER_BLOCK = (
    *("llama3_json", "mistral", "granite", "pythonic"),
    *("kimi_k2", "kimi_k3", "deepseek_v3", "deepseek_v4", "minimax_m2"),
)


def call_of(written: Format) -> ToolCall:
    return ToolCall("add", {"a": "x y", "b": [1, 2]}, "functions.add:0" if written.has_ids else "")


def opening(name: str, tool: str | None, *, source: str | None = None) -> str | None:
    source = SOURCES.get(name, "") if source is None else source
    return ToolParser.get(name).forced_call(tool, chat_template=source)


@every_format
@pytest.mark.parametrize("tool", [None, "add"])
def test_the_opening_of_a_call_is_what_the_format_writes(written: Format, tool: str | None) -> None:
    begun = opening(written.name, tool)
    assert begun is not None
    assert written.render([call_of(written)]).lstrip().startswith(begun)
    assert (tool is None) == ("add" not in begun)


@pytest.mark.parametrize(
    ("name", "source", "rest"),
    [
        ("mistral", MISTRAL_2025, '{"a": 1}'),
        ("deepseek_v3", "", '{"a": 1}<｜tool▁call▁end｜>'),  # noqa: RUF001 (the format's own letters)
        ("gemma", "<start_function_call>", "a:1}<end_function_call>"),
    ],
)
def test_the_template_shows_the_dialect_of_a_named_call(name: str, source: str, rest: str) -> None:
    begun = opening(name, "add", source=source)
    assert begun is not None
    [call] = ToolParser.get(name).parse(begun + rest).calls
    assert call == ToolCall("add", {"a": 1})


def test_a_format_without_a_fixed_opening_cannot_be_forced() -> None:
    assert opening("mistral", "add", source=MISTRAL_WITH_IDS) is None
    assert ToolParser.forced_call(ToolParser.get("hermes"), None, chat_template="") is None


@every_format
def test_the_first_call_is_whole_where_its_end_is_written(written: Format) -> None:
    parser = ToolParser.get(written.name)
    if not parser.first_call_ends:
        assert written.name in SEVERAL_PER_BLOCK
        return
    calls = [call_of(written), ToolCall("other", {})]
    text = written.render(calls)
    end = min(text.index(mark) + len(mark) for mark in parser.first_call_ends if mark in text)
    assert parser.parse(text[:end]).tool_calls == calls[:1]
    assert parser.parse(text[: end - 1]).tool_calls == [] or written.name == "gpt-oss"
