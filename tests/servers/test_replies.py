"""Tests of what servers return: invalid replies and errors fail their request alone, and release its lease."""

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
from agent_loop.errors import BadServerReply, ServerDied, ServerError, ServerTimeout
from agent_loop.runtime.isolated_task import ABANDON_GRACE_S, num_abandoned
from agent_loop.servers.base import AsyncServerBase, ServerHealth
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.reply_check import ReplyCheck
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.types import TokenChunk, TokenOutput
from tests.helpers import small_tokenizer

pytestmark = pytest.mark.virtual_time

VOCAB_SIZE = 100
GOOD = TokenOutput([7, 8], [-0.5, -0.25], "stop", weight_version=3)


class FixedReplyServer(ScriptedServer):
    """Server that yields a given reply, or the result of a given function. A list is streamed chunk by chunk."""

    def __init__(self, reply: Any, **options: Any) -> None:
        super().__init__([ScriptedReply([7, 8])] * 9, streams=True, **options)
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


async def ask(manager: AsyncLLMServerManager, session: str = "s") -> TokenOutput:
    return await manager.generate(session, prompt_ids=[1], sampling_params={"max_tokens": 4})


def error_of(server: AsyncServerBase) -> str:
    """Return the error of a request. Check that no lease, queued request or task is left."""
    manager = AsyncLLMServerManager([server], vocab_size=VOCAB_SIZE)

    async def main() -> str:
        with pytest.raises(BadServerReply) as caught:
            await ask(manager)
        assert (manager.pool.balancer.num_leases, manager.pool.balancer.num_queued) == (0, 0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert str(caught.value).startswith("server gpu-1")
        return str(caught.value)

    return run_virtual(main())


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
def test_a_chunk_with_an_invalid_field_fails_its_request(fields: dict[str, Any], words: str) -> None:
    assert re.search(words, error_of(FixedReplyServer(chunk(**fields), name="gpu-1")))


@pytest.mark.parametrize("reply", [None, {"token_ids": [7]}, chunk()])
def test_a_completion_of_another_type_fails_its_request(reply: Any) -> None:
    assert "not a TokenOutput" in error_of(WholeReplyServer(reply))


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
def test_a_malformed_stream_fails_its_request(chunks: list[Any], words: str) -> None:
    assert words in error_of(FixedReplyServer(chunks, name="gpu-1"))


@pytest.mark.parametrize("kind", ["coroutine", "list", "None"])
def test_a_stream_that_is_not_an_async_generator_fails_its_request(kind: str) -> None:
    async def coroutine() -> list[TokenChunk]:
        return [chunk()]

    class Plain(FixedReplyServer):
        def stream(self, *_: Any, **__: Any) -> Any:
            return coroutine() if kind == "coroutine" else [chunk()] if kind == "list" else None

    assert "not an async generator" in error_of(Plain(None, name="gpu-1"))


class CustomBaseException(BaseException):
    """A BaseException that is not an Exception."""


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize("server_class", [FixedReplyServer, WholeReplyServer])
@pytest.mark.parametrize(
    "error",
    [
        ValueError("a bug"),
        TimeoutError("a timeout of the server's own"),
        asyncio.CancelledError(),
        GeneratorExit(),
        SystemExit(3),
        CustomBaseException(),
        StopAsyncIteration(),
        ExceptionGroup("several", [ValueError("a bug")]),
        UnprintableError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_exception_of_a_server_fails_its_request(error: BaseException, server_class: Any) -> None:
    def raises() -> None:
        raise error

    server = server_class(raises)
    server.name = "gpu-1"
    assert "raised" in error_of(server)


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


def test_numpy_arrays_and_scalars_become_python_values() -> None:
    passed = checked(
        chunk(
            token_ids=np.array([7, 8]),
            logprobs=[np.float32(-0.5), np.float64(-0.25)],
            weight_version=np.int64(3),
        )
    )
    assert passed == chunk()
    assert {type(token) for token in passed.token_ids} == {int}
    assert {type(logprob) for logprob in passed.logprobs or ()} == {float}


def test_logprobs_slightly_above_zero_become_zero() -> None:
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


# -- leases ------------------------------------------------------------------------------------------------------------


async def test_the_lease_of_a_server_that_ignores_cancellation_is_released() -> None:
    may_end = asyncio.Event()

    class IgnoresCancellation(FixedReplyServer):
        async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[Any]:
            yield chunk(token_ids=[7], logprobs=[-1.0], stop_reason=None)
            while not may_end.is_set():
                try:
                    await may_end.wait()
                except asyncio.CancelledError:
                    continue
            yield chunk()

    manager = AsyncLLMServerManager([IgnoresCancellation(None, max_concurrent=1)], request_timeout_s=10)

    clock = asyncio.get_running_loop().time
    with pytest.raises(ServerTimeout):
        await ask(manager)
    assert clock() == 10 + ABANDON_GRACE_S
    assert manager.pool.balancer.num_leases == 0
    assert num_abandoned() == 1
    may_end.set()
    await asyncio.sleep(1)
    assert num_abandoned() == 0


async def test_chunks_of_a_lost_server_are_ignored() -> None:
    class IgnoresCancellation(FixedReplyServer):
        """Server that ignores cancellation and continues to yield chunks."""

        async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[Any]:
            yield chunk(token_ids=[1], logprobs=[-1.0], stop_reason=None)
            while True:
                try:
                    await asyncio.sleep(20)
                except asyncio.CancelledError:
                    continue
                yield chunk(token_ids=[66], logprobs=[-1.0], stop_reason=None)

        async def health(self) -> ServerHealth:
            return replace(await super().health(), is_alive=False)

    class Slow(FixedReplyServer):
        async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[Any]:
            await asyncio.sleep(100)
            yield chunk()

    manager = AsyncLLMServerManager([IgnoresCancellation(None, name="a"), Slow(None, name="b")])

    async with manager.pool.watching():
        output = await ask(manager)
    assert output.token_ids == [1, 7, 8]


# -- several servers ---------------------------------------------------------------------------------------------------


def test_the_chunks_of_a_dead_server_are_checked() -> None:
    invalid: list[Any] = [[chunk(token_ids=[-1, 7], stop_reason=None)], [None], None, [chunk(), chunk()]]

    async def main(chunks: Any) -> None:
        def dies() -> None:
            raise ServerDied("killed", server="a", chunks=chunks)

        manager = AsyncLLMServerManager([FixedReplyServer(dies, name="a")], vocab_size=VOCAB_SIZE)
        with pytest.raises(BadServerReply):
            await ask(manager)
        assert (manager.pool.balancer.num_leases, set(manager.pool.lost)) == (0, {"a"})

    for chunks in invalid:
        run_virtual(main(chunks))


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

    manager = AsyncLLMServerManager(
        [InvalidHealth([chunk()], name="bad"), FixedReplyServer([chunk()], name="good")]
    )

    async with manager.pool.watching():
        await asyncio.sleep(12)
        assert set(manager.pool.lost) == {"bad"}
        assert "health returned" in manager.pool.lost["bad"]
        assert (await ask(manager)).token_ids == [7, 8]
    assert manager.pool.num_running == 0
