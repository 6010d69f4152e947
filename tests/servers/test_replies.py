"""Tests of what servers return: `ScriptedServer`, and invalid replies and errors, which fail their request alone."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from agent_loop.chat.template import load_chat_template
from agent_loop.errors import (
    BadPrompt,
    BadServerReply,
    SamplingParamsError,
    ServerDied,
    ServerError,
    ServerTimeout,
)
from agent_loop.runtime.isolated_task import ABANDON_GRACE_S, num_abandoned
from agent_loop.servers.base import Ability, AsyncServerBase, ServerHealth
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.reply_check import ReplyCheck
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from agent_loop.types import SamplingParams, TokenChunk, TokenOutput
from tests.helpers import small_tokenizer

pytestmark = pytest.mark.virtual_time

VOCAB_SIZE = 100
IDS = np.array([1, 2], np.int32)

# -- ScriptedServer ----------------------------------------------------------------------------------------------------


async def test_a_prompt_leaves_room_for_a_token_in_the_context() -> None:
    server = ScriptedServer([ScriptedReply([7])], max_model_len=3)
    assert (await server.generate(IDS, SamplingParams(), "a")).token_ids == [7]
    with pytest.raises(BadPrompt, match="leaves room for 2"):
        await server.generate(np.array([1, 2, 3], np.int32), SamplingParams(), "b")


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, TokenOutput([5, 6, 7], [-0.5] * 3, "stop")),
        ({"max_tokens": 2}, TokenOutput([5, 6], [-0.5] * 2, "length")),
        ({"stop_token_ids": [6]}, TokenOutput([5, 6], [-0.5] * 2, "stop")),
    ],
)
async def test_a_reply_ends_at_its_last_token_at_a_stop_token_or_at_max_tokens(
    params: Any, expected: TokenOutput
) -> None:
    server = ScriptedServer([ScriptedReply([5, 6, 7])])
    assert await server.generate(IDS, SamplingParams.parse(params), "s") == expected


async def test_each_turn_of_a_session_gets_the_next_reply_of_the_script() -> None:
    manager = AsyncLLMServerManager([ScriptedServer([ScriptedReply([1]), ScriptedReply([2])])])
    assert [(await ask(manager, session)).token_ids for session in "abab"] == [[1], [1], [2], [2]]


@pytest.mark.parametrize("is_abort", [True, False])
async def test_an_abort_and_a_weight_update_divide_a_completion(is_abort: bool) -> None:
    server = ScriptedServer([ScriptedReply([1, 2, 3, 4], latency_s=4.0)])
    async with asyncio.TaskGroup() as group:
        call = group.create_task(server.generate(IDS, SamplingParams(), "s"))
        await asyncio.sleep(2.5)
        await (server.abort("s") if is_abort else server.update_weights([], weight_version=7))
    assert server.num_running == 0
    if is_abort:
        assert call.result() == TokenOutput([1, 2], [-0.5, -0.5], "aborted")
        return
    chunks = [(c.weight_version, len(c.token_ids)) for c in call.result().chunks]
    assert (chunks, call.result().weight_version) == ([(0, 2), (7, 2)], 7)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_scripted_reply_has_more_values_for_the_tokens_that_are_sampled(streams: bool) -> None:
    reply = ScriptedReply([1, 2, 3], extras={"rank": np.array([5, 6, 7])})
    parts = ScriptedServer([reply], streams=streams).stream(IDS, SamplingParams(max_tokens=2), "s")
    output = TokenOutput.from_chunks([part async for part in parts])
    assert (output.token_ids, output.extras["rank"].tolist()) == ([1, 2], [5, 6])


# -- sampling parameters -----------------------------------------------------------------------------------------------


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
def test_invalid_sampling_parameters_are_refused(params: dict[str, Any], complaint: str) -> None:
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
    params: dict[str, Any], ability: Ability
) -> None:
    script = [ScriptedReply([1, 2])]
    able = ScriptedServer(script, more_abilities=[ability])
    assert (await able.generate(IDS, SamplingParams(**params), "s")).token_ids == [1, 2]
    unable = ScriptedServer(script)
    with pytest.raises(SamplingParamsError, match=f"use a server with the ability '{ability.value}'"):
        await unable.generate(IDS, SamplingParams(**params), "s")
    assert not unable.requests


async def test_a_pool_refuses_for_servers_that_ignore_parameters_they_do_not_know() -> None:
    manager = AsyncLLMServerManager([FixedReplyServer(chunk())])
    with pytest.raises(SamplingParamsError, match="json_schema is"):
        await manager.generate("s", prompt_ids=IDS, sampling_params={"json_schema": "{}"})


# -- invalid replies ---------------------------------------------------------------------------------------------------


class FixedReplyServer(ScriptedServer):
    """Server that yields a given reply, or the result of a given function. A list is streamed chunk by chunk."""

    def __init__(self, reply: Any, *, name: str = "gpu-1", **options: Any) -> None:
        super().__init__([ScriptedReply([7, 8])] * 9, streams=True, name=name, **options)
        self.reply = reply

    async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[Any]:
        reply = self.reply() if callable(self.reply) else self.reply
        for part in cast("list[Any]", reply) if isinstance(reply, list) else [reply]:
            yield part


class WholeReplyServer(AsyncServerBase):
    """Server of a user who defines `generate` alone."""

    def __init__(self, reply: Any) -> None:
        self.name = "gpu-1"
        self.reply = reply

    async def generate(self, *_: Any, **__: Any) -> Any:
        return self.reply() if callable(self.reply) else self.reply


def chunk(**fields: Any) -> TokenChunk:
    """Return a chunk with fields that its constructor would reject."""
    made = TokenChunk([7, 8], [-0.5, -0.25], weight_version=3, stop_reason="stop")
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def first_chunk(token: int = 7) -> TokenChunk:
    return chunk(token_ids=[token], logprobs=[-1.0], stop_reason=None)


async def ask(manager: AsyncLLMServerManager, session: str = "s") -> TokenOutput:
    return await manager.generate(session, prompt_ids=[1], sampling_params={"max_tokens": 4})


async def error_of(server: AsyncServerBase) -> str:
    """Return the error of a request. Check that no lease, queued request or task is left."""
    manager = AsyncLLMServerManager([server], vocab_size=VOCAB_SIZE)
    with pytest.raises(BadServerReply) as caught:
        await ask(manager)
    assert (manager.pool.balancer.num_leases, manager.pool.balancer.num_queued) == (0, 0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert str(caught.value).startswith("server gpu-1")
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"token_ids": [7, 100]}, "token id 100"),
        ({"token_ids": [-1, 7]}, r"token_ids\[0"),
        ({"token_ids": [True, 7]}, "got `bool`"),
        ({"token_ids": np.array([7.0, 8.0])}, "got `float`"),
        ({"token_ids": np.array([[7, 8]])}, "token_ids"),
        ({"token_ids": None}, "token_ids"),
        ({"token_ids": [7]}, "1 token ids but 2 log-probs"),
        ({"token_ids": [7] * 5, "logprobs": None}, "5 tokens where max_tokens was 4"),
        ({"logprobs": [math.nan, -1.0]}, "logprobs"),
        ({"logprobs": [0.5, -1.0]}, "logprobs"),
        ({"weight_version": 2**31}, "weight_version"),
        ({"stop_reason": "because"}, "'because'"),
        ({"stop_reason": None}, "ended without a stop reason"),
        ({"num_preempted": -1}, "num_preempted"),
        ({"num_cached_tokens": "all"}, "num_cached_tokens"),
        ({"prefill_s": math.nan}, "prefill_s"),
        ({"extras": 7}, "not a mapping of arrays"),
        ({"extras": {"top": [1.0]}}, r"shape \[1\] for 2 tokens"),
        ({"extras": {"top": ["a", "b"]}}, "return arrays of numbers"),
        ({"extras": {"top": [[1], [2, 3]]}}, "field"),
    ],
)
async def test_a_chunk_with_an_invalid_field_fails_its_request(fields: dict[str, Any], words: str) -> None:
    assert re.search(words, await error_of(FixedReplyServer(chunk(**fields))))


@pytest.mark.parametrize("reply", [None, {"token_ids": [7]}, chunk()])
async def test_a_completion_of_another_type_fails_its_request(reply: Any) -> None:
    assert "not a TokenOutput" in await error_of(WholeReplyServer(reply))


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([], "ended without a stop reason"),
        ([chunk(stop_reason=None)], "ended without a stop reason"),
        ([chunk(), chunk()], "it sent a chunk after its stop reason"),
        ([chunk(stop_reason=None), None, chunk()], "yielded None"),
        ([chunk(stop_reason=None)] * 3, "2 tokens where max_tokens was 0"),
    ],
)
async def test_a_malformed_stream_fails_its_request(chunks: list[Any], words: str) -> None:
    assert words in await error_of(FixedReplyServer(chunks))


@pytest.mark.parametrize("is_coroutine", [False, True])
async def test_a_stream_that_is_not_an_async_generator_fails_its_request(is_coroutine: bool) -> None:
    async def coroutine() -> list[TokenChunk]:
        return [chunk()]

    class Plain(FixedReplyServer):
        def stream(self, *_: Any, **__: Any) -> Any:
            return coroutine() if is_coroutine else [chunk()]

    assert "not an async generator" in await error_of(Plain(None))


@pytest.mark.parametrize("server_class", [FixedReplyServer, WholeReplyServer])
@pytest.mark.parametrize(
    "error",
    [
        ValueError("a bug"),
        TimeoutError("a timeout of the server's own"),
        asyncio.CancelledError(),
        SystemExit(3),
        StopAsyncIteration(),
        ExceptionGroup("several", [ValueError("a bug")]),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_any_exception_of_a_server_fails_its_request(error: BaseException, server_class: Any) -> None:
    def raises() -> None:
        raise error

    assert "raised" in await error_of(server_class(raises))


# -- valid replies -----------------------------------------------------------------------------------------------------


def checked(reply: TokenChunk, *, vocab_size: int | None = VOCAB_SIZE) -> TokenChunk:
    return ReplyCheck(vocab_size).chunk(reply, server="s", request_id="r")


def test_a_valid_chunk_is_copied_unchanged() -> None:
    mine, array = [7, 8], np.ones((2, 3))
    reply = TokenChunk(mine, [-0.5, 0.0], 2, "length", 1, 5, extras={"top": array, "more": np.array([1, 2])})
    passed = checked(reply)
    assert passed == reply
    mine[0], array[:] = 10**9, 5
    assert passed.token_ids == [7, 8]
    assert passed.extras["top"].tolist() == [[1.0] * 3] * 2
    assert not passed.extras["top"].flags.writeable


def test_numpy_arrays_and_scalars_become_python_values_and_rounding_above_zero_is_cut() -> None:
    logprobs = [np.float32(-0.5), np.float64(-0.25)]
    arrays = chunk(token_ids=np.array([7, 8]), logprobs=logprobs, weight_version=np.int64(3))
    passed = checked(arrays)
    assert passed == chunk()
    assert {type(token) for token in passed.token_ids} == {int}
    assert {type(logprob) for logprob in passed.logprobs or ()} == {float}
    assert checked(chunk(logprobs=[4.7e-7, -0.25])).logprobs == [0.0, -0.25]


def test_token_ids_must_fit_int32_if_the_vocabulary_size_is_unknown() -> None:
    assert checked(chunk(token_ids=[7, 2**31 - 1]), vocab_size=None).token_ids[1] == 2**31 - 1
    with pytest.raises(BadServerReply, match="token_ids"):
        checked(chunk(token_ids=[7, 2**31]), vocab_size=None)


def test_the_vocabulary_size_is_that_of_the_model_and_not_of_its_tokenizer(tmp_path: Path) -> None:
    small_tokenizer().save_pretrained(tmp_path)
    assert load_chat_template(str(tmp_path)).vocab_size == len(small_tokenizer()) < 512
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 512}', encoding="utf-8")
    assert load_chat_template(str(tmp_path)).vocab_size == 512


# -- leases and several servers ----------------------------------------------------------------------------------------


async def test_the_lease_of_a_server_that_ignores_cancellation_is_released() -> None:
    may_end = asyncio.Event()

    class IgnoresCancellation(FixedReplyServer):
        async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[Any]:
            yield first_chunk()
            while not may_end.is_set():
                try:
                    await may_end.wait()
                except asyncio.CancelledError:
                    continue
            yield chunk()

    manager = AsyncLLMServerManager([IgnoresCancellation(None, max_concurrent=1)], request_timeout_s=10)
    with pytest.raises(ServerTimeout):
        await ask(manager)
    assert asyncio.get_running_loop().time() == 10 + ABANDON_GRACE_S
    assert (manager.pool.balancer.num_leases, num_abandoned()) == (0, 1)
    may_end.set()
    await asyncio.sleep(1)
    assert num_abandoned() == 0


async def test_chunks_of_a_lost_server_are_ignored() -> None:
    class IgnoresCancellation(FixedReplyServer):
        async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[Any]:
            yield first_chunk(1)
            while True:
                try:
                    await asyncio.sleep(20)
                except asyncio.CancelledError:
                    continue
                yield first_chunk(66)

        async def health(self) -> ServerHealth:
            return replace(await super().health(), is_alive=False)

    class Slow(FixedReplyServer):
        async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[Any]:
            await asyncio.sleep(100)
            yield chunk()

    manager = AsyncLLMServerManager([IgnoresCancellation(None, name="a"), Slow(None, name="b")])
    async with manager.pool.watching():
        assert (await ask(manager)).token_ids == [1, 7, 8]


@pytest.mark.parametrize(
    "chunks", [[chunk(token_ids=[-1, 7], stop_reason=None)], [None], None, [chunk(), chunk()]]
)
async def test_the_chunks_of_a_dead_server_are_checked(chunks: Any) -> None:
    def dies() -> None:
        raise ServerDied("killed", server="a", chunks=chunks)

    manager = AsyncLLMServerManager([FixedReplyServer(dies, name="a")], vocab_size=VOCAB_SIZE)
    with pytest.raises(BadServerReply):
        await ask(manager)
    assert (manager.pool.balancer.num_leases, set(manager.pool.lost)) == (0, {"a"})


@pytest.mark.parametrize("error", [ValueError("a bug"), SystemExit(1), ServerError("busy")])
async def test_an_error_in_end_session_does_not_affect_other_requests(error: BaseException) -> None:
    class Breaks(FixedReplyServer):
        def end_session(self, request_id: str) -> None:
            raise error

    manager = AsyncLLMServerManager([Breaks(chunk())])
    with manager.scope() as scope:
        for session in ("a", "b"):
            await ask(scope, session)
    assert manager.pool.balancer.num_sessions == 0


@pytest.mark.parametrize("health", [None, ServerHealth(True, cast(Any, math.nan), 0, 0)])
async def test_a_server_with_an_invalid_health_report_is_lost_and_watching_continues(health: Any) -> None:
    class InvalidHealth(FixedReplyServer):
        async def health(self) -> Any:
            return health

    servers = [InvalidHealth([chunk()], name="bad"), FixedReplyServer([chunk()], name="good")]
    manager = AsyncLLMServerManager(servers)
    async with manager.pool.watching():
        await asyncio.sleep(12)
        assert set(manager.pool.lost) == {"bad"}
        assert "health returned" in manager.pool.lost["bad"]
        assert (await ask(manager)).token_ids == [7, 8]
    assert manager.pool.num_running == 0
