"""Tests of servers that abort requests for a weight update and resume them afterwards."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_loop.checks import Reference, check_server
from agent_loop.config import ModelConfig, RolloutConfig
from agent_loop.servers.abort_and_resume import AbortAndResumeServer
from agent_loop.servers.base import Ability
from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from agent_loop.servers.factory import create_servers
from agent_loop.servers.scores import TokenScores
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.types import IntArray, SamplingParams, as_token_ids
from tests.servers.tiny_embedded import tiny_model

pytestmark = pytest.mark.virtual_time

PROMPT = as_token_ids([1, 2, 3])
LAST = 40


def counts(request: ScriptedRequest) -> ScriptedReply:
    """Count from the token after the prompt's last one to 40, one token per second."""
    token_ids = list(range(int(request.prompt_ids[-1]) + 1, LAST + 1))
    limit = request.sampling_params.max_tokens
    token_ids = token_ids if limit is None else token_ids[:limit]
    return ScriptedReply(
        token_ids,
        logprobs=[-token / 100 for token in token_ids],
        latency_s=float(len(token_ids)),
        stops=token_ids[-1] == LAST,
    )


class RequiresIdle(ScriptedServer):
    """Server whose weights can only be updated while it has no requests."""

    abilities = ScriptedServer.abilities - {Ability.UPDATE_IN_FLIGHT} | {Ability.WEIGHT_UPDATE}

    async def update_weights(self, weights: object, *, weight_version: int) -> None:
        assert (await self.health()).num_running == 0
        await super().update_weights([], weight_version=weight_version)


class ScoresSlowly(RequiresIdle):
    """Server that scores a text in 3 s, during which its weights must not change."""

    async def score(self, token_ids: IntArray, *, start: int = 1, top_logprobs: int = 0) -> TokenScores:
        version = self._weight_version
        await asyncio.sleep(3)
        assert self._weight_version == version
        return await super().score(token_ids, start=start, top_logprobs=top_logprobs)


async def test_a_weight_update_waits_for_running_scores_and_delays_new_ones() -> None:
    engine = ScoresSlowly(counts, scorer=lambda token_ids: [-1.0] * (len(token_ids) - 1))
    server = AbortAndResumeServer(engine)
    assert Ability.SCORE in server.abilities
    clock = asyncio.get_running_loop().time
    async with asyncio.TaskGroup() as group:
        group.create_task(server.score(PROMPT))
        await asyncio.sleep(1)
        update = group.create_task(server.update_weights([], weight_version=1))
        await asyncio.sleep(1)
        later = group.create_task(server.score(PROMPT, start=2))
    assert update.done()
    assert later.result().logprobs.tolist() == [-1.0]
    assert clock() == 6


@pytest.mark.parametrize("streams", [False, True])
async def test_requests_resume_under_the_new_weights_from_their_tokens(streams: bool) -> None:
    engine = RequiresIdle(counts, streams=streams)
    server = AbortAndResumeServer(engine)
    assert Ability.UPDATE_IN_FLIGHT in server.abilities
    async with asyncio.TaskGroup() as group:
        calls = [
            group.create_task(server.generate(PROMPT, SamplingParams(max_tokens=limit), name))
            for name, limit in (("whole", None), ("limited", 20))
        ]
        await asyncio.sleep(5.5)
        await server.update_weights([], weight_version=1)
        await asyncio.sleep(7.0)
        await server.update_weights([], weight_version=2)
    assert (await server.health()).num_running == 0
    whole, limited = calls[0].result(), calls[1].result()

    assert whole.token_ids == list(range(4, LAST + 1))
    assert whole.stop_reason == "stop"
    assert whole.log_probs == pytest.approx([-token / 100 for token in whole.token_ids])
    assert [chunk.weight_version for chunk in whole.chunks] == [0, 1, 2]
    assert limited.token_ids == list(range(4, 24))
    assert limited.stop_reason == "length"
    assert limited.num_preempted == 2


async def test_a_request_that_its_caller_aborts_is_not_resumed() -> None:
    class SlowUpdates(RequiresIdle):
        async def update_weights(self, weights: object, *, weight_version: int) -> None:
            await asyncio.sleep(10.0)
            await super().update_weights(weights, weight_version=weight_version)

    server = AbortAndResumeServer(SlowUpdates(counts, streams=True))
    async with asyncio.TaskGroup() as group:
        before, during = (
            group.create_task(server.generate(PROMPT, SamplingParams(), name))
            for name in ("before", "during")
        )
        await asyncio.sleep(5.5)
        await server.abort("before")
        group.create_task(server.update_weights([], weight_version=1))
        await asyncio.sleep(1.0)
        await server.abort("during")
    for output in (before.result(), during.result()):
        assert (output.token_ids, output.stop_reason) == ([4, 5, 6, 7, 8], "aborted")


async def test_requests_resume_after_a_failed_update() -> None:
    class FailingUpdate(RequiresIdle):
        async def update_weights(self, weights: object, *, weight_version: int) -> None:
            raise ValueError("wrong shape")

    server = AbortAndResumeServer(FailingUpdate(counts))
    call = asyncio.ensure_future(server.generate(PROMPT, SamplingParams(), "one"))
    await asyncio.sleep(5.5)
    with pytest.raises(ValueError, match="wrong shape"):
        await server.update_weights([], weight_version=1)
    output = await call
    assert (output.token_ids, output.weight_version) == (list(range(4, LAST + 1)), 0)


@pytest.mark.slow
def test_a_wrapped_embedded_engine_passes_the_server_checks() -> None:
    model, reference = (tiny_model(initializer_range=0.06) for _ in range(2))
    server = AbortAndResumeServer(EmbeddedServer(model, config=EmbeddedConfig(max_model_len=160)))
    report = asyncio.run(check_server(server, max_model_len=160, reference=Reference(reference)))
    report.raise_if_failed()
    assert report.named("skipped") == ["a completion under a schema ends where the text is complete"]


@pytest.mark.parametrize(
    ("engine", "on_weight_update", "is_wrapped"),
    [
        ("scripted", "auto", False),
        ("scripted", "abort", True),
        (f"{__name__}:RequiresIdle", "auto", True),
        (f"{__name__}:RequiresIdle", "keep", False),
    ],
)
def test_abilities_and_configuration_decide_whether_a_server_is_wrapped(
    engine: str, on_weight_update: Any, is_wrapped: bool
) -> None:
    script = {"script": f"{__file__}:counts"}
    rollout = RolloutConfig(engine=engine, engine_kwargs=script, on_weight_update=on_weight_update)
    (server,) = create_servers(ModelConfig(), rollout=rollout)
    assert isinstance(server, AbortAndResumeServer) is is_wrapped
