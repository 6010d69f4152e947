"""Tests of the official clients' helpers that parse completions, run tools and send further requests by themselves."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from anthropic import beta_async_tool
from pydantic import BaseModel

from agent_loop.servers.base import Ability
from agent_loop.servers.scripted import Script, ScriptedServer
from tests.helpers import text_reply, tool_call_reply, user
from tests.serve.harness import ProgramHarness, in_order, origins


class Sum(BaseModel):
    """Add two numbers."""

    a: int
    b: int
    note: str = ""


SUM = '{"a": 1, "b": 2, "note": "\\u00e9 fox"}'
EXPECTED = Sum(a=1, b=2, note="\u00e9 fox")


def json_server(script: Script) -> ScriptedServer:
    return ScriptedServer(script, streams=True, more_abilities=[Ability.JSON_SCHEMA])


def anthropic_client(anthropic_base_url: str, api_key: str, http_client: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=anthropic_base_url, api_key=api_key, http_client=http_client, max_retries=0
    )


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_tool_runner_leads_one_conversation(stream: bool) -> None:
    sums: list[int] = []

    @beta_async_tool
    async def add(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        sums.append(a + b)
        return str(a + b)

    async def program(row: Any, *, anthropic_base_url: str, api_key: str, http_client: Any) -> None:
        client = anthropic_client(anthropic_base_url, api_key, http_client)
        runner = client.beta.messages.tool_runner(
            model="claude", max_tokens=256, messages=user("1 + 2?"), tools=[add], stream=stream
        )
        final = await runner.until_done()
        assert final.content[-1].text == "It is 3."

    replies = [tool_call_reply("add", a=1, b=2), text_reply("It is 3.")]
    [trajectory] = ProgramHarness(in_order(*replies)).run_virtual(program)
    assert origins(trajectory.output) == ["prompt", "model", "tool", "model"]
    assert sums == [3]


def test_a_message_is_parsed_as_a_model() -> None:
    async def program(row: Any, *, anthropic_base_url: str, api_key: str, http_client: Any) -> None:
        client = anthropic_client(anthropic_base_url, api_key, http_client)
        asked: Any = {
            "model": "claude",
            "max_tokens": 256,
            "messages": user("1 + 2?"),
            "output_format": Sum,
        }
        message = await client.messages.parse(**asked)
        assert message.parsed_output == EXPECTED
        async with client.messages.stream(**asked) as stream:
            assert (await stream.get_final_message()).parsed_output == EXPECTED

    first, second = ProgramHarness([json_server(in_order(text_reply(SUM)))]).run_virtual(program)
    assert origins(first.output) == origins(second.output) == ["prompt", "model"]
