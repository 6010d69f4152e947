"""Completions as models write them in each format: forms of a call, malformed calls, values, and text around calls."""

from __future__ import annotations

from typing import Any

import pytest

from agent_loop.chat.parsers import ToolParser
from agent_loop.chat.parsers.sections import DEEPSEEK, SEPARATOR
from agent_loop.types import MalformedCall, ParsedCompletion, ToolCall
from tests.chat.parsers.formats import FORMATS, dumps

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
TOOLS = [{"type": "function", "function": F}]


def in_hermes(call: str) -> str:
    return f"<tool_call>{call}</tool_call>"


def in_qwen(parameters: str) -> str:
    return f"<tool_call>\n<function=f>\n{parameters}\n</function>\n</tool_call>"


def in_glm(arguments: str) -> str:
    return f"<tool_call>f\n{arguments}</tool_call>"


def in_kimi(call_id: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def in_gpt_oss(header: str, arguments: str) -> str:
    return f"<|channel|>{header}<|message|>{arguments}"


def in_deepseek(call: str) -> str:
    return f"{DEEPSEEK.section_open}{DEEPSEEK.call_open}{call}{DEEPSEEK.call_close}{DEEPSEEK.section_close}"


def in_gemma_4(body: str) -> str:
    return f"<|tool_call>call:f{{{body}}}<tool_call|>"


def in_function_gemma(body: str) -> str:
    quoted = body.replace('<|"|>', "<escape>")
    return f"<start_function_call>call:f{{{quoted}}}<end_function_call>"


SAMPLE = in_qwen("<parameter=text>\na\n</parameter>")
LLAMA_CALL = '{"name": "f", "parameters": {"n": 1}}'
GPT_OSS_CALL = in_gpt_oss("commentary to=functions.f <|constrain|>json", '{"n": 1}<|call|>')
KIMI_CALL = in_kimi("functions.f:0", '{"n": 1}')
HERMES_CALL = in_hermes('{"name": "f", "arguments": {"n": 1}}')
ONE: list[dict[str, Any]] = [{"n": 1}]
NONE: list[dict[str, Any]] = [{}]
"""The arguments of one call without any."""


def forms(name: str, arguments: list[dict[str, Any]], *texts: str) -> list[tuple[str, Any, str]]:
    return [(name, arguments, text) for text in texts]


CALLS = [
    *forms(
        "hermes",
        ONE,
        '<tool_call>{"name": "f", "arguments": "{\\"n\\": 1}"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"n": 1.0}}</tool_call>',
    ),
    *forms(
        "hermes",
        NONE,
        in_hermes('{"name": "f", "arguments": null}'),
        in_hermes('{"name": "f", "arguments": ""}'),
    ),
    *forms("hermes", [{"text": "a\nb"}], in_hermes('{"name": "f", "parameters": {"text": "a\nb"}}')),
    *forms("hermes", [{"list": [3, 2.5]}], in_hermes('{"name": "f", "arguments": {"list": [3.0, 2.5]}}')),
    *forms(
        "hermes",
        [{"text": "</tool_call><tool_call>{</think>"}],
        in_hermes('{"name": "f", "arguments": {"text": "</tool_call><tool_call>{</think>"}}'),
    ),
    *forms(
        "llama3_json",
        ONE,
        f"<|python_tag|>{LLAMA_CALL}<|eom_id|>",
        f"{LLAMA_CALL}<|eot_id|>",
        '{"type": "function", "name": "f", "parameters": {"n": 1}}',
        '{"type": "function", "function": {"name": "f", "parameters": {"n": 1}}}',
        '{"name": "f", "arguments": {"n": 1}}',
        '{"name": "f", "parameters": "{\\"n\\": 1}"}',
        '{\n  "name": "f",\n  "parameters": {\n    "n": 1\n  }\n}',
    ),
    *forms("llama3_json", NONE, '{"name": "f", "parameters": null}', '{"name": "f"}'),
    *forms(
        "llama3_json",
        [{"n": 1}, {"n": 2}],
        *(LLAMA_CALL + separator + LLAMA_CALL.replace("1", "2") for separator in ("; ", "\n", "", ";\n")),
    ),
    *forms(
        "gpt-oss",
        ONE,
        f"<|start|>assistant{GPT_OSS_CALL}",
        f"assistant{GPT_OSS_CALL}",
        GPT_OSS_CALL.removesuffix("<|call|>"),
        ' to=functions.f<|channel|>commentary json<|message|>{"n": 1}<|call|>',
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"n": 1}<|call|>',
        in_gpt_oss("commentary to=functions.f", '{"n": 1}<|call|>'),
        in_gpt_oss("commentary <|constrain|>json to=functions.f", '{"n": 1}<|call|>'),
        in_gpt_oss("commentary to=f", '{"n": 1}<|call|>'),
        in_gpt_oss("final <|constrain|>functions.f", '{"n": 1}<|return|>'),
        in_gpt_oss("analysis to=functions.f", '{"n": 1}<|call|>'),
        f"{GPT_OSS_CALL}<|start|>functions.f to=assistant<|channel|>commentary<|message|><|end|>",
    ),
    *forms("gpt-oss", NONE, in_gpt_oss("commentary to=functions.f", "<|call|>")),
    *forms(
        "qwen3_coder",
        ONE,
        "<tool_call><function=f><parameter=n>1</parameter></function></tool_call>",
        "<tool_call>\n<function=f>\n<parameter=n>\n1</parameter>\n</function>\n</tool_call>",
    ),
    *(
        ("qwen3_coder", [arguments], in_qwen(parameters))
        for parameters, arguments in (
            ("null", {}),
            ("<parameter=text>\n</tool_call>\n</parameter>", {"text": "</tool_call>"}),
            ("<parameter=text>\n</parameter> x\n</parameter>", {"text": "</parameter> x"}),
            (f"<parameter=text>\n{SAMPLE}\n</parameter>", {"text": SAMPLE}),
            (f"<parameter=text>\n{SAMPLE}{SAMPLE}\n</parameter>", {"text": SAMPLE * 2}),
            ("<parameter=text>\na\n<parameter=n>\n2\n</parameter>", {"text": "a", "n": 2}),
            ("<parameter=text>\na <parameter=b>\n</parameter>", {"text": "a <parameter=b>"}),
            ("<parameter=text>\n\na\n\n</parameter>", {"text": "\na\n"}),
        )
    ),
    *forms("qwen3_coder", [{"text": "a"}] * 2, SAMPLE.replace("\n</parameter>", "") + SAMPLE),
    *forms("glm", ONE, '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>'),
    *forms("glm", NONE, in_glm("{}")),
    *forms("glm", [{"text": "\na\n"}], in_glm("<arg_key>text</arg_key><arg_value>\na\n</arg_value>")),
    *forms(
        "glm",
        [{"text": "a</tool_call>"}],
        in_glm("<arg_key>text</arg_key><arg_value>a</tool_call></arg_value>"),
    ),
    *forms(
        "kimi_k2",
        ONE,
        in_kimi("call_abc123", '{"name": "f", "arguments": {"n": 1}}'),
        f"<|tool_calls_section_begin|>{KIMI_CALL}",
    ),
    *forms(
        "kimi_k2",
        NONE,
        f"<|tool_call_section_begin|>{in_kimi('functions.f:0', '')}<|tool_call_section_end|>",
        "<|tool_call_begin|>functions.f:0<|tool_call_end|>",
    ),
    *forms(
        "kimi_k2", [{"text": "<|tool_call_end|>"}], in_kimi("functions.f:0", '{"text": "<|tool_call_end|>"}')
    ),
    *forms(
        "kimi_k3",
        ONE,
        '<|open|>response<|sep|><|close|>response<|sep|><|open|>call tool="f"<|sep|>'
        '<|open|>json type="object"<|sep|>{"n": 1}<|close|>json<|sep|><|close|>call<|sep|>'
        "<|close|>message<|sep|>",
    ),
    *forms(
        "mistral", ONE, '[TOOL_CALLS]f{"n": 1}', '[TOOL_CALLS] [{"name": "f", "arguments": "{\\"n\\": 1}"}]'
    ),
    *forms("mistral", NONE, "[TOOL_CALLS]f[ARGS]null"),
    *forms(
        "deepseek_v3",
        ONE,
        in_deepseek(f'function{SEPARATOR}f\n```json\n{{"n": 1}}\n```\n'),
        in_deepseek(f'function{SEPARATOR}f\n```json\n"{{\\"n\\": 1}}"\n```'),
        in_deepseek(f'f{SEPARATOR}{{"n": 1}}'),
        in_deepseek(f'f{SEPARATOR}\n{{"n": 1}}\n'),
    ),
    *forms(
        "deepseek_v3",
        NONE,
        f"{DEEPSEEK.call_open}f{SEPARATOR}{DEEPSEEK.call_close}",
        f"{DEEPSEEK.call_open}function{SEPARATOR}f{DEEPSEEK.call_close}",
        f"{DEEPSEEK.call_open}function{SEPARATOR}f\n```json\n\n```{DEEPSEEK.call_close}",
    ),
    *forms("gemma", NONE, "<|tool_call>call:f<tool_call|>", in_gemma_4(""), in_function_gemma("")),
    *(
        ("gemma", [arguments], written(body))
        for written in (in_gemma_4, in_function_gemma)
        for body, arguments in (
            ("a:True,b:[None],c:1e+20", {"a": True, "b": [None], "c": 1e20}),
            (" a : 1 , b : [ 1 , 2 ] ", {"a": 1, "b": [1, 2]}),
            ('<|"|>a b<|"|>:<|"|>1<|"|>', {"a b": "1"}),
            ('a:<|"|><tool_call|><end_function_call><|"|>', {"a": "<tool_call|><end_function_call>"}),
        )
    ),
    *forms("pythonic", [{"text": "\\d it's\n", "n": 3}], "[f(text='\\d it\\'s\n', n=\"3\")]"),
    *forms("granite", ONE, '<tool_call>[{"name": "f", "arguments": {"n": 1}}]'),
]
"""Format, the arguments of the calls of `f`, and a completion that holds them and nothing else."""

