"""Tests of the Anthropic Messages API: with the official client, and of the translation to chat requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import pytest
from anthropic import beta_async_tool
from pydantic import BaseModel

from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import RequestError
from agent_loop.serve.chat import conversation_of
from agent_loop.serve.chat_requests import ChatCompletionRequest
from agent_loop.serve.messages_requests import MessagesRequest, translate_messages
from agent_loop.servers.base import Ability
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.trajectory import IncidentKind
from tests.chat.families import family
from tests.helpers import call_text, encoded, hermes_template, roles, text_reply, tool_call_reply, user
from tests.serve.applications import MODEL as SERVED_MODEL
from tests.serve.applications import SpellingServer, serve_app
from tests.serve.harness import MODEL, ProgramHarness, in_order, origins, prompts, run_one

TOOL = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 64, "tools": [TOOL]}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def results_of(content: Any, text: Any = "3", **fields: Any) -> dict[str, Any]:
    """Return the message with the results of the calls in the content of a reply."""
    calls = [block for block in content if block.type == "tool_use"]
    return {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": call.id, "content": text, **fields} for call in calls
        ],
    }


# -- the client --------------------------------------------------------------------------------------------------------


def test_a_conversation_with_parallel_tools_is_one_trajectory() -> None:
    async def program(claude: Any) -> None:
        create = claude.messages.create
        system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        first = await create(messages=user("1 + 2?"), system=system, **ASKED)
        assert first.stop_reason == "tool_use"
        text, one, two = first.content
        assert (text.text, one.input, two.input) == ("Now:", {"a": 1}, {"a": 2})
        results = results_of(first.content, [{"type": "text", "text": "4"}])
        results["content"].append({"type": "text", "text": "Quick."})
        messages = [*user("1 + 2?"), assistant(first.content), results]
        second = await create(messages=messages, system=system, **ASKED)
        assert (second.content[0].text, second.stop_reason) == ("Done.", "end_turn")
        assert second.usage.output_tokens == len(encoded("Done.<|im_end|>"))

    output = run_one(program, f"Now:{call_text('add', a=1)}\n{call_text('add', a=2)}", "Done.")
    assert origins(output) == ["prompt", "model", "tool", "model"]
    assert roles(output.messages) == ["system", "user", "assistant", "tool", "tool", "user", "assistant"]


def test_streamed_events_are_the_message() -> None:
    async def program(claude: Any) -> None:
        asked = {**ASKED, "messages": user("?"), "thinking": {"type": "enabled", "budget_tokens": 1024}}
        whole = await claude.messages.create(**asked)
        async with claude.messages.stream(**asked) as stream:
            events = [event.type async for event in stream]
            streamed = await stream.get_final_message()
        assert (events[0], events[-1]) == ("message_start", "message_stop")
        assert [block.type for block in streamed.content] == ["thinking", "text", "tool_use"]
        assert [b.model_dump(exclude={"id"}) for b in streamed.content] == [
            b.model_dump(exclude={"id"}) for b in whole.content
        ]
        assert streamed.stop_reason == whole.stop_reason == "tool_use"
        assert streamed.usage.output_tokens == whole.usage.output_tokens
        assert streamed.usage.input_tokens == whole.usage.input_tokens
        history = [*user("?"), assistant(streamed.content), results_of(streamed.content)]
        await claude.messages.create(**{**asked, "messages": history})

    text = f"<think>\nHm.\n</think>\n\nNow:{call_text('add', a=1)}"
    whole, streamed = ProgramHarness(in_order(text, text, "3")).run_virtual(program)
    assert origins(whole.output) == ["prompt", "model"]
    assert origins(streamed.output) == ["prompt", "model", "tool", "model"]


@pytest.mark.parametrize("is_wish", [False, True])
def test_a_tool_of_anthropic_is_refused_in_its_format_or_dropped_as_a_wish(is_wish: bool) -> None:
    async def program(claude: Any) -> None:
        tools: list[Any] = [{"type": "web_search_20250305", "name": "web_search"}, TOOL]
        asked = {**ASKED, "messages": user("?"), "tools": tools}
        if is_wish:
            await claude.messages.create(**asked)
            return
        with pytest.raises(anthropic.BadRequestError, match="web_search_20250305") as caught:
            await claude.messages.create(**asked)
        assert caught.value.body["type"] == "error"
        assert caught.value.body["error"]["type"] == "invalid_request_error"

    wishes = ["tools.web_search_20250305"] if is_wish else []
    harness = ProgramHarness(in_order("x"), loop={"accept_as_wish": wishes})
    [trajectory] = harness.run_virtual(program)
    assert len(harness.server.requests) == is_wish
    if is_wish:
        [incident] = trajectory.output.incidents
        assert incident.kind is IncidentKind.DROPPED_PARAMETER
        assert "web_search_20250305" in incident.detail
        [prompt] = prompts(harness.server.requests)
        assert '"add"' in prompt
        assert "web_search" not in prompt


def test_both_apis_lead_one_conversation_and_describe_models_in_their_formats() -> None:
    async def program(claude: Any, client: Any) -> None:
        assert [model.type async for model in claude.models.list()] == ["model"]
        assert (await claude.models.retrieve("claude-x")).id == "claude-x"
        assert [model.object async for model in client.models.list()] == ["model"]
        first = await claude.messages.create(model="claude-x", max_tokens=99, messages=user("?"))
        assert (first.model, first._request_id[:4]) == ("claude-x", "req_")
        history = [*user("?"), assistant(first.content[0].text), *user("more")]
        await client.chat.completions.create(model=MODEL, messages=history)

    assert origins(run_one(program, "x", "y")) == ["prompt", "model", "interaction", "model"]


def test_counted_tokens_are_those_of_the_next_prompt_and_counting_leaves_no_trace() -> None:
    counts: list[int] = []

    async def program(claude: Any) -> None:
        async def ask(messages: Any) -> Any:
            asked = {"model": MODEL, "system": "Be brief.", "tools": [TOOL], "messages": messages}
            counts.append((await claude.messages.count_tokens(**asked)).input_tokens)
            return await claude.messages.create(max_tokens=64, **asked)

        messages: list[Any] = user("1 + 2?")
        for _ in range(3):
            reply = await ask(messages)
            after = [results_of(reply.content)] if reply.stop_reason == "tool_use" else user("More.")
            messages = [*messages, assistant(reply.content), *after]
        await ask([*messages[:-2], assistant("It")])  # continues the text of another turn

    harness = ProgramHarness(in_order(tool_call_reply("add", a=1), "3.", "Yes.", " is."))
    trajectories = harness.run_virtual(program)
    assert counts == [len(request.prompt_ids) for request in harness.server.requests]
    assert origins(trajectories[0].output) == ["prompt", "model", "tool", "model", "interaction", "model"]


def test_edits_of_the_context_are_named_as_dropped_unless_they_keep_everything() -> None:
    async def program(claude: Any) -> None:
        edits = [{"type": "clear_thinking_20251015", "keep": "all"}, {"type": "clear_tool_uses_20250919"}]
        asked: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": 64,
            "context_management": {"edits": edits},
            "betas": ["context-management-2025-06-27"],
        }
        whole = await claude.beta.messages.create(messages=user("?"), **asked)
        history = [*user("?"), assistant(whole.content), *user("more")]
        async with claude.beta.messages.stream(messages=history, **asked) as stream:
            streamed = await stream.get_final_message()
        assert whole.context_management.applied_edits == streamed.context_management.applied_edits == []

    output = run_one(program, "x")
    assert origins(output) == ["prompt", "model", "interaction", "model"]
    [incident] = output.incidents
    assert incident.kind is IncidentKind.DROPPED_PARAMETER
    assert incident.detail == "context_management: the edit 'clear_tool_uses_20250919' is not applied"


def test_a_failed_call_is_told_to_the_model_and_recognised_when_it_comes_back() -> None:
    async def program(claude: Any) -> None:
        messages: list[Any] = user("1 + 2?")
        for content in ("no such file", [{"type": "text", "text": "no such file"}]):
            reply = await claude.messages.create(messages=messages, **ASKED)
            failed = results_of(reply.content, content, is_error=True)
            messages = [*messages, assistant(reply.content), failed]
        await claude.messages.create(messages=messages, **ASKED)

    harness = ProgramHarness(in_order(call_text("add", a=1), call_text("add", a=2), "Sorry."))
    [trajectory] = harness.run_virtual(program)
    assert origins(trajectory.output) == ["prompt", "model", "tool", "model", "tool", "model"]
    assert prompts(harness.server.requests)[-1].count("Error: no such file") == 2


def test_thinking_that_is_left_out_is_still_the_models_turn() -> None:
    async def program(claude: Any) -> None:
        asked: Any = {
            "model": MODEL,
            "max_tokens": 64,
            "thinking": {"type": "adaptive", "display": "omitted"},
        }
        async with claude.messages.stream(messages=user("?"), **asked) as stream:
            streamed = await stream.get_final_message()
        assert [block.type for block in streamed.content] == ["thinking", "text"]
        assert streamed.content[0].thinking == ""
        await claude.messages.create(
            messages=[*user("?"), assistant(streamed.content), *user("more")], **asked
        )

    output = run_one(program, "<think>\nHm.\n</think>\n\nYes.", "Done.")
    assert origins(output) == ["prompt", "model", "interaction", "model"]


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_tool_runner_leads_one_conversation(stream: bool) -> None:
    @beta_async_tool
    async def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    async def program(claude: Any) -> None:
        asked: Any = {"model": "claude", "max_tokens": 256, "messages": user("1 + 2?"), "tools": [add]}
        final = await claude.beta.messages.tool_runner(**asked, stream=stream).until_done()
        assert final.content[-1].text == "It is 3."

    output = run_one(program, tool_call_reply("add", a=1, b=2), "It is 3.")
    assert origins(output) == ["prompt", "model", "tool", "model"]
    assert output.messages[2]["content"] == "3"


class Sum(BaseModel):
    a: int
    note: str = ""


def test_a_message_is_parsed_as_a_model() -> None:
    async def program(claude: Any) -> None:
        asked: Any = {"model": MODEL, "max_tokens": 64, "messages": user("?"), "output_format": Sum}
        expected = Sum(a=1, note="\u00e9 fox")
        assert (await claude.messages.parse(**asked)).parsed_output == expected
        async with claude.messages.stream(**asked) as stream:
            assert (await stream.get_final_message()).parsed_output == expected

    script = in_order('{"a": 1, "note": "\\u00e9 fox"}')
    server = ScriptedServer(script, streams=True, more_abilities=[Ability.JSON_SCHEMA])
    trajectories = ProgramHarness([server]).run_virtual(program)
    assert [each.output.failure for each in trajectories] == [None] * 2


def test_the_application_takes_the_key_in_either_header_and_names_unknown_models_and_fields() -> None:
    asked: Any = {"model": SERVED_MODEL, "max_tokens": 8, "messages": user("?")}
    with serve_app([SpellingServer(text_reply("x"))], api_key="secret") as served:
        url = served.url.removesuffix("/v1")

        def create(*, model: str = SERVED_MODEL, extra: Any = None, **keys: Any) -> Any:
            keys = keys or {"api_key": "secret"}
            with anthropic.Anthropic(base_url=url, max_retries=0, **{"api_key": None, **keys}) as client:
                return client.messages.create(**{**asked, "model": model}, extra_body=extra)

        assert create().content[0].text == "x"
        assert create(auth_token="secret").content[0].text == "x"
        with pytest.raises(anthropic.AuthenticationError) as caught:
            create(api_key="other")
        assert caught.value.body["error"]["type"] == "authentication_error"
        with pytest.raises(anthropic.NotFoundError, match="claude"):
            create(model="claude")
        with pytest.raises(anthropic.BadRequestError, match="unknown parameter 'colour'"):
            create(extra={"colour": 1})
        with pytest.raises(anthropic.BadRequestError, match="did you mean 'thinking'"):
            create(extra={"thinkin": 1})


# -- clients that change the arguments of calls in their record of a conversation, as Claude Code does -----------------

CLAUDE_CODE = {"user-agent": "claude-cli/2.1.197 (external, cli)"}
FIRST = f"Now:{call_text('add', a=1)}"
SECOND = call_text("add", a=2)


def run_rewriting(
    change: Callable[[dict[str, Any]], dict[str, Any]], headers: dict[str, str]
) -> tuple[ProgramHarness, list[Any]]:
    """Run three requests, in which the blocks of the earlier completions are changed."""

    async def program(claude: Any) -> None:
        messages: list[Any] = user("1 + 2?")
        for _ in range(3):
            reply = await claude.messages.create(messages=messages, extra_headers=headers, **ASKED)
            blocks = [change(block.model_dump(exclude_none=True)) for block in reply.content]
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": "3"}
                for block in blocks
                if block["type"] == "tool_use"
            ]
            messages = [*messages, assistant(blocks), {"role": "user", "content": results or "?"}]

    harness = ProgramHarness(in_order(FIRST, SECOND, "Done."))
    return harness, [trajectory.output for trajectory in harness.run_virtual(program)]


def fill_in(block: dict[str, Any]) -> dict[str, Any]:
    return {**block, "input": {**block["input"], "b": 0}} if block["type"] == "tool_use" else block


def test_calls_of_claude_code_are_recognised_by_their_ids() -> None:
    harness, [output] = run_rewriting(fill_in, CLAUDE_CODE)
    assert origins(output) == ["prompt", "model", "tool", "model", "tool", "model"]
    assert [i.kind for i in output.incidents] == [IncidentKind.REWRITTEN_CALL]
    last = prompts(harness.server.requests)[-1]
    assert FIRST in last  # as sampled, not as the client has it
    assert SECOND in last
    _, [unchanged] = run_rewriting(lambda block: block, CLAUDE_CODE)
    assert (len(unchanged.segments), unchanged.incidents) == (6, ())


@pytest.mark.parametrize(
    ("change", "headers"),
    [
        (fill_in, {}),
        (lambda block: {**block, "name": "subtract"} if block["type"] == "tool_use" else block, CLAUDE_CODE),
        (lambda b: {**b, "id": f"other-{b['id']}", "input": {}} if "input" in b else b, CLAUDE_CODE),
        (lambda b: {**b, "text": "Later:"} if b["type"] == "text" else fill_in(b), CLAUDE_CODE),
    ],
    ids=["another client", "name", "id", "text"],
)
def test_other_changes_start_a_new_conversation(change: Any, headers: dict[str, str]) -> None:
    _, [first, *_] = run_rewriting(change, headers)
    assert origins(first) == ["prompt", "model"]


# -- the translation ---------------------------------------------------------------------------------------------------

CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def text_block(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


def chat(messages: Any = None, template: ChatTemplate | None = None, **fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "max_tokens": 8, "messages": messages or user("hi"), **fields}
    return translate_messages(MessagesRequest.read(body), template=template or hermes_template())


def conversation(*blocks: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return conversation_of(chat([{"role": "user", "content": list(blocks)}], **fields).messages)


def test_system_messages_keep_their_place_and_a_billing_header_is_not_shown_to_the_model() -> None:
    header = text_block("x-anthropic-billing-header: cc_version=2.1.197.3b4;")
    system = [header, text_block("one", **CACHED), text_block("two")]
    later = {"role": "system", "content": [text_block("three")]}
    messages = conversation_of(chat([*user("hi"), later], system=system).messages)
    assert [(message["role"], message["content"]) for message in messages] == [
        ("system", "one\ntwo"),
        ("user", "hi"),
        ("system", "three"),
    ]
    assert [message.role for message in chat(system=[header]).messages] == ["user"]


def test_cache_control_is_accepted_at_every_place() -> None:
    result = {"type": "tool_result", "tool_use_id": "c"}
    blocks = [{**result, "content": [text_block("3", **CACHED)], **CACHED}, text_block("x", **CACHED)]
    with_cache = chat([{"role": "user", "content": blocks}], tools=[{**TOOL, **CACHED}], **CACHED)
    plain = [{**result, "content": "3"}, text_block("x")]
    without = chat([{"role": "user", "content": plain}], tools=[TOOL])
    assert conversation_of(with_cache.messages) == conversation_of(without.messages)
    assert with_cache.tools == without.tools


def test_documents_and_search_results_become_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "body"}
    document = {"type": "document", "source": source, "title": "T", "context": "C"}
    result = {"type": "search_result", "title": "S", "source": "url", "content": [text_block("found")]}
    parts = {"type": "document", "source": {"type": "content", "content": [text_block("part")]}}
    [message] = conversation(document, result, parts)
    assert message["content"] == (
        "<document>\nT\nC\nbody\n</document>\n<search_result>\nS\nurl\nfound\n</search_result>\n"
        "<document>\npart\n</document>"
    )


PDF = {"type": "base64", "media_type": "application/pdf", "data": "-"}


@pytest.mark.parametrize(
    ("block", "named"),
    [
        ({"type": "tool_reference", "tool_name": "x"}, "tool_reference"),
        ({"type": "image", "source": {"type": "url", "url": "http://x"}}, r"\[0\].content\[0\].source"),
        ({"type": "document", "source": PDF}, r"messages\[0\].content\[0\].source"),
        (text_block("x", colour="red"), "colour"),
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
        ({"type": "any", "disable_parallel_tool_use": False}, "required", None),
        ({"type": "none"}, "none", None),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
    ],
)
def test_the_choice_of_tools_is_honoured(choice: Any, chosen: str, parallel: bool | None) -> None:
    request = chat(tools=[TOOL], tool_choice=choice)
    assert (request.tool_choice, request.parallel_tool_calls) == (chosen, parallel)


def test_the_output_format_is_a_schema_of_the_completion() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    output_format = {"type": "json_schema", "schema": schema}
    assert '"a"' in chat(output_format=output_format).json_schema
    assert '"a"' in chat(output_config={"format": output_format}).json_schema


SWITCHES_THINKING = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if VARIABLE is defined and not VARIABLE %}{{ '<think></think>' }}{%- endif %}{%- endif %}
"""


