"""Reference renderers of each format of tool calls, for tests of the parsers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agent_loop.chat.parsers.sections import DEEPSEEK, SEPARATOR
from agent_loop.chat.parsers.tagged import DSML
from agent_loop.types import ToolCall


@dataclass(frozen=True)
class Format:
    """Format of tool calls, with its renderer."""

    name: str
    render: Callable[[list[ToolCall]], str]
    markers: tuple[str, ...]
    """Texts with a special meaning in the format."""
    cut: str
    """Text of a call that is opened and not closed."""
    reasoning: tuple[str, str] = ("<think>", "</think>")
    has_ids: bool = False
    writes_bare_text: bool = False
    """Whether values are rendered without quotes, so that they cannot contain the markers."""


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def render_hermes(calls: list[ToolCall]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": {dumps(call.name)}, "arguments": {dumps(call.arguments)}}}\n</tool_call>'
        for call in calls
    )


def render_gpt_oss(calls: list[ToolCall]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{dumps(call.arguments)}<|call|>"
        for call in calls
    )


def render_qwen3_coder(calls: list[ToolCall]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={call.name}>\n"
        + "".join(
            f"<parameter={key}>\n{bare(value)}\n</parameter>\n" for key, value in call.arguments.items()
        )
        + "</function>\n</tool_call>"
        for call in calls
    )


def render_glm(calls: list[ToolCall]) -> str:
    return "".join(
        f"\n<tool_call>{call.name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{bare(value)}</arg_value>\n"
            for key, value in call.arguments.items()
        )
        + "</tool_call>"
        for call in calls
    )


def bare(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def render_llama3_json(calls: list[ToolCall]) -> str:
    return "; ".join(
        f'{{"name": {dumps(call.name)}, "parameters": {dumps(call.arguments)}}}' for call in calls
    )


def render_deepseek_v3(calls: list[ToolCall]) -> str:
    blocks = "\n".join(
        f"{DEEPSEEK.call_open}function{SEPARATOR}{call.name}\n```json\n{dumps(call.arguments)}\n```{DEEPSEEK.call_close}"
        for call in calls
    )
    return f"{DEEPSEEK.section_open}{blocks}{DEEPSEEK.section_close}"


def render_kimi_k2(calls: list[ToolCall]) -> str:
    blocks = "".join(
        f"<|tool_call_begin|>{call.id}<|tool_call_argument_begin|>{dumps(call.arguments)}<|tool_call_end|>"
        for call in calls
    )
    return f"<|tool_calls_section_begin|>{blocks}<|tool_calls_section_end|>"


def render_mistral(calls: list[ToolCall]) -> str:
    return "[TOOL_CALLS]" + dumps(
        [{"name": call.name, "arguments": call.arguments, "id": call.id} for call in calls]
    )


def render_gemma(calls: list[ToolCall]) -> str:
    return "".join(f"<|tool_call>call:{call.name}{in_gemma(call.arguments)}<tool_call|>" for call in calls)


def in_gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{in_gemma(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(in_gemma(inner) for inner in value) + "]"
    return dumps(value)


def render_seed_oss(calls: list[ToolCall]) -> str:
    return "\n".join(
        f"<seed:tool_call>\n<function={call.name}>\n"
        + "".join(f"<parameter={key}>{bare(value)}</parameter>\n" for key, value in call.arguments.items())
        + "</function>\n</seed:tool_call>"
        for call in calls
    )


def render_invoke(calls: list[ToolCall], *, section: str, prefix: str = "", says_type: bool = False) -> str:
    blocks = [
        f'<{prefix}invoke name="{call.name}">\n'
        + "".join(
            f'<{prefix}parameter name="{key}"'
            + (f' string="{str(isinstance(value, str)).lower()}"' if says_type else "")
            + f">{bare(value)}</{prefix}parameter>\n"
            for key, value in call.arguments.items()
        )
        + f"</{prefix}invoke>\n"
        for call in calls
    ]
    return f"<{section}>\n{''.join(blocks)}</{section}>"


def render_minimax_m2(calls: list[ToolCall]) -> str:
    return render_invoke(calls, section="minimax:tool_call")


def render_deepseek_v4(calls: list[ToolCall]) -> str:
    return render_invoke(calls, section=f"{DSML}tool_calls", prefix=DSML, says_type=True)


def render_kimi_k3(calls: list[ToolCall]) -> str:
    blocks = [
        f'<|open|>call tool="{call.name}" index="{index}"<|sep|>'
        + "".join(
            f'<|open|>argument key="{key}" type="{"string" if isinstance(value, str) else "other"}"<|sep|>'
            f"{bare(value)}<|close|>argument<|sep|>"
            for key, value in call.arguments.items()
        )
        + "<|close|>call<|sep|>"
        for index, call in enumerate(calls, 1)
    ]
    return f"<|open|>tools<|sep|>{''.join(blocks)}<|close|>tools<|sep|>"


def render_granite(calls: list[ToolCall]) -> str:
    return "<|tool_call|>" + dumps([{"name": call.name, "arguments": call.arguments} for call in calls])


def render_pythonic(calls: list[ToolCall]) -> str:
    written = [
        f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"
        for call in calls
    ]
    return f"<|tool_call_start|>[{', '.join(written)}]<|tool_call_end|>"


FORMATS = (
    Format(
        "hermes",
        render_hermes,
        ("<tool_call>", "</tool_call>", '{"name":"a","arguments":{}}', "<think>", "</think>"),
        cut='<tool_call>{"name": "add", "arguments": {"a": 1',
    ),
    Format(
        "gpt-oss",
        render_gpt_oss,
        (
            *(
                "<|start|>",
                "<|channel|>",
                "<|message|>",
                "<|constrain|>",
                "<|end|>",
                "<|call|>",
                "<|return|>",
            ),
            *("assistant", "analysis", "commentary", "final", " to=functions.a", "to=", "{}"),
        ),
        cut='<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1',
        reasoning=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    ),
    Format(
        "qwen3_coder",
        render_qwen3_coder,
        (
            *("<tool_call>", "</tool_call>", "<function=a>", "</function>", "<function=", "\n"),
            *("<parameter=a>", "<parameter=", "</parameter>", "<think>", "</think>"),
        ),
        cut="<tool_call>\n<function=add>\n<parameter=a>\n1",
        writes_bare_text=True,
    ),
    Format(
        "glm",
        render_glm,
        (
            *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            *("<think>", "</think>", "<|user|>", "\n"),
        ),
        cut="<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1",
        writes_bare_text=True,
    ),
    Format(
        "llama3_json",
        render_llama3_json,
        (
            *("<|python_tag|>", '{"name":', "{'name':", '"f"', '"parameters":', "{", "}", ";", "\n"),
            *("<think>", "</think>", "<|eot_id|>", ","),
        ),
        cut='{"name": "add", "parameters": {"a": 1',
    ),
    Format(
        "deepseek_v3",
        render_deepseek_v3,
        (*DEEPSEEK.stops, SEPARATOR, "function", "```json\n", "```", "{}"),
        cut=f'{DEEPSEEK.section_open}{DEEPSEEK.call_open}function{SEPARATOR}add\n```json\n{{"a": 1',
    ),
    Format(
        "kimi_k2",
        render_kimi_k2,
        (
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *(
                "<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
                "functions.a:0",
                "{}",
                "<think>",
                "</think>",
            ),
        ),
        cut='<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1',
        has_ids=True,
    ),
    Format(
        "mistral",
        render_mistral,
        (
            *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "name", "[", "]", '[{"name":"a","arguments":{}}]', "{}"),
            *("[THINK]", "[/THINK]", "<think>", "</think>"),
        ),
        cut='[TOOL_CALLS][{"name": "add", "arguments": {"a": 1',
        reasoning=("[THINK]", "[/THINK]"),
        has_ids=True,
    ),
    Format(
        "gemma",
        render_gemma,
        (
            *("<|tool_call>", "<tool_call|>", "call:a{", "}", '<|"|>', "[", "]", ",", "k:", "1"),
            *("<start_function_call>", "<end_function_call>", "<escape>", "<|channel>", "<channel|>"),
        ),
        cut="<|tool_call>call:add{a:1",
        reasoning=("<|channel>thought\n", "<channel|>"),
        writes_bare_text=True,
    ),
    Format(
        "seed_oss",
        render_seed_oss,
        (
            "<seed:tool_call>",
            "</seed:tool_call>",
            "<function=a>",
            "</function>",
            "<parameter=a>",
            "</parameter>",
        ),
        cut="<seed:tool_call>\n<function=add>\n<parameter=a>1",
        reasoning=("<seed:think>", "</seed:think>"),
        writes_bare_text=True,
    ),
    Format(
        "minimax_m2",
        render_minimax_m2,
        (
            *(
                "<minimax:tool_call>",
                "</minimax:tool_call>",
                '<invoke name="',
                '<invoke name="a">',
                "</invoke>",
            ),
            *('<parameter name="a">', "</parameter>", "<think>", "</think>"),
        ),
        cut='<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1',
        writes_bare_text=True,
    ),
    Format(
        "deepseek_v4",
        render_deepseek_v4,
        (
            *(f"<{DSML}tool_calls>", f"</{DSML}tool_calls>", f'<{DSML}invoke name="a">', f"</{DSML}invoke>"),
            *(f'<{DSML}parameter name="a" string="true">', f"</{DSML}parameter>", "<think>", "</think>"),
        ),
        cut=f'<{DSML}tool_calls>\n<{DSML}invoke name="add">\n<{DSML}parameter name="a" string="false">1',
        writes_bare_text=True,
    ),
    Format(
        "kimi_k3",
        render_kimi_k3,
        (
            *(
                "<|open|>",
                "<|close|>",
                "<|sep|>",
                "<|open|>tools<|sep|>",
                '<|open|>call tool="a" index="1"<|sep|>',
            ),
            *('<|open|>argument key="a" type="string"<|sep|>', '<|open|>json type="object"<|sep|>', "{}"),
            *("<|close|>argument<|sep|>", "<|close|>call<|sep|>", "<|close|>tools<|sep|>"),
        ),
        cut='<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|>',
        reasoning=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        writes_bare_text=True,
    ),
    Format(
        "granite",
        render_granite,
        ("<|tool_call|>", "<tool_call>", "[", "]", '[{"name":"a","arguments":{}}]', "<think>", "</think>"),
        cut='<|tool_call|>[{"name": "add", "arguments": {"a": 1',
    ),
    Format(
        "pythonic",
        render_pythonic,
        (
            *(
                "<|tool_call_start|>",
                "<|tool_call_end|>",
                "<|python_start|>",
                "[",
                "]",
                "[a(",
                "a=",
                ")",
                ",",
            ),
            *("'", "[a(b='c')]", "<think>", "</think>"),
        ),
        cut="<|tool_call_start|>[add(a=1",
    ),
)