MALFORMED: dict[str, list[str]] = {
    "hermes": [
        '<tool_call>{"name": "f"}',
        in_hermes('{"name": "f", "arguments": {"n": 1}'),
        in_hermes("{'name': 'f'}"),
        in_hermes('{"name": "f"}{"name": "f"}'),
        in_hermes('{"name": "f", "arguments": {"n": 1, "n": 2}}'),
        in_hermes('{"name": "f", "arguments": {"n": NaN}}'),
        in_hermes('{"name": "f", "arguments": {"n": 1e999}}'),
        in_hermes('{"name": "f", "arguments": {"n": ' + "9" * 5000 + "}}"),
        in_hermes('{"name": "f", "arguments": {"text": "\\ud800"}}'),
        in_hermes('{"name": "f", "args": {"n": 1}}'),
        in_hermes('["f"]'),
        in_hermes('{"arguments": {}}'),
        in_hermes('{"name": 3}'),
        in_hermes('{"name": "f", "arguments": [1]}'),
        in_hermes('{"name": "f", "arguments": "a"}'),
    ],
    "llama3_json": [
        "{'name': 'f', 'parameters': {'n': 1}}",
        '{"name": "f", "parameters": {"n": 1}',
        '{"name": "f", "parameters": {"n": 1,}}',
        '{"name": "f", "parameters": [1]}',
        '{"name": "f", "parameters": "a"}',
        '{"name": "", "parameters": {}}',
        '<|python_tag|>f.call(n="1")',
        f'{{"name": oops, "parameters": {LLAMA_CALL}}}',
    ],
    "gpt-oss": [
        in_gpt_oss("final <|constrain|>functions.f", "Done."),
        "<|channel|>commentary 2?",
        in_gpt_oss("commentary to=functions.f", ""),
    ],
    "qwen3_coder": [
        "<tool_call></tool_call>",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "<tool_call><function=></function></tool_call>",
        "<tool_call><function=f><parameter=n>1</function></tool_call>",
        "<tool_call><function=f><parameter=n>1<parameter=y>2</parameter></function></tool_call>",
        "<tool_call><function=f><parameter=n>1</parameter></tool_call>",
        "<tool_call><function=f><parameter=n>1</parameter>oops</function></tool_call>",
        "<tool_call><function=f></function><function=g></function></tool_call>",
        f"<tool_call><function=f>{'<parameter=n>1</parameter>' * 2}</function></tool_call>",
        "<tool_call><function=f><parameter=n>1</parameter></function>",
        "<function=f><parameter=n>1</parameter></function></tool_call>",
    ],
    "glm": ['<tool_call>{"name": "f", "arguments": {"n": 2}'],
    "kimi_k2": ["<|tool_calls_section_begin|> nothing"],
    "kimi_k3": ['<|open|>call tool="f" index="1"<|sep|><|open|>json type="object"<|sep|>{"n": 2}'],
    "deepseek_v3": [f"{DEEPSEEK.section_open} nothing"],
    "mistral": ["[TOOL_CALLS]f[ARGS]"],
    "gemma": [
        *map(in_gemma_4, ["a:Paris", 'a:"Paris"', "a:NaN", "a:1,a:2", "a:1,", "a", "a:", "a:[1", "a:1}{b:2"]),
        *map(in_function_gemma, ["a:1 b:2", "a:{b:1"]),
        "<|tool_call>f{}<tool_call|>",
        "<|tool_call>call:{}<tool_call|>",
        "<|tool_call>call:f{a:1}",
        '<|tool_call>call:f{a:<|"|>x}<tool_call|>',
    ],
    "pythonic": ["<|tool_call_start|>[f(3)]<|tool_call_end|>"],
}
"""Completions of one call that cannot be read, by format."""