@pytest.mark.parametrize("variable", ["enable_thinking", "thinking"])
def test_thinking_is_switched_in_templates_that_can_switch_it(variable: str) -> None:
    template = family(SWITCHES_THINKING.replace("VARIABLE", variable))
    for kind, thinks in (("enabled", True), ("adaptive", True), ("disabled", False)):
        wish = {"thinking": {"type": kind}}
        assert chat(template=template, **wish).chat_template_kwargs == {variable: thinks}
        assert chat(**wish).chat_template_kwargs is None
    assert chat(template=template).chat_template_kwargs is None


def test_effort_is_the_reasoning_effort() -> None:
    knows = family(SWITCHES_THINKING.replace("VARIABLE", "reasoning_effort"))
    assert chat(template=knows, output_config={"effort": "high"}).reasoning_effort == "high"
    assert chat(output_config={"effort": "low"}).reasoning_effort == "low"
    assert chat(output_config={"effort": "high"}).reasoning_effort is None  # as without a wish


def test_a_trailing_assistant_message_is_continued_if_it_is_text() -> None:
    blocks = [text_block("It is")]
    for content in ("It is", blocks):
        assert chat([*user("?"), assistant(content)]).continue_final_message
    call = {"type": "tool_use", "id": "c", "name": "add", "input": {}}
    for content in ([*blocks, call], "", [{"type": "thinking", "thinking": "Hm.", "signature": ""}, *blocks]):
        with pytest.raises(RequestError, match="only text can be continued"):
            chat([*user("?"), assistant(content)])


def test_fields_without_effect_on_the_completion_are_accepted() -> None:
    custom = {"type": "custom", "strict": True, "eager_input_streaming": True, "allowed_callers": ["direct"]}
    fields = {
        "metadata": {"user_id": "x"},
        "service_tier": "auto",
        "inference_geo": "us",
        "speed": "fast",
        "mcp_servers": [],
        "container": None,
        "tools": [{**TOOL, **custom}],
    }
    assert chat(**fields).messages[0].content == "hi"
