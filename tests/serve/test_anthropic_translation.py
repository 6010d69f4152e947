"""Tests that requests of the Messages API become the equivalent chat requests, and that nothing in them is lost."""

from __future__ import annotations

from typing import Any

import pytest

from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import RequestError
from agent_loop.serve.chat import conversation_of
from agent_loop.serve.chat_requests import ChatCompletionRequest
from agent_loop.serve.messages_requests import MessagesRequest, translate_messages
from tests.chat.families import family
from tests.helpers import hermes_template, user

TOOL = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {}}}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def chat(messages: Any = None, template: ChatTemplate | None = None, **fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "max_tokens": 8, "messages": messages or user("hi"), **fields}
    return translate_messages(MessagesRequest.read(body), template=template or hermes_template())


def conversation(*blocks: dict[str, Any], role: str = "user", **fields: Any) -> list[dict[str, Any]]:
    messages = [{"role": role, "content": list(blocks)}]
    return conversation_of(
        chat(messages if role == "user" else [*user("?"), *messages, *user("!")], **fields).messages
    )


def test_system_messages_keep_their_place() -> None:
    system = [{"type": "text", "text": "one", **CACHED}, {"type": "text", "text": "two"}]
    later = {"role": "system", "content": [{"type": "text", "text": "three"}]}
    roles_and_texts = [
        (message["role"], message["content"])
        for message in conversation_of(chat([*user("hi"), later], system=system).messages)
    ]
    assert roles_and_texts == [("system", "one\ntwo"), ("user", "hi"), ("system", "three")]


def test_a_billing_header_is_not_shown_to_the_model() -> None:
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.3b4;"}
    assert conversation_of(chat(system=[header, {"type": "text", "text": "Hello."}]).messages)[0] == {
        "role": "system",
        "content": "Hello.",
    }
    assert [message.role for message in chat(system=[header]).messages] == ["user"]


def test_cache_control_is_accepted_at_every_place() -> None:
    blocks = [
        {
            "type": "tool_result",
            "tool_use_id": "c",
            "content": [{"type": "text", "text": "3", **CACHED}],
            **CACHED,
        },
        {"type": "text", "text": "x", **CACHED},
    ]
    plain = [
        {"type": "tool_result", "tool_use_id": "c", "content": "3"},
        {"type": "text", "text": "x"},
    ]
    with_cache = chat([{"role": "user", "content": blocks}], tools=[{**TOOL, **CACHED}], **CACHED)
    without = chat([{"role": "user", "content": plain}], tools=[TOOL])
    assert conversation_of(with_cache.messages) == conversation_of(without.messages)
    assert with_cache.tools == without.tools


def test_documents_and_search_results_become_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "body"}
    document = {"type": "document", "source": source, "title": "T", "context": "C"}
    result = {
        "type": "search_result",
        "title": "S",
        "source": "url",
        "content": [{"type": "text", "text": "found"}],
    }
    [message] = conversation(document, result)
    assert message["content"] == (
        "<document>\nT\nC\nbody\n</document>\n<search_result>\nS\nurl\nfound\n</search_result>"
    )
    parts = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "part"}]}}
    [message] = conversation(parts)
    assert message["content"] == "<document>\npart\n</document>"


@pytest.mark.parametrize(
    ("block", "named"),
    [
        ({"type": "tool_reference", "tool_name": "x"}, "tool_reference"),
        ({"type": "container_upload", "file_id": "x"}, "container_upload"),
        (
            {"type": "image", "source": {"type": "url", "url": "http://x"}},
            r"messages\[0\].content\[0\].source",
        ),
        (
            {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "-"}},
            r"messages\[0\].content\[0\].source",
        ),
        ({"type": "text", "text": "x", "colour": "red"}, "colour"),
        ({"type": "text"}, r"messages\[0\].content\[0\].text is missing"),
        ({"type": "tool_use", "id": "c", "name": "x", "input": {}}, "tool_use"),
        ({"type": "tool_result", "tool_use_id": "c", "content": [{"type": "tool_result"}]}, "tool_result"),
    ],
)
def test_blocks_that_cannot_be_honoured_are_refused_by_name(block: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        conversation(block)


@pytest.mark.parametrize(
    ("choice", "chosen", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any"}, "required", None),
        ({"type": "none"}, "none", None),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any", "disable_parallel_tool_use": False}, "required", None),
    ],
)
def test_the_choice_of_tools_is_honoured(choice: Any, chosen: str, parallel: bool | None) -> None:
    request = chat(tools=[TOOL], tool_choice=choice)
    assert (request.tool_choice, request.parallel_tool_calls) == (chosen, parallel)


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_the_output_format_is_a_schema_of_the_completion(field: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    output_format = {"type": "json_schema", "schema": schema}
    request = chat(**{field: {"format": output_format} if field == "output_config" else output_format})
    assert '"a"' in request.json_schema


SWITCHES_THINKING = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if VARIABLE is defined and not VARIABLE %}{{ '<think></think>' }}{%- endif %}{%- endif %}
"""


@pytest.mark.parametrize("variable", ["enable_thinking", "thinking"])
@pytest.mark.parametrize(("kind", "thinks"), [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_thinking_is_switched_in_templates_that_can_switch_it(variable: str, kind: str, thinks: bool) -> None:
    template = family(SWITCHES_THINKING.replace("VARIABLE", variable))
    wish = {"thinking": {"type": kind}}
    assert chat(template=template, **wish).chat_template_kwargs == {variable: thinks}
    assert chat(template=template).chat_template_kwargs is None
    assert chat(**wish).chat_template_kwargs is None


def test_effort_is_the_reasoning_effort() -> None:
    knows = family(SWITCHES_THINKING.replace("VARIABLE", "reasoning_effort"))
    assert chat(template=knows, output_config={"effort": "high"}).reasoning_effort == "high"
    assert chat(output_config={"effort": "low"}).reasoning_effort == "low"
    assert chat(output_config={"effort": "high"}).reasoning_effort is None  # as without a wish


def test_a_trailing_assistant_message_is_continued() -> None:
    assert chat([*user("?"), {"role": "assistant", "content": "It is"}]).continue_final_message
    blocks = [{"type": "text", "text": "It is"}]
    assert chat([*user("?"), {"role": "assistant", "content": blocks}]).continue_final_message
    call = {"type": "tool_use", "id": "c", "name": "add", "input": {}}
    for content in ([*blocks, call], "", [{"type": "thinking", "thinking": "Hm.", "signature": ""}, *blocks]):
        with pytest.raises(RequestError, match="only text can be continued"):
            chat([*user("?"), {"role": "assistant", "content": content}])


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"user_id": "x"}},
        {"service_tier": "auto"},
        {"inference_geo": "us"},
        {"speed": "fast"},
        {"mcp_servers": []},
        {"container": None},
        {
            "tools": [
                {
                    **TOOL,
                    "type": "custom",
                    "strict": True,
                    "eager_input_streaming": True,
                    "allowed_callers": ["direct"],
                }
            ]
        },
    ],
)
def test_fields_without_effect_on_the_completion_are_accepted(fields: dict[str, Any]) -> None:
    assert chat(**fields).messages[0].content == "hi"