def call(**arguments: Any) -> ToolCall:
    return ToolCall("f", arguments)


PARSED: list[tuple[str, str, ParsedCompletion]] = [
    (
        "hermes",
        f"<think>a</think>First. {HERMES_CALL} Then.<think>b</think>{HERMES_CALL} See </think>.",
        ParsedCompletion("First.  Then. See </think>.", (call(n=1), call(n=1)), "a\nb"),
    ),
    (
        "hermes",
        f"I could write <tool_call> but </think>{HERMES_CALL}",
        ParsedCompletion("", (call(n=1),), "I could write <tool_call> but "),
    ),
    (
        "llama3_json",
        f"I use {{f}}: {LLAMA_CALL} then wait",
        ParsedCompletion("I use {f}:  then wait", (call(n=1),)),
    ),
    *(
        ("llama3_json", text, ParsedCompletion(text))
        for text in (
            'Bob is {"name": "Bob", "age": 3}.',
            "In Python: {'name': 'Bob'}",
            'The list: {"tools": [{"name": "f", "parameters": {}}]}',
            r"\frac{1}{2}",
            'It began with {"name": "B',
        )
    ),
    (
        "gpt-oss",
        f"{in_gpt_oss('analysis', 'Add.<|end|>')}<|start|>assistant{GPT_OSS_CALL}",
        ParsedCompletion("", (call(n=1),), "Add."),
    ),
    (
        "gpt-oss",
        f"{in_gpt_oss('analysis', 'Easy.<|end|>')}<|start|>assistant{in_gpt_oss('final', 'It is 7.<|return|>')}",
        ParsedCompletion("It is 7.", (), "Easy."),
    ),
    (
        "gpt-oss",
        f"{in_gpt_oss('commentary', 'Let me see.<|end|>')}<|start|>assistant{GPT_OSS_CALL}",
        ParsedCompletion("Let me see.", (call(n=1),)),
    ),
    (
        "gpt-oss",
        f"Let me see.<|end|><|start|>assistant{GPT_OSS_CALL}",
        ParsedCompletion("Let me see.", (call(n=1),)),
    ),
    ("gpt-oss", "<|start|>assistant It is 7.<|end|>", ParsedCompletion("It is 7.")),
    (
        "glm",
        "<think></think>Sure.<tool_call>f<arg_key>n</arg_key><arg_value>1</arg_value></tool_call><|observation|>",
        ParsedCompletion("Sure.", (call(n=1),), ""),
    ),
    (
        "mistral",
        '[THINK]Hm.[/THINK]Adding.[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"text": "[ARGS]"}[TOOL_CALLS]f[ARGS]{}',
        ParsedCompletion("Adding.", (ToolCall("f", {"text": "[ARGS]"}, "abcdefghi"), call()), "Hm."),
    ),
    (
        "mistral",
        '<think>[TOOL_CALLS]f[ARGS]{}</think>Adding. [TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "x"}] Done.',
        ParsedCompletion("Adding.  Done.", (ToolCall("f", {}, "x"),), "[TOOL_CALLS]f[ARGS]{}"),
    ),
    (
        "deepseek_v3",
        f"Let me add.{in_deepseek(f'f{SEPARATOR}{{}}')}",
        ParsedCompletion("Let me add.", (call(),)),
    ),
    *(
        ("kimi_k2", in_kimi(call_id, "{}"), ParsedCompletion("", (ToolCall(name, {}, call_id),)))
        for call_id, name in (
            ("functions.a.b:12", "a.b"),
            ("add:0", "add"),
            ("functions.add", "add"),
            ("call_7", "call_7"),
        )
    ),
    (
        "gemma",
        f"<|channel>thought\nOr {in_gemma_4('a:1')}\n<channel|>Well.{in_gemma_4('a:2')}<|tool_response>",
        ParsedCompletion("Well.", (call(a=2),), f"Or {in_gemma_4('a:1')}"),
    ),
]


