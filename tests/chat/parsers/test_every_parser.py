"""Tests of the parsers of all formats."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from agent_loop.chat.parsers import ToolParser, detect_parser
from agent_loop.chat.parsers.sections import DEEPSEEK, SEPARATOR
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


F = {
    "name": "f",
    "parameters": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "n": {"type": "integer"},
            "list": {"type": "array", "items": {"$ref": "#/$defs/Number"}},
        },
        "$defs": {"Number": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
    },
}
SAMPLE = "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n</function>\n</tool_call>"


def in_qwen(parameters: str) -> str:
    return f"<tool_call>\n<function=f>\n{parameters}\n</function>\n</tool_call>"


def in_glm(arguments: str) -> str:
    return f"<tool_call>f\n{arguments}</tool_call>"


def in_kimi(call_id: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def in_gpt_oss(header: str, arguments: str) -> str:
    return f"<|channel|>{header}<|message|>{arguments}"


NONE: list[dict[str, Any]] = [{}]
"""The arguments of one call without any."""
MALFORMED = None
REAL_COMPLETIONS: list[tuple[str, str, list[dict[str, Any]] | None]] = [
    ("qwen3_coder", in_qwen("<parameter=text>\n</tool_call>\n</parameter>"), [{"text": "</tool_call>"}]),
    ("qwen3_coder", in_qwen("<parameter=text>\n</parameter> x\n</parameter>"), [{"text": "</parameter> x"}]),
    ("qwen3_coder", in_qwen(f"<parameter=text>\n{SAMPLE}\n</parameter>"), [{"text": SAMPLE}]),
    ("qwen3_coder", in_qwen("<parameter=text>\na\n<parameter=n>\n2\n</parameter>"), [{"text": "a", "n": 2}]),
    ("qwen3_coder", SAMPLE.replace("\n</parameter>", "") + SAMPLE, [{"text": "a"}] * 2),
    (
        "qwen3_coder",
        in_qwen("<parameter=text>\na <parameter=b>\n</parameter>"),
        [{"text": "a <parameter=b>"}],
    ),
    ("qwen3_coder", in_qwen(f"<parameter=text>\n{SAMPLE}{SAMPLE}\n</parameter>"), [{"text": SAMPLE * 2}]),
    ("qwen3_coder", in_qwen("<parameter=text>\n\na\n\n</parameter>"), [{"text": "\na\n"}]),
    ("qwen3_coder", in_qwen("null"), NONE),
    ("glm", in_glm("<arg_key>text</arg_key><arg_value>\na\n</arg_value>"), [{"text": "\na\n"}]),
    (
        "glm",
        in_glm("<arg_key>text</arg_key><arg_value>a</tool_call></arg_value>"),
        [{"text": "a</tool_call>"}],
    ),
    ("glm", '<tool_call>{"name": "f", "arguments": {"n": 2}}</tool_call>', [{"n": 2}]),
    ("glm", '<tool_call>{"name": "f", "arguments": {"n": 2}', MALFORMED),
    ("glm", in_glm("{}"), NONE),
    ("gpt-oss", in_gpt_oss("final <|constrain|>functions.f", '{"n": 2}<|return|>'), [{"n": 2}]),
    ("gpt-oss", in_gpt_oss("final <|constrain|>functions.f", "Done."), MALFORMED),
    ("gpt-oss", in_gpt_oss("analysis to=functions.f", '{"n": 2}<|call|>'), [{"n": 2}]),
    ("gpt-oss", "<|channel|>commentary 2?", MALFORMED),
    ("gpt-oss", in_gpt_oss("commentary to=functions.f", "<|call|>"), NONE),
    ("gpt-oss", in_gpt_oss("commentary to=functions.f", ""), MALFORMED),
    ("kimi_k2", in_kimi("call_abc123", '{"name": "f", "arguments": {"n": 2}}'), [{"n": 2}]),
    (
        "kimi_k2",
        f"<|tool_call_section_begin|>{in_kimi('functions.f:0', '')}<|tool_call_section_end|>",
        NONE,
    ),
    ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_end|>", NONE),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"n\\": 2}"}</tool_call>', [{"n": 2}]),
    ("hermes", '<tool_call>{"name": "f", "parameters": {"text": "a\nb"}}</tool_call>', [{"text": "a\nb"}]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 3.0}}</tool_call>', [{"n": 3}]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"list": [3.0, 2.5]}}</tool_call>',
        [{"list": [3, 2.5]}],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', NONE),
    ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', NONE),
    ("llama3_json", '{"type": "function", "function": {"name": "f", "parameters": {"n": 2}}}', [{"n": 2}]),
    ("llama3_json", '{"name": "f", "parameters": null}', NONE),
    ("llama3_json", '{"name": "f"}', NONE),
    ("mistral", '[TOOL_CALLS]f{"n": 2}', [{"n": 2}]),
    ("mistral", "[TOOL_CALLS]f[ARGS]null", NONE),
    ("mistral", "[TOOL_CALLS]f[ARGS]", MALFORMED),
    ("deepseek_v3", f"{DEEPSEEK.call_open}f{SEPARATOR}{DEEPSEEK.call_close}", NONE),
    ("deepseek_v3", f"{DEEPSEEK.call_open}function{SEPARATOR}f{DEEPSEEK.call_close}", NONE),
    ("deepseek_v3", f"{DEEPSEEK.call_open}function{SEPARATOR}f\n```json\n\n```{DEEPSEEK.call_close}", NONE),
    ("gemma", "<|tool_call>call:f<tool_call|>", NONE),
    ("pythonic", "[f(text='\\d it\\'s\n', n=\"3\")]", [{"text": "\\d it's\n", "n": 3}]),
    ("pythonic", "<|tool_call_start|>[f(3)]<|tool_call_end|>", MALFORMED),
    ("kimi_k3", '<|open|>call tool="f" index="1"<|sep|><|open|>json type="object"<|sep|>{"n": 2}', MALFORMED),
    (
        "kimi_k3",
        '<|open|>response<|sep|><|close|>response<|sep|><|open|>call tool="f"<|sep|><|open|>json type="object"<|sep|>'
        '{"n": 2}<|close|>json<|sep|><|close|>call<|sep|><|close|>message<|sep|>',
        [{"n": 2}],
    ),
    ("granite", '<tool_call>[{"name": "f", "arguments": {"n": 2}}]', [{"n": 2}]),
]
"""Format, completion, and the arguments of each call of `f`."""


@pytest.mark.parametrize(("name", "text", "expected"), REAL_COMPLETIONS)
def test_calls_as_models_really_write_them_are_read_or_malformed(
    name: str, text: str, expected: list[dict[str, Any]] | None
) -> None:
    parsed = ToolParser.get(name).read(text, tools=[{"type": "function", "function": F}])
    assert parsed.content == ""
    if expected is MALFORMED:
        assert parsed.malformed_calls
        assert not parsed.tool_calls
        return
    assert [(call.name, dumps(call.arguments)) for call in parsed.tool_calls] == [
        ("f", dumps(arguments)) for arguments in expected
    ]
    assert not parsed.malformed_calls


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


@pytest.mark.parametrize(
    "written",
    [
        written for written in FORMATS if written.name not in ("llama3_json", "granite")
    ],  # without marks between calls
    ids=lambda written: written.name,
)
def test_a_call_after_a_malformed_call_is_parsed(written: Format) -> None:
    [call] = with_ids([ADD], written)
    opening = "<|end|><|start|>assistant" if written.name == "gpt-oss" else "\n"
    first, second = parse(written, f"{written.cut}{opening}{written.render([call])}").calls
    assert isinstance(first, MalformedCall)
    assert second == call


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
    with pytest.raises(ConfigError, match=r"no known format.*deepseek_v3, deepseek_v4, gemma"):
        detect_parser("{{ messages }}")


def test_a_template_of_several_formats_is_refused_with_their_names() -> None:
    with pytest.raises(ConfigError, match="fits hermes, mistral"):
        detect_parser("<tool_call> [TOOL_CALLS]")
