"""vLLM server that the test starts, with a model whose output head is tied to its embedding."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from agent_loop.errors import ServerDied, ServerError
from agent_loop.servers.base import Ability
from agent_loop.servers.vllm import VLLMServer
from agent_loop.types import SamplingParams, TokenChunk, TokenOutput
from tests.engines.common import (
    LETTERS,
    LOG_PROB_TOLERANCE,
    MAX_ATTEMPTS,
    assert_adapters_are_merged,
    assert_are_letters,
    assert_logprobs_are_of_the_allowed_tokens,
    assert_matches_the_reference,
    assert_penalties_give_log_probs_of_the_penalised_logits,
    changed_weights,
    largest_difference,
    load_into,
    load_reference,
    make_model_folder,
    prompts,
)
from tests.engines.vllm_cases import VLLM, kill_engine, started

RESPONSE_LENGTH = 8000
LONG = SamplingParams(max_tokens=RESPONSE_LENGTH - 100, ignore_eos=True)
"""Parameters of requests that outlast an abort, an update or a kill: they take longer than a test waits."""
DEATH_DEADLINE_S = 20.0


class Engine:
    """Server of all tests here, and a reference with the same weights."""

    def __init__(self, server: VLLMServer, runner: asyncio.Runner, path: Path) -> None:
        self.server = server
        self.run = runner.run
        self.path = path
        self.reference = load_reference(path)
        self.version = 0

    async def publish(self, weights: dict[str, Any]) -> None:
        """Publish new weights to the engine. The reference keeps the old weights."""
        self.version += 1
        await self.server.update_weights(list(weights.items()), weight_version=self.version)


async def until_running(server: VLLMServer, count: int) -> None:
    """Wait until `count` requests are in the batch. Polls, because the engine's process reports no events."""
    async with asyncio.timeout(60):
        while (health := await server.health()).num_running < count:
            assert health.is_alive
            await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Generator[Engine]:
    path = make_model_folder(
        tmp_path_factory.mktemp("models") / "tied", is_tied=True, max_position_embeddings=2 * RESPONSE_LENGTH
    )
    server = VLLM.server(path, rollout__response_length=RESPONSE_LENGTH)
    assert isinstance(server, VLLMServer)
    began = time.monotonic()
    with started(server) as runner:
        print(f"vLLM started in {time.monotonic() - began:.1f} s")
        yield Engine(server, runner, path)


def test_logprobs_under_a_schema_are_of_the_allowed_tokens(engine: Engine) -> None:
    engine.run(
        assert_logprobs_are_of_the_allowed_tokens(
            engine.server, engine.reference, engine.path, temperature=0.6
        )
    )


def test_penalties_give_log_probs_of_the_penalised_logits(engine: Engine) -> None:
    engine.run(assert_penalties_give_log_probs_of_the_penalised_logits(engine.server, engine.reference))


def test_a_weight_update_in_the_middle_keeps_the_position_in_the_schema(engine: Engine) -> None:
    params = SamplingParams(json_schema=LETTERS, max_tokens=150)

    async def main(seed: int) -> list[TokenOutput]:
        first, *others = prompts(8, seed=13)
        weights = changed_weights(engine.reference, seed=seed)
        chunks: list[TokenChunk] = []
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(engine.server.generate(prompt, params, f"schema-update-{number}"))
                for number, prompt in enumerate(others)
            ]
            async for chunk in engine.server.stream(first, params, "schema-update"):
                if not chunks:
                    await engine.publish(weights)
                chunks.append(chunk)
        load_into(engine.reference, weights)
        return [TokenOutput.from_chunks(chunks), *(task.result() for task in tasks)]

    for attempt in range(MAX_ATTEMPTS):  # a schema bounds the completion, which may end before the update
        outputs = engine.run(main(14 + attempt))
        assert_are_letters(engine.path, outputs)
        if any(len(output.chunks) == 2 for output in outputs):
            return
    pytest.fail("no update took place in the middle of a completion")


def test_an_abort_returns_the_tokens_so_far_even_right_after_the_request(engine: Engine) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(engine.server.generate(prompts(1)[0], LONG, "aborted"))
            await asyncio.sleep(0)
            await engine.server.abort("aborted")
        assert task.result().stop_reason == "aborted"
        chunks = []
        async for chunk in engine.server.stream(prompts(1)[0], LONG, "aborted"):
            chunks.append(chunk)
            if len(chunks) == 5:
                await engine.server.abort("aborted")
        output = TokenOutput.from_chunks(chunks)
        assert output.stop_reason == "aborted"
        assert 5 <= len(output.token_ids) < LONG.max_tokens
        difference = largest_difference(engine.reference, prompts(1)[0], output, temperature=1.0)
        assert difference < LOG_PROB_TOLERANCE

    engine.run(main())


def test_completions_match_the_merged_model_after_updates_of_adapters(engine: Engine) -> None:
    engine.run(assert_adapters_are_merged(engine.server, engine.reference, first_version=engine.version + 1))
    engine.version += 2
    engine.run(engine.publish(dict(engine.reference.named_parameters())))


def test_a_server_that_is_asleep_refuses_requests_and_accepts_weights(engine: Engine) -> None:
    """A CPU build frees no memory while asleep, and does not claim the ability."""

    async def main() -> None:
        assert Ability.SLEEP not in engine.server.abilities
        await engine.server.sleep()
        with pytest.raises(ServerError, match="asleep"):
            await engine.server.generate(prompts(1)[0], LONG, "asleep")
        weights = changed_weights(engine.reference, seed=41)
        await engine.publish(weights)
        load_into(engine.reference, weights)
        await engine.server.wake_up()
        await assert_matches_the_reference(engine.server, engine.reference, seed=41)

    engine.run(main())


def test_all_64_requests_fail_with_their_names_when_the_engine_is_killed(engine: Engine) -> None:
    async def main() -> None:
        names = [f"victim-{index}" for index in range(64)]
        tasks = [asyncio.ensure_future(engine.server.generate(prompts(1)[0], LONG, name)) for name in names]
        await until_running(engine.server, 64)
        began = time.monotonic()
        kill_engine(engine.server._process.pid)
        await asyncio.wait(tasks, timeout=DEATH_DEADLINE_S)
        print(f"all requests had failed after {time.monotonic() - began:.2f} s")
        for name, task in zip(names, tasks, strict=True):
            error = task.exception()
            assert isinstance(error, ServerDied)
            assert (error.server, error.request_id) == ("vllm-0", name)
            assert "its last log lines" in str(error)
        with pytest.raises(ServerDied):
            await engine.server.update_weights(
                list(changed_weights(engine.reference, seed=51).items()), weight_version=100
            )
        assert not (await engine.server.health()).is_alive
        await engine.server.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    engine.run(main())