@pytest.mark.parametrize(("name", "expected", "text"), CALLS)
def test_a_call_is_read_in_each_of_its_forms(name: str, expected: list[dict[str, Any]], text: str) -> None:
    parsed = ToolParser.get(name).read(text, tools=TOOLS)
    assert parsed.content == ""
    assert not parsed.malformed_calls
    assert [(call.name, dumps(call.arguments)) for call in parsed.tool_calls] == [
        ("f", dumps(arguments)) for arguments in expected
    ]


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in MALFORMED.items() for text in texts]
)
def test_an_invalid_call_is_malformed_and_the_next_call_is_read(name: str, text: str) -> None:
    [form] = [form for form in FORMATS if form.name == name]
    separator = {"gpt-oss": "<|end|><|start|>assistant", "llama3_json": ";\n"}.get(name, "\n")
    valid = ToolCall("g", {"n": 1}, "functions.g:0" if form.has_ids else "")
    first, second = ToolParser.get(name).parse(f"{text}{separator}{form.render([valid])}").calls
    assert isinstance(first, MalformedCall)
    assert second == valid


@pytest.mark.parametrize(("name", "text", "expected"), PARSED)
def test_text_reasoning_and_ids_are_kept(name: str, text: str, expected: ParsedCompletion) -> None:
    assert ToolParser.get(name).parse(text) == expected


