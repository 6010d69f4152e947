"""Tests of chat completions of servers and of the pool, without a port."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator

import pytest
from openai.types.chat import ChatCompletion

from agent_loop.errors import ChatTemplateError, RequestError, ServerError
from agent_loop.serve.chat import chat_completion, sample_chat
from agent_loop.serve.chat_requests import ChatCompletionRequest
from agent_loop.serve.completions import ReplyChunk
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from agent_loop.testing import run_virtual
from tests.helpers import encoded, hermes_template, text_reply, tool_call_reply, user

pytestmark = pytest.mark.virtual_time

TEMPLATE = hermes_template()
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def request(**fields) -> dict:
    return {"model": "any", "messages": user("hi"), **fields}


def chunks_of(manager: AsyncLLMServerManager, **fields) -> AsyncGenerator[ReplyChunk]:
    asked = ChatCompletionRequest.read(request(stream=True, **fields))
    return sample_chat(asked, template=TEMPLATE, sampler=manager)


async def test_a_server_and_a_pool_return_the_same_completion() -> None:
    server = ScriptedServer([tool_call_reply("add", a=1)])
    for who in (server, AsyncLLMServerManager([server])):
        reply = await chat_completion(request(tools=TOOLS), template=TEMPLATE, sampler=who)
        assert ChatCompletion.model_validate(reply).choices[0].finish_reason == "tool_calls"
        assert server.num_sessions == 0


async def test_the_callers_session_stays_open_and_other_sessions_end() -> None:
    server = ScriptedServer(lambda _: text_reply("Yes."))
    manager = AsyncLLMServerManager([server])
    reply = await chat_completion(request(session_id="mine", n=3), template=TEMPLATE, sampler=manager)
    assert [choice["message"]["content"] for choice in reply["choices"]] == ["Yes."] * 3
    assert (server.num_sessions, manager.pool.balancer.num_sessions) == (1, 1)
    manager.end_session("mine")
    assert (server.num_sessions, manager.pool.balancer.num_sessions) == (0, 0)


async def test_one_of_several_that_fails_fails_the_request_and_frees_the_others() -> None:
    def script(_: object) -> ScriptedReply:
        return (
            ScriptedReply([5], error="broken")
            if len(server.requests) == 2
            else text_reply("a", latency_s=math.inf)
        )

    server = ScriptedServer(script)
    manager = AsyncLLMServerManager([server])
    with pytest.raises(ServerError, match="broken"):
        await chat_completion(request(n=3), template=TEMPLATE, sampler=manager)
    assert (manager.pool.balancer.num_leases, server.num_running) == (0, 0)


async def test_an_aborted_completion_is_an_error() -> None:
    async def expect_abort(server: ScriptedServer) -> str:
        with pytest.raises(ServerError) as caught:
            await chat_completion(request(session_id="mine"), template=TEMPLATE, sampler=server)
        return str(caught.value)

    server = ScriptedServer([text_reply("one two", latency_s=10)])
    async with asyncio.TaskGroup() as group:
        task = group.create_task(expect_abort(server))
        await asyncio.sleep(1)
        await server.abort("mine")
    assert "aborted" in task.result()


def test_a_special_token_that_stops_the_model_is_not_shown_and_others_are() -> None:
    def content_of(tokens: str, **fields) -> str | None:
        server = ScriptedServer([ScriptedReply(encoded(tokens))])
        reply = run_virtual(server.chat_completion(request(**fields), template=TEMPLATE))
        return reply["choices"][0]["message"]["content"]

    assert content_of("Yes.<|endoftext|>") == "Yes."
    assert content_of("Yes.<|im_end|>") == "Yes."
    assert content_of("A <|im_start|> B<|im_end|>") == "A <|im_start|> B"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            {"role": "user", "content": [{"type": "input_audio"}]},
            r"messages\[0\].content\[0\]: type input_audio",
        ),
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
