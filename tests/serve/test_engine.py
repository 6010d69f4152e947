"""Many concurrent programs on the embedded engine, with a real model."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import openai
import pytest

from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason
from examples.langgraph_math.agent import solve
from tests.engines.common import assert_is_token_exact
from tests.helpers import user
from tests.serve.applications import embedded, tiny_lm
from tests.serve.harness import ADD, MODEL, TEMPERATURE, ProgramHarness, tokens

pytestmark = pytest.mark.slow

NUM_ROWS = 64


async def program(row: Any, *, base_url: str, api_key: str, http_client: Any) -> dict[str, Any]:
    """Run two turns, the second one streamed, and return the received token ids."""
    create = openai.AsyncOpenAI(
        base_url=base_url, api_key=api_key, http_client=http_client
    ).chat.completions.create
    more: dict[str, Any] = {"extra_body": {"return_token_ids": True}, "max_tokens": 12, "tools": [ADD]}
    messages: list[Any] = user("the quick brown fox")
    first = await create(model=MODEL, messages=messages, **more)
    reply = first.choices[0].message
    answers = [
        {"role": "tool", "tool_call_id": call.id, "content": "3"} for call in reply.tool_calls or ()
    ] or user("go on")
    streamed: list[int] = []
    stream = await create(
        model=MODEL, messages=[*messages, reply, *answers], stream=True, **{**more, "logprobs": True}
    )
    async for chunk in stream:
        streamed += chunk.choices[0].model_extra["token_ids"]
    return {"reward": 1.0, "received": [*first.choices[0].token_ids, *streamed]}


@cache
def rolled_out(agent: Any) -> list[Trajectory]:
    """Return the trajectories of 64 concurrent programs on two servers."""
    servers = [embedded(f"embedded-{number}", max_model_len=512, seed=number) for number in range(2)]
    harness = ProgramHarness(servers, prompt_length=400, response_length=100)

    async def scenario() -> list[Any]:
        await harness.manager.pool.start()
        await harness.manager.pool.wake_up()
        try:
            return await harness.run(*[agent] * NUM_ROWS)
        finally:
            await harness.manager.pool.close()

    return asyncio.run(scenario())


@pytest.mark.parametrize("agent", [program, solve])
def test_tokens_and_logprobs_match_the_model(agent: Any) -> None:
    """Check a program on the plain OpenAI client, and an unmodified LangGraph graph."""
    trajectories = rolled_out(agent)
    assert len(trajectories) == NUM_ROWS
    assert [trajectory.output.failure for trajectory in trajectories] == [None] * NUM_ROWS
    assert_is_token_exact(tiny_lm(), trajectories, temperature=TEMPERATURE)


def test_programs_receive_the_token_ids_that_are_trained_on() -> None:
    trajectories = rolled_out(program)
    for trajectory in trajectories:
        output = trajectory.output
        assert (output.stop_reason, output.failure) == (StopReason.ANSWERED, None)
        sampled = output.response_ids[output.response_mask == 1].tolist()
        assert sampled == output.extra_fields["received"]
        assert output.response_logprobs is not None
        assert len(output.response_logprobs) == len(output.response_ids)
    assert len({tuple(tokens(t.output)) for t in trajectories}) > NUM_ROWS // 2
