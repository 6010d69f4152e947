"""Tests of the embedded server: abort, queue, sleep, weight updates, failure and close."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest
import torch

from agent_loop.errors import ServerError, WeightsError
from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from tests.servers.tiny_embedded import (
    GREEDY,
    LONG,
    assert_exact,
    generate_all,
    joined,
    random_prompt,
    serving,
    shared_model,
    tiny_model,
    wait_until_decoded,
    weights_of,
)


async def test_an_aborted_queued_request_returns_no_tokens() -> None:
    async with serving(max_slots=1) as server, asyncio.TaskGroup() as group:
        running = group.create_task(server.generate(random_prompt(9), LONG, "running"))
        waiting = group.create_task(server.generate(random_prompt(9), LONG, "waiting"))
        await wait_until_decoded(server, 1)
        await server.abort("waiting")
        output = await waiting
        assert (output.token_ids, output.log_probs, output.stop_reason) == ([], [], "aborted")
        assert not running.done()


async def test_requests_beyond_the_slots_are_queued_in_order() -> None:
    async with serving(max_slots=2) as server, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(server.generate(random_prompt(5, seed=i), LONG, f"r{i}")) for i in range(5)
        ]
        await wait_until_decoded(server, 1)
        health = await server.health()
        assert (health.num_running, health.num_waiting) == (2, 3)
        for task in tasks[:2]:
            await task
        assert not tasks[4].done(), "first come, first served"


async def test_sleep_frees_the_cache_and_wake_up_allocates_it_again() -> None:
    other = tiny_model(seed=1)
    async with serving() as server:
        full = server.cache_bytes
        # keys and values, layers, slots, length, heads, dimensions, bytes
        assert full == 2 * 2 * 64 * 256 * 2 * 16 * 4
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
        assert_exact(random_prompt(30), await server.generate(random_prompt(30), GREEDY, "a"), model=other)


# -- weights -----------------------------------------------------------------------------------------------------------


async def test_no_cache_of_old_weights_is_reused() -> None:
    other = tiny_model(seed=1)
    async with serving() as server, asyncio.TaskGroup() as group:
        idle, busy = random_prompt(40), random_prompt(40, seed=1)
        draft = await server.generate(idle, GREEDY, "idle")
        running = group.create_task(server.generate(busy, LONG, "busy"))
        await wait_until_decoded(server, 25)
        await server.update_weights(weights_of(other).items(), weight_version=1)
        beside = group.create_task(server.generate(busy, GREEDY, "beside"))
        after_idle, after_busy = (
            joined(idle, draft.token_ids, [5]),
            joined(busy, (await running).token_ids, [5]),
        )
        assert_exact(after_idle, await server.generate(after_idle, GREEDY, "idle"), model=other)
        assert_exact(busy, await beside, model=other)
        assert_exact(after_busy, await server.generate(after_busy, GREEDY, "busy"), model=other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.wait": torch.zeros(64)}, "'model.norm.wait'; did you mean 'model.norm.weight'"),
        ({"model.norm.weight": torch.zeros(65)}, r"shape \(65,\), but the model's is \(64,\)"),
        ({"model.norm.weight": None}, "weights are missing, 'model.norm.weight' first"),
        ({"model.norm.weight": torch.zeros(64, device="meta")}, "holds no data"),
        ({"model.norm.weight": 3}, "is a int; give a torch.Tensor"),
    ],
)
async def test_weights_that_do_not_fit_change_nothing(change: dict[str, Any], message: str) -> None:
    # With a norm of zeros, all tokens would be equally likely.
    weights = {**weights_of(shared_model()), "model.norm.weight": torch.zeros(64), **change}
    published = {name: weight for name, weight in weights.items() if weight is not None}
    async with serving() as server:
        before = await server.generate(random_prompt(9), GREEDY, "a")
        with pytest.raises(WeightsError, match=message):
            await server.update_weights(published.items(), weight_version=1)
        assert await server.generate(random_prompt(9), GREEDY, "b") == before
        assert (await server.health()).weight_version == 0


async def test_one_of_two_tied_weights_is_enough_and_both_must_be_equal() -> None:
    tied, other = tiny_model(tie_word_embeddings=True), tiny_model(tie_word_embeddings=True, seed=1)
    async with serving(tied) as server:
        weights = weights_of(other)
        assert "lm_head.weight" in weights
        await server.update_weights(weights.items(), weight_version=1)
        both = await server.generate(random_prompt(9), GREEDY, "a")
        del weights["lm_head.weight"]
        await server.update_weights(weights.items(), weight_version=2)
        one = await server.generate(random_prompt(9), GREEDY, "b")
        assert both.token_ids == one.token_ids
        assert_exact(random_prompt(9), one, model=other)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
        with pytest.raises(WeightsError, match="published with different values"):
            await server.update_weights(weights.items(), weight_version=3)


# -- failures ----------------------------------------------------------------------------------------------------------


async def test_nan_fails_only_its_own_request_and_does_not_stay_in_a_slot() -> None:
    weights = weights_of(shared_model())
    weights["model.embed_tokens.weight"][5] = float("nan")
    good = [prompt for i in range(4) if 5 not in (prompt := random_prompt(6 + i, seed=i + 20))]
    bad = joined(random_prompt(40, seed=3), [5], random_prompt(9, seed=4))
    async with serving(max_slots=len(good) + 1) as server:
        expected = [output.token_ids for output in await generate_all(server, good, GREEDY)]
        await server.update_weights(weights.items(), weight_version=1)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(server.generate(p, GREEDY, f"r{i}")) for i, p in enumerate(good)]
            with pytest.raises(ServerError, match="logits are NaN or infinite after 50 tokens"):
                await server.generate(bad, GREEDY, "bad")
        assert [task.result().token_ids for task in tasks] == expected
        # Again with all slots in use, including the one that had NaN.
        again = await generate_all(server, [*good, good[0][1:]], GREEDY, prefix="again")
        assert [output.token_ids for output in again[:-1]] == expected


async def test_a_failing_engine_fails_all_current_and_later_requests() -> None:
    model, has_failed = tiny_model(), asyncio.Event()

    def fail(*_: Any) -> None:
        if has_failed.is_set():
            raise RuntimeError("out of memory")

    model.model.layers[1].register_forward_pre_hook(fail)
    server = EmbeddedServer(model, config=EmbeddedConfig(max_model_len=256, max_slots=2))
    tasks = [asyncio.create_task(server.generate(random_prompt(9, seed=i), LONG, f"r{i}")) for i in range(4)]
    await wait_until_decoded(server, 1)
    has_failed.set()
    for i, task in enumerate(tasks):
        with pytest.raises(ServerError, match=f"request r{i}: the engine failed.*out of memory") as caught:
            await task
        assert isinstance(caught.value.__cause__, RuntimeError)
    health = await server.health()
    assert not health.is_alive
    assert "out of memory" in health.detail
    for call in (server.generate(random_prompt(9), GREEDY, "later"), server.sleep()):
        with pytest.raises(ServerError, match="out of memory"):
            await call
    await server.abort("r0")
    assert server.cache_bytes == 0
    await server.close()


async def test_an_engine_that_fails_in_a_control_call_raises_in_the_caller() -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory left")

    model = tiny_model()
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
    for call in (*tasks, server.generate(random_prompt(9), GREEDY, "a")):
        with pytest.raises(ServerError, match="the server was closed"):
            await call
    assert not (await server.health()).is_alive
    await server.close()
    assert_exact(random_prompt(9), output, model=model)


def test_a_server_works_after_its_first_event_loop_has_closed() -> None:
    server = EmbeddedServer(tiny_model(), config=EmbeddedConfig(max_model_len=256, max_slots=1))

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