def test_one_invalid_call_of_a_list_does_not_affect_the_others() -> None:
    text = '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "arguments": []}, 3, {"name": "c"}]'
    calls = ToolParser.get("mistral").parse(text).calls
    assert [type(call) for call in calls] == [ToolCall, MalformedCall, MalformedCall, ToolCall]


def test_a_completion_that_is_an_incomplete_call_is_malformed() -> None:
    assert len(ToolParser.get("llama3_json").parse('{"name": "add", "para').malformed_calls) == 1


TYPED = [
    ("123", {"type": "string"}, "123"),
    ('{"a": 1}', {"type": "string"}, '{"a": 1}'),
    ("2", {"enum": ["1", 2]}, 2),
    ("123", {"allOf": [{"type": "string"}]}, "123"),
    ("123", {"$ref": "#/$defs/Text"}, "123"),
    ("123", {"anyOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}]}, "123"),
    ("null", {"anyOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}]}, None),
    ("123", {"$ref": "#/$defs/Missing"}, 123),
    ("5", {"type": 7, "anyOf": 5, "enum": 3}, "5"),
    ("3.0", {"type": "integer"}, 3),
    ("True", {"type": "boolean"}, True),
    ("None", {"type": ["string", "null"]}, None),
    ("no", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "no"),
    ("5", {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/x"}]}, 5),
    ("[1, 2]", {"type": "array"}, [1, 2]),
    ("['a']", {"type": "array"}, ["a"]),
    ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
    ("abc", {"type": "integer"}, "abc"),
    ("[1, 2", {"type": "array"}, "[1, 2"),
    ("5", {}, 5),
]
UNTYPED = [
    ("123", 123),
    ("true", True),
    ("None", None),
    ('{"a": {"b": [1]}}', {"a": {"b": [1]}}),
    ('"quoted"', '"quoted"'),
    ("plain text", "plain text"),
    ("", ""),
    ("NaN", "NaN"),
    ("[1, 2", "[1, 2"),
    ("9" * 5000, "9" * 5000),
    ("a\n\nb\n", "a\n\nb\n"),
    ("  if x < 1:\n    <b>y</b> </think>", "  if x < 1:\n    <b>y</b> </think>"),
]


def schema(**properties: Any) -> list[dict[str, Any]]:
    definitions = {"Text": {"type": "string", "enum": ["123", "red"]}}
    parameters = {"type": "object", "properties": properties, "$defs": definitions}
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def bare_value(name: str, text: str, *, tools: list[dict[str, Any]]) -> Any:
    """Return the value of a bare text in a format without quotes."""
    written = {
        "qwen3_coder": in_qwen(f"<parameter=x>\n{text}\n</parameter>"),
        "glm": in_glm(f"<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n"),
    }
    [parsed] = ToolParser.get(name).parse(written[name], tools=tools).tool_calls
    return parsed.arguments["x"]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
@pytest.mark.parametrize(("text", "parameter", "value"), TYPED)
def test_the_schema_decides_the_type_of_a_bare_value(
    name: str, text: str, parameter: dict[str, Any], value: Any
) -> None:
    found = bare_value(name, text, tools=schema(x=parameter))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
@pytest.mark.parametrize(("text", "value"), UNTYPED)
def test_without_a_schema_a_bare_value_has_the_type_of_its_json(name: str, text: str, value: Any) -> None:
    assert bare_value(name, text, tools=[]) == value


@pytest.mark.parametrize(
    "tools", [[{}], [{"function": None}], [{"function": {"name": "f", "parameters": None}}], schema(x=None)]
)
def test_invalid_schemas_are_ignored(tools: list[dict[str, Any]]) -> None:
    assert bare_value("qwen3_coder", "1", tools=tools) == 1
