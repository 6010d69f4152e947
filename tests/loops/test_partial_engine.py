"""Trajectories that are cancelled and resumed on the embedded engine."""

from __future__ import annotations

import asyncio
import copy

import numpy as np

from agent_loop.episode.limits import EpisodeLimits
from agent_loop.loops.base import LoopContext
from agent_loop.loops.partial import AsyncPartialToolAgentLoop
from agent_loop.servers.embedded import EmbeddedServer
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.trajectory import AgentLoopOutput
from agent_loop.types import StopReason
from tests.helpers import hermes_template, small_tokenizer, user
from tests.servers.tiny_embedded import (
    full_forward_logprobs,
    serving,
    tiny_model,
    wait_until_decoded,
    weights_of,
)

MODEL = tiny_model(vocab_size=len(small_tokenizer()))
OTHER = tiny_model(vocab_size=len(small_tokenizer()), seed=1)
GREEDY = {"temperature": 0}


def make_loop(server: EmbeddedServer) -> AsyncPartialToolAgentLoop:
    return AsyncPartialToolAgentLoop(
        LoopContext(
            server_manager=AsyncLLMServerManager([server]),
            template=hermes_template(),
            limits=EpisodeLimits(prompt_length=100, response_length=120),
        )
    )


async def cut_after(num_tokens: int, server: EmbeddedServer) -> AgentLoopOutput:
    event = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(
            make_loop(server).run(GREEDY, cancellation_event=event, raw_prompt=user("Speak."))
        )
        await wait_until_decoded(server, num_tokens)
        event.set()
    return running.result()


def test_an_aborted_completion_resumes_with_the_same_tokens_and_logprobs() -> None:
    async def scenario() -> tuple[AgentLoopOutput, AgentLoopOutput, AgentLoopOutput]:
        async with serving(MODEL) as server:
            part = await cut_after(20, server)
            output = await make_loop(server).run(GREEDY, partial_output=part, raw_prompt=user("Speak."))
            return part, output, await make_loop(server).run(GREEDY, raw_prompt=user("Speak."))

    part, output, whole = asyncio.run(scenario())
    assert part.stop_reason is StopReason.CANCELLED
    assert 20 <= len(part.response_ids) < 120
    assert output.response_ids.tolist() == whole.response_ids.tolist()
    assert len(whole.response_ids) == 120
    assert output.response_logprobs is not None
    np.testing.assert_allclose(output.response_logprobs, whole.response_logprobs, atol=1e-4)


def test_under_new_weights_each_token_has_the_logprob_and_the_version_of_the_model_that_sampled_it() -> None:
    async def scenario() -> tuple[AgentLoopOutput, AgentLoopOutput]:
        async with serving(copy.deepcopy(MODEL)) as server:
            part = await cut_after(20, server)
            await server.update_weights(weights_of(OTHER).items(), weight_version=3)
            return part, await make_loop(server).run(GREEDY, partial_output=part, raw_prompt=user("Speak."))

    part, output = asyncio.run(scenario())
    num_old = len(part.response_ids)
    ids = output.response_ids.tolist()
    assert output.weight_versions.tolist() == [0] * num_old + [3] * (len(ids) - num_old)
    expected = [
        *full_forward_logprobs(MODEL, output.prompt_ids, ids)[:num_old],
        *full_forward_logprobs(OTHER, output.prompt_ids, ids)[num_old:],
    ]
    assert output.response_logprobs is not None
    np.testing.assert_allclose(output.response_logprobs, expected, atol=1e-4)
