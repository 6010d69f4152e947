"""Tests of abort, cancellation, sleep, failure and close of the embedded server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from agent_loop.errors import ServerError
from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from tests.servers.tiny_embedded import (
    GREEDY,
    LONG,
    full_forward_logprobs,
    generate_all,
    joined,
    random_prompt,
    serving,
    tiny_model,
    wait_until_decoded,
    weights_of,
)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


async def test_an_aborted_queued_request_returns_no_tokens(model: Any) -> None:
    async with serving(model, max_slots=1) as server, asyncio.TaskGroup() as group:
        running = group.create_task(server.generate(random_prompt(9), LONG, "running"))
        waiting = group.create_task(server.generate(random_prompt(9), LONG, "waiting"))
        await wait_until_decoded(server, 1)
        await server.abort("waiting")
        output = await waiting
        assert (output.token_ids, output.log_probs, output.stop_reason) == ([], [], "aborted")
        assert not running.done()


async def test_requests_beyond_the_slots_are_queued_in_order(model: Any) -> None:
    async with serving(model, max_slots=2) as server, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(server.generate(random_prompt(5, seed=i), LONG, f"r{i}")) for i in range(5)
        ]
        await wait_until_decoded(server, 1)
        health = await server.health()
        assert (health.num_running, health.num_waiting) == (2, 3)
        for task in tasks[:2]:
            await task
        assert not tasks[4].done(), "first come, first served"


async def test_sleep_frees_the_cache_and_wake_up_allocates_it_again(model: Any) -> None:
    other = tiny_model(seed=1)

    async with serving(model) as server:
        full = server.cache_bytes
        assert full == 2 * 2 * 64 * 256 * 2 * 16 * 4, (
            "keys and values, layers, slots, length, heads, dim, bytes"
        )
        before = await server.generate(random_prompt(30), GREEDY, "a")
        await server.sleep()
        await server.sleep()
        assert server.cache_bytes == 0
        with pytest.raises(ServerError, match="asleep; call wake_up first"):
            await server.generate(random_prompt(30), GREEDY, "a")
        await server.wake_up()
        await server.wake_up()
        assert server.cache_bytes == full
        assert await server.generate(random_prompt(30), GREEDY, "a") == before
        assert server.stats.reused_tokens == 0
        await server.sleep()
        await server.update_weights(weights_of(other).items(), weight_version=1)
        await server.wake_up()
        after = await server.generate(random_prompt(30), GREEDY, "a")
        expected = full_forward_logprobs(other, random_prompt(30), after.token_ids)
        assert after.log_probs == pytest.approx(expected, abs=1e-4)


async def test_nan_fails_only_its_own_request_and_does_not_stay_in_a_slot(model: Any) -> None:
    weights = weights_of(model)
    weights["model.embed_tokens.weight"][5] = float("nan")
    good = [prompt for i in range(4) if 5 not in (prompt := random_prompt(6 + i, seed=i + 20))]
    bad = joined(random_prompt(40, seed=3), [5], random_prompt(9, seed=4))

    async with serving(model, max_slots=len(good) + 1) as server:
        expected = await generate_all(server, good, GREEDY)
        await server.update_weights(weights.items(), weight_version=1)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(server.generate(p, GREEDY, f"r{i}")) for i, p in enumerate(good)]
            with pytest.raises(ServerError, match="logits are NaN or infinite after 50 tokens"):
                await server.generate(bad, GREEDY, "bad")
        assert [t.result().token_ids for t in tasks] == [e.token_ids for e in expected]
        # Again with all slots in use, including the one that had NaN.
        again = await generate_all(server, [*good, good[0][1:]], GREEDY, prefix="again")
        assert [o.token_ids for o in again[:-1]] == [e.token_ids for e in expected]


def failing_model() -> tuple[Any, list[bool]]:
    """Return a model and a list. The model's forward raises as soon as the list is not empty."""
    model: Any = tiny_model()
    switch: list[bool] = []

    def fail(*_: Any) -> None:
        if switch:
            raise RuntimeError("out of memory")

    model.model.layers[1].register_forward_pre_hook(fail)
    return model, switch


