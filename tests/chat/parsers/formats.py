"""Reference renderers of each format of tool calls, for tests of the parsers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agent_loop.chat.parsers import ToolParser
from agent_loop.chat.parsers.sections import DEEPSEEK, SEPARATOR
from agent_loop.chat.parsers.tagged import DSML
from agent_loop.types import ToolCall


@dataclass(frozen=True)
class Format:
    """Format of tool calls, with its renderer."""

    name: str
    render: Callable[[list[ToolCall]], str]
    reasoning: tuple[str, str] = ("<think>", "</think>")
    has_ids: bool = False
    more_markers: tuple[str, ...] = ()
    writes_bare_text: bool = False
    """Whether values are rendered without quotes, so that they cannot contain the markers."""

    @property
    def cut(self) -> str:
        """Text of a call that is opened and not closed."""
        text = self.render([ToolCall("add", {"a": 77, "b": 2}, "functions.add:0" if self.has_ids else "")])
        return text[: text.index("77") + 2].lstrip()

    @property
    def markers(self) -> list[str]:
        """Texts with a special meaning in the format, and the parts of a call."""
        parser = ToolParser.get(self.name)
        rendered = self.render([ToolCall("a", {"k": "x", "n": 1}, "functions.a:0" if self.has_ids else "")])
        parts = re.findall(r"<[^<>]*>|\[[A-Z_]+\]|```\w*|[^<>\[`]+", "".join([rendered, *self.reasoning]))
        return sorted({*parser.format_texts, *parser.readers(), *parts, *self.more_markers} - {""})


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
    Format("hermes", render_hermes),
    Format(
        "gpt-oss",
        render_gpt_oss,
        reasoning=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        more_markers=("<|return|>", "final"),
    ),
    Format("qwen3_coder", render_qwen3_coder, writes_bare_text=True),
    Format("glm", render_glm, writes_bare_text=True),
    Format("llama3_json", render_llama3_json),
    Format("deepseek_v3", render_deepseek_v3),
    Format("kimi_k2", render_kimi_k2, has_ids=True),
    Format(
        "mistral",
        render_mistral,
        reasoning=("[THINK]", "[/THINK]"),
        more_markers=("[ARGS]", "[CALL_ID]"),
        has_ids=True,
    ),
    Format(
        "gemma",
        render_gemma,
        reasoning=("<|channel>thought\n", "<channel|>"),
        more_markers=("<escape>",),
        writes_bare_text=True,
    ),
    Format("seed_oss", render_seed_oss, reasoning=("<seed:think>", "</seed:think>"), writes_bare_text=True),
    Format("minimax_m2", render_minimax_m2, writes_bare_text=True),
    Format("deepseek_v4", render_deepseek_v4, writes_bare_text=True),
    Format(
        "kimi_k3",
        render_kimi_k3,
        reasoning=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        more_markers=('<|open|>json type="object"<|sep|>',),
        writes_bare_text=True,
    ),
    Format("granite", render_granite),
    Format("pythonic", render_pythonic),
)
