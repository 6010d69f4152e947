"""The parsers parse calls that real chat templates render. The templates come from the `trl` package."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from agent_loop.chat.parsers import ToolParser, detect_parser
from agent_loop.types import ToolCall

FORMAT_OF = {
    "deepseekv3": "deepseek_v3",
    "diffusion_gemma": "gemma",
    "gemma4": "gemma",
    "gemma4_v2": "gemma",
    "gemma4_v3": "gemma",
    "gemma4_v4": "gemma",
    "gemma4_v5": "gemma",
    "glm4moe": "glm",
    "gptoss": "gpt-oss",
    "lfm2_v2": "pythonic",
    "llama3_1": "llama3_json",
    "llama3_2": "llama3_json",
    "nemotron_3_nano": "qwen3_coder",
    "nemotron_3_super": "qwen3_coder",
    "nemotron_3_ultra": "qwen3_coder",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_vl": "hermes",
    "qwen3_5_think": "qwen3_coder",
    "qwen3_5_nothink": "qwen3_coder",
    "qwen3_6": "qwen3_coder",
    "qwen3_8": "qwen3_coder",
}
ARGUMENTS = {
    "city": 'Köln "Süd"\nund \\ 北京',
    "code": "123",
    "days": 3,
    "share": 0.5,
    "is_late": True,
    "note": None,
    "list": [1, 2, 3],
    "map": {"k": ["v", {"n": False}]},
}
PROPERTIES = {key: {"type": "string"} for key in ("city", "code")} | {
    "days": {"type": "integer"},
    "share": {"type": "number"},
    "is_late": {"type": "boolean"},
    "note": {"type": ["string", "null"]},
    "list": {"type": "array"},
    "map": {"type": "object"},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "forecast",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
    },
}


def template_of(name: str) -> str:
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0], "chat_templates", f"{name}.jinja").read_text(
        encoding="utf-8"
    )


def written_by(name: str, *, arguments: Any) -> str:
    """Return the render of an assistant turn with one call, without the generation prompt."""
    question = {"role": "user", "content": "Will it rain?"}
    call = {"type": "function", "function": {"name": "forecast", "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    turn = render(name, [question, answer])
    prompts = [render(name, [question], add_generation_prompt=prompted) for prompted in (True, False)]
    return turn.removeprefix(next(prompt for prompt in prompts if turn.startswith(prompt)))


def render(name: str, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> str:
    [rendered], _ = render_jinja_template(
        [messages],
        chat_template=template_of(name),
        bos_token="",
        add_generation_prompt=add_generation_prompt,
    )
    return rendered


@pytest.mark.parametrize("name", FORMAT_OF)
def test_the_format_is_detected_from_the_template(name: str) -> None:
    assert isinstance(detect_parser(template_of(name)), ToolParser.registered()[FORMAT_OF[name]])


@pytest.mark.parametrize("name", FORMAT_OF)
def test_the_parser_parses_calls_that_the_template_renders(name: str) -> None:
    arguments: Any = json.dumps(ARGUMENTS) if name == "deepseekv3" else ARGUMENTS
    parser = ToolParser.get(FORMAT_OF[name])
    [call] = parser.parse(written_by(name, arguments=arguments), tools=[TOOL]).calls
    assert call == ToolCall("forecast", ARGUMENTS)
