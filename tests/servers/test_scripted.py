"""Tests of `ScriptedServer`, of server classes and of sampling parameters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest

from agent_loop.errors import SamplingParamsError
from agent_loop.servers.base import Ability
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.types import SamplingParams, TokenChunk, TokenOutput

pytestmark = pytest.mark.virtual_time

IDS = np.array([1, 2], np.int32)


def ask(server: ScriptedServer, **params: object) -> TokenOutput:
    return run_virtual(server.generate(IDS, SamplingParams.parse(params), "s"))


def test_a_reply_ends_at_its_last_token_at_a_stop_token_or_at_max_tokens() -> None:
    reply = ScriptedReply([5, 6, 7])
    assert ask(ScriptedServer([reply])).stop_reason == "stop"
    assert ask(ScriptedServer([reply]), max_tokens=2) == TokenOutput([5, 6], [-0.5, -0.5], "length")
    assert ask(ScriptedServer([reply]), stop_token_ids=[6]) == TokenOutput([5, 6], [-0.5, -0.5], "stop")


def test_each_turn_of_a_session_gets_the_next_reply_of_the_script() -> None:
    async def scenario() -> list[list[int]]:
        manager = AsyncLLMServerManager([ScriptedServer([ScriptedReply([1]), ScriptedReply([2])])])
        return [
            (await manager.generate(session, prompt_ids=[0], sampling_params={})).token_ids
            for session in ("a", "b", "a", "b")
        ]

    assert run_virtual(scenario()) == [[1], [1], [2], [2]]


def test_an_aborted_request_returns_its_tokens_so_far() -> None:
    async def scenario() -> TokenOutput:
        server = ScriptedServer([ScriptedReply([1, 2, 3, 4], latency_s=4.0)])
        async with asyncio.TaskGroup() as group:
            call = group.create_task(server.generate(IDS, SamplingParams(), "s"))
            await asyncio.sleep(2.5)
            await server.abort("s")
        assert server.num_running == 0
        return call.result()

    assert run_virtual(scenario()) == TokenOutput([1, 2], [-0.5, -0.5], "aborted")


async def test_a_completion_across_a_weight_update_has_two_versions() -> None:
    server = ScriptedServer([ScriptedReply([1, 2, 3, 4], latency_s=4.0)])
    async with asyncio.TaskGroup() as group:
        call = group.create_task(server.generate(IDS, SamplingParams(), "s"))
        await asyncio.sleep(2.5)
        await server.update_weights([], weight_version=7)
    completion = call.result()
    assert [(c.weight_version, len(c.token_ids)) for c in completion.chunks] == [(0, 2), (7, 2)]
    assert completion.weight_version == 7


@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"temperature": -1}, "0 \\(greedy\\) or more"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": "hot"}, "give numbers"),
        ({"top_p": 0}, "more than 0"),
        ({"top_k": 0}, "-1 \\(no limit\\)"),
        ({"max_tokens": 0}, "at least 1"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5; give 0"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"json_schema": "{"}, "which is not JSON"),
    ],
)
def test_invalid_sampling_parameters_are_refused(params: dict, complaint: str) -> None:
    with pytest.raises(SamplingParamsError, match=complaint):
        SamplingParams.parse(params)


@pytest.mark.parametrize(
    ("params", "ability"),
    [
        ({"json_schema": '{"type": "object"}'}, Ability.JSON_SCHEMA),
        ({"presence_penalty": 0.5}, Ability.PENALTIES),
        ({"frequency_penalty": -0.5}, Ability.PENALTIES),
        ({"repetition_penalty": 1.1}, Ability.PENALTIES),
        ({"min_p": 0.1}, Ability.MIN_P),
        ({"top_logprobs": 2}, Ability.TOP_LOGPROBS),
    ],
)
async def test_a_parameter_is_refused_by_a_server_without_the_ability_for_it(
    params: dict, ability: Ability
) -> None:
    script = [ScriptedReply([1, 2])]
    able = ScriptedServer(script, more_abilities=[ability])
    assert (await able.generate(IDS, SamplingParams(**params), "s")).token_ids == [1, 2]
    unable = ScriptedServer(script)
    with pytest.raises(SamplingParamsError, match=f"use a server with the ability '{ability.value}'"):
        await unable.generate(IDS, SamplingParams(**params), "s")
    assert not unable.requests


async def test_a_pool_refuses_for_servers_that_ignore_parameters_they_do_not_know() -> None:
    class Careless(ScriptedServer):
        async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[TokenChunk]:
            yield TokenChunk([1], [-0.5], stop_reason="stop")

    manager = AsyncLLMServerManager([Careless([])])
    with pytest.raises(SamplingParamsError, match="json_schema is"):
        await manager.generate("s", prompt_ids=IDS, sampling_params={"json_schema": "{}"})


@pytest.mark.parametrize("streams", [False, True])
async def test_a_scripted_reply_has_more_values_for_the_tokens_that_are_sampled(streams: bool) -> None:
    reply = ScriptedReply([1, 2, 3], extras={"rank": np.array([5, 6, 7])})
    server = ScriptedServer([reply], streams=streams)
    parts = server.stream(IDS, SamplingParams(max_tokens=2), "s")
    output = TokenOutput.from_chunks([part async for part in parts])
    assert output.token_ids == [1, 2]
    assert output.extras["rank"].tolist() == [5, 6]
