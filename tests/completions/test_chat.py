"""Tests of chat completions of servers and of the pool, without a port."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing

import pytest

from agent_loop.errors import ChatTemplateError, RequestError, ServerError, ServerTimeout
from agent_loop.serve.chat import chat_completion, stream_chat_completion
from agent_loop.serve.chat_requests import ChatCompletionRequest
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from agent_loop.testing import run_virtual
from tests.helpers import encoded, hermes_template, text_reply, tool_call_reply, user

TEMPLATE = hermes_template()
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def request(**fields) -> dict:
    return {"model": "any", "messages": user("hi"), **fields}


@pytest.mark.parametrize("make", [lambda server: server, lambda server: AsyncLLMServerManager([server])])
def test_a_server_and_a_pool_return_the_same_completion(make) -> None:
    async def scenario() -> None:
        server = ScriptedServer([tool_call_reply("add", a=1)])
        who = make(server)
        reply = await chat_completion(request(tools=TOOLS), template=TEMPLATE, sampler=who)
        assert reply.choices[0].finish_reason == "tool_calls"
        parts = [
            part
            async for part in stream_chat_completion(request(tools=TOOLS), template=TEMPLATE, sampler=who)
        ]
        assert (
            parts[-1].choices[0].delta.tool_calls[0].function
            == reply.choices[0].message.tool_calls[0].function
        )
        assert server.num_sessions == 0

    run_virtual(scenario())


def test_the_callers_session_stays_open_and_other_sessions_end() -> None:
    async def scenario() -> None:
        server = ScriptedServer(lambda _: text_reply("Yes."))
        pool = AsyncLLMServerManager([server])
        reply = await chat_completion(request(session_id="mine", n=3), template=TEMPLATE, sampler=pool)
        assert [choice.message.content for choice in reply.choices] == ["Yes."] * 3
        assert (server.num_sessions, pool.balancer.num_sessions) == (1, 1)
        pool.end_session("mine")
        assert (server.num_sessions, pool.balancer.num_sessions) == (0, 0)

    run_virtual(scenario())


def test_closing_a_stream_releases_the_lease() -> None:
    async def scenario() -> None:
        server = ScriptedServer(
            lambda r: text_reply("No.", latency_s=0.0 if len(server.requests) == 1 else math.inf)
        )
        pool = AsyncLLMServerManager([server])
        async with aclosing(stream_chat_completion(request(n=4), template=TEMPLATE, sampler=pool)) as parts:
            await anext(parts)
            assert server.num_running == 3
        assert (pool.balancer.num_leases, pool.balancer.num_sessions, server.num_running) == (0, 0, 0)

    run_virtual(scenario())


def test_a_stream_that_hangs_ends_at_the_pools_time_limit() -> None:
    async def scenario() -> None:
        server = ScriptedServer([text_reply("No.", latency_s=math.inf)])
        pool = AsyncLLMServerManager([server], request_timeout_s=60)
        with pytest.raises(ServerTimeout):
            async for _ in stream_chat_completion(request(), template=TEMPLATE, sampler=pool):
                pass
        assert asyncio.get_running_loop().time() == pytest.approx(60)
        assert (pool.balancer.num_leases, server.num_running) == (0, 0)

    run_virtual(scenario())


def test_one_of_several_that_fails_fails_the_request_and_frees_the_others() -> None:
    async def scenario() -> None:
        def script(_: object) -> ScriptedReply:
            return (
                ScriptedReply([5], error="broken")
                if len(server.requests) == 2
                else text_reply("a", latency_s=math.inf)
            )

        server = ScriptedServer(script)
        pool = AsyncLLMServerManager([server])
        with pytest.raises(ServerError, match="broken"):
            await chat_completion(request(n=3), template=TEMPLATE, sampler=pool)
        assert (pool.balancer.num_leases, server.num_running) == (0, 0)

    run_virtual(scenario())


def test_an_aborted_completion_is_an_error() -> None:
    async def scenario() -> None:
        server = ScriptedServer([text_reply("one two", latency_s=10)])
        async with asyncio.TaskGroup() as group:
            task = group.create_task(expect_abort(server))
            await asyncio.sleep(1)
            await server.abort("mine")
        assert "aborted" in task.result()

    async def expect_abort(server: ScriptedServer) -> str:
        with pytest.raises(ServerError) as caught:
            await chat_completion(request(session_id="mine"), template=TEMPLATE, sampler=server)
        return str(caught.value)

    run_virtual(scenario())


def test_a_special_token_that_stops_the_model_is_not_shown_and_others_are() -> None:
    def content_of(tokens: str, **fields) -> str | None:
        server = ScriptedServer([ScriptedReply(encoded(tokens))])
        reply = run_virtual(chat_completion(request(**fields), template=TEMPLATE, sampler=server))
        return reply.choices[0].message.content

    assert content_of("Yes.<|endoftext|>") == "Yes."
    assert content_of("Yes.<|im_end|>") == "Yes."
    assert content_of("A <|im_start|> B<|im_end|>") == "A <|im_start|> B"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": [{"type": "input_audio"}]}, r"messages\[0\].content\[0\]: type is"),
        (
            {"role": "user", "content": "x", "tool_calls": [{"id": "1"}]},
            "only assistant messages may have tool calls",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            r"tool_calls\[0\].function.arguments is not valid JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]},
            "JSON object",
        ),
        ({"role": "assistant", "tool_calls": [{}]}, "not a function call with a name"),
    ],
)
def test_invalid_messages_are_refused_with_the_reason(message: dict, words: str) -> None:
    server = ScriptedServer([text_reply("Yes.")])
    with pytest.raises(RequestError, match=words):
        run_virtual(chat_completion(request(messages=[message]), template=TEMPLATE, sampler=server))
    assert not server.requests


def test_a_conversation_that_the_template_refuses_is_an_error_of_the_template() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    asked = request(messages=[{"role": "user", "content": [image]}])
    with pytest.raises(ChatTemplateError, match="no processor"):
        run_virtual(ScriptedServer([text_reply("Yes.")]).chat_completion(asked, template=TEMPLATE))


def test_text_parts_are_one_text_and_arguments_are_mappings() -> None:
    server = ScriptedServer([text_reply("Yes.")])
    call = {"type": "function", "id": "c", "function": {"name": "add", "arguments": '{"b": 1, "a": 2}'}}
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    asked = request(
        messages=[{"role": "user", "content": parts}, {"role": "assistant", "tool_calls": [call]}]
    )
    run_virtual(chat_completion(asked, template=TEMPLATE, sampler=server))
    expected = [
        *user("one\ntwo"),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "add", "arguments": {"b": 1, "a": 2}}}],
        },
    ]
    assert server.requests[0].prompt_ids.tolist() == TEMPLATE.open(expected).tolist()


def test_an_invalid_request_is_refused_with_the_reason() -> None:
    read = ChatCompletionRequest.read(request(stop="x", n=2, max_tokens=5, seed=1))
    assert ChatCompletionRequest.read(read) is read
    assert read.sampling_params(max_tokens=5, choice=1).seed == 2
    with pytest.raises(RequestError, match="messages is missing") as caught:
        ChatCompletionRequest.read({"model": "any"})
    assert caught.value.param == "messages"