async def test_a_failing_engine_fails_all_current_and_later_requests() -> None:
    model, switch = failing_model()

    server = EmbeddedServer(model, config=EmbeddedConfig(max_model_len=256, max_slots=2))
    tasks = [asyncio.create_task(server.generate(random_prompt(9, seed=i), LONG, f"r{i}")) for i in range(4)]
    await wait_until_decoded(server, 1)
    switch.append(True)
    for i, task in enumerate(tasks):
        with pytest.raises(ServerError, match=f"request r{i}: the engine failed.*out of memory") as caught:
            await task
        assert isinstance(caught.value.__cause__, RuntimeError)
    health = await server.health()
    assert not health.is_alive
    assert "out of memory" in health.detail
    with pytest.raises(ServerError, match="out of memory"):
        await server.generate(random_prompt(9), GREEDY, "later")
    with pytest.raises(ServerError, match="out of memory"):
        await server.sleep()
    await server.abort("r0")
    assert server.cache_bytes == 0
    await server.close()


async def test_an_engine_that_fails_in_a_control_call_raises_in_the_caller() -> None:
    model = tiny_model()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory left")

    server = EmbeddedServer(model, config=EmbeddedConfig(max_model_len=256))
    await server.sleep()
    model.to = fail
    with pytest.raises(ServerError, match="the engine failed with RuntimeError: no memory left"):
        await server.wake_up()
    assert not (await server.health()).is_alive


async def test_close_fails_pending_requests_and_restores_the_model() -> None:
    model = tiny_model()

    server = EmbeddedServer(model, config=EmbeddedConfig(max_model_len=256, max_slots=1))
    output = await server.generate(random_prompt(9), GREEDY, "a")
    tasks = [asyncio.create_task(server.generate(random_prompt(9, seed=i), LONG, f"r{i}")) for i in range(3)]
    await wait_until_decoded(server, 22)
    await server.close()
    for task in tasks:
        with pytest.raises(ServerError, match="the server was closed"):
            await task
    assert not (await server.health()).is_alive
    with pytest.raises(ServerError, match="the server was closed"):
        await server.generate(random_prompt(9), GREEDY, "a")
    await server.close()
    output = output
    expected = full_forward_logprobs(model, random_prompt(9), output.token_ids)
    assert output.log_probs == pytest.approx(expected, abs=1e-4)


def test_a_server_works_after_its_first_event_loop_has_closed(model: Any) -> None:
    config = EmbeddedConfig(max_model_len=256, max_slots=1)
    server = EmbeddedServer(tiny_model(), config=config)

    async def leave_running() -> None:
        asyncio.get_running_loop().create_task(server.generate(random_prompt(9), LONG, "a"))
        await wait_until_decoded(server, 1)

    async def use_and_close() -> None:
        assert len((await server.generate(random_prompt(9), GREEDY, "b")).token_ids) == 20
        await server.close()

    asyncio.run(leave_running())
    asyncio.run(use_and_close())


EXIT_SCRIPT = """
import asyncio
from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from agent_loop.types import SamplingParams
from tests.servers.tiny_embedded import random_prompt, tiny_model, wait_until

server = EmbeddedServer(tiny_model(), config=EmbeddedConfig(max_model_len=512))

async def main():
    params = SamplingParams(max_tokens=500)
    tasks = [asyncio.create_task(server.generate(random_prompt(9), params, f"r{i}")) for i in range(20)]
    await wait_until(server, lambda: server.stats.decoded_tokens > 0)
    asyncio.get_running_loop().stop()

asyncio.new_event_loop().create_task(main()).get_loop().run_forever()
print("left")
"""


@pytest.mark.slow
def test_the_interpreter_exits_while_completions_run() -> None:
    done = subprocess.run([sys.executable, "-c", EXIT_SCRIPT], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "left"), done.stderr
