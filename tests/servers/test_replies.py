"""Tests of the checks of servers' replies. The lease is released after every reply."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from agent_loop.chat.template import load_chat_template
from agent_loop.errors import BadServerReply, JournalError, ServerDied, ServerError, ServerTimeout
from agent_loop.runtime.concurrency import run_together
from agent_loop.runtime.isolated_task import ABANDON_GRACE_S, num_abandoned
from agent_loop.servers.abort_and_resume import AbortAndResumeServer
from agent_loop.servers.base import Ability, ServerHealth
from agent_loop.servers.completion_memory import CompletionMemory, RememberingServerManager
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.reply_check import ReplyCheck
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.types import TokenChunk, TokenOutput
from tests.helpers import small_tokenizer

VOCAB_SIZE = 100
GOOD = TokenOutput([7, 8], [-0.5, -0.25], "stop", weight_version=3)


class FixedReplyServer(ScriptedServer):
    """Server that returns a given reply, or the result of a given function. A list is streamed chunk by chunk."""

    abilities = ScriptedServer.abilities | {Ability.STREAMING}

    def __init__(self, reply: Any, **options: Any) -> None:
        super().__init__([ScriptedReply([7, 8])] * 9, **options)
        self.reply = reply

    async def generate(self, *_: Any, **__: Any) -> Any:
        return self.reply() if callable(self.reply) else self.reply

    async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[Any]:
        reply = self.reply() if callable(self.reply) else self.reply
        if isinstance(reply, list):
            for part in cast("list[Any]", reply):
                yield part
        else:
            yield reply


def changed(**fields: Any) -> TokenOutput:
    """Return a completion with fields that its constructor would reject."""
    output = TokenOutput([7, 8], None, "stop")
    object.__setattr__(output, "chunks", (chunk(**fields),))
    return output


def chunk(**fields: Any) -> TokenChunk:
    made = TokenChunk([7, 8], [-0.5, -0.25], weight_version=3, stop_reason="stop")
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


async def ask(manager: AsyncLLMServerManager, session: str = "s", *, streams: bool = False) -> TokenOutput:
    request: dict[str, Any] = {"prompt_ids": [1], "sampling_params": {"max_tokens": 4}}
    if not streams:
        return await manager.generate(session, **request)
    return TokenOutput.from_chunks([part async for part in manager.stream(session, **request)])


def raised_by(server: ScriptedServer, *, streams: bool) -> BadServerReply:
    """Return the error of a request. Check that no lease, queued request or task is left."""
    manager = AsyncLLMServerManager([server], vocab_size=VOCAB_SIZE)

    async def main() -> BadServerReply:
        with pytest.raises(BadServerReply) as caught:
            await ask(manager, streams=streams)
        assert (manager.balancer.num_leases, manager.balancer.num_queued) == (0, 0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert str(caught.value).startswith("server gpu-1 request s: its reply is invalid: ")
        assert "docs/how-to.md" in str(caught.value)
        return caught.value

    return run_virtual(main())


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": [7, 100]}, r"token_ids\[1\] is 100, expected int <= 99"),
    ({"token_ids": [-1, 7]}, r"token_ids\[0\] is -1, expected int >= 0"),
    ({"token_ids": [True, 7]}, r"token_ids\[0\] is True, expected int, got bool"),
    ({"token_ids": [7.0, 7]}, r"token_ids\[0\] is 7.0, expected int, got float"),
    ({"token_ids": [2**80, 7]}, "expected int <= 99"),
    ({"token_ids": [10**5000, 7]}, "a huge integer"),
    ({"token_ids": [None, 7]}, r"token_ids\[0\] is None"),
    ({"token_ids": ["7", 7]}, r"token_ids\[0\] is '7'"),
    ({"token_ids": np.array([7.0, 8.0])}, "expected int, got float"),
    ({"token_ids": np.array([[7, 8]])}, "token_ids"),
    ({"token_ids": None}, "token_ids is None"),
    ({"token_ids": 7}, "token_ids is 7"),
    ({"token_ids": "78"}, "token_ids is '78'"),
    ({"token_ids": {7: 8}}, "token_ids is an object of type dict"),
    ({"token_ids": [7]}, "1 token ids but 2 log-probs"),
    ({"token_ids": [7, 8, 9]}, "3 token ids but 2 log-probs"),
    ({"token_ids": [7] * 5, "logprobs": None}, "5 tokens where max_tokens was 4"),
    ({"logprobs": [math.nan, -1.0]}, r"logprobs\[0\] is nan"),
    ({"logprobs": [-1.0, math.inf]}, r"logprobs\[1\] is inf"),
    ({"logprobs": [-1.0, -math.inf]}, r"logprobs\[1\] is -inf"),
    ({"logprobs": [0.5, -1.0]}, r"logprobs\[0\] is 0.5, expected float <= 0.001"),
    ({"logprobs": [-1e38, -1.0]}, "expected float >= -10000.0"),
    ({"logprobs": np.array([np.nan, -1.0])}, r"logprobs\[0\] is nan"),
    ({"logprobs": ["-1", -1.0]}, r"logprobs\[0\] is '-1'"),
    ({"logprobs": [-1.0]}, "2 token ids but 1 log-probs"),
    ({"logprobs": -1.0}, "logprobs is -1.0"),
    ({"weight_version": -1}, "weight_version is -1"),
    ({"weight_version": 2**31}, "expected int <= 2147483647"),
    ({"weight_version": 1.5}, "weight_version is 1.5"),
    ({"weight_version": True}, "weight_version is True"),
    ({"weight_version": None}, "weight_version is None"),
    ({"weight_version": "3"}, "weight_version is '3'"),
    ({"stop_reason": "because"}, "stop_reason is 'because'"),
    ({"stop_reason": ["stop"]}, "stop_reason is an object of type list"),
    ({"num_preempted": -1}, "num_preempted is -1"),
    ({"num_preempted": None}, "num_preempted is None"),
    ({"num_preempted": 10**30}, "num_preempted is 1000"),
    ({"num_cached_tokens": "all"}, "num_cached_tokens is 'all'"),
    ({"num_cached_tokens": -3}, "num_cached_tokens is -3"),
    ({"prefill_s": math.nan}, "prefill_s is nan"),
    ({"prefill_s": -1.0}, "prefill_s is -1.0"),
    ({"prefill_s": "soon"}, "prefill_s is 'soon'"),
]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("fields", "words"), BAD_FIELDS)
def test_a_reply_with_an_invalid_field_fails_its_request(
    fields: dict[str, Any], words: str, streams: bool
) -> None:
    reply = chunk(**fields) if streams else changed(**fields)
    error = raised_by(FixedReplyServer(reply, name="gpu-1"), streams=streams)
    assert re.search(words, str(error))


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        (None, "its chunks are None, not a tuple"),
        ((), "its chunks are"),
        ((GOOD,), "yielded an object of type TokenOutput, not a TokenChunk"),
        ((TokenChunk([7], [-0.5]), TokenChunk([8], [-0.5])), "stop_reason is None"),
        ((TokenChunk([7], [-0.5], 0, "stop"), TokenChunk([8], [-0.5], 0, "stop")), "chunks after the one"),
        ((TokenChunk([7], None), TokenChunk([8] * 4, None, 1, "length")), "4 tokens where max_tokens was 3"),
        ((TokenChunk([7], [-0.5]), TokenChunk([8], [-0.5], -1, "stop")), "weight_version is -1"),
    ],
)
def test_inconsistent_chunks_fail_their_request(chunks: Any, words: str) -> None:
    output = TokenOutput([7, 8], None, "stop")
    object.__setattr__(output, "chunks", chunks)
    error = raised_by(FixedReplyServer(output, name="gpu-1"), streams=False)
    assert re.search(words, str(error))


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("extras", "words"),
    [
        (7, "not a mapping of arrays"),
        ({"top": [1.0]}, r"extras 'top' have shape \[1\] for 2 tokens"),
        ({"top": 1.0}, r"shape \[\] for 2 tokens"),
        ({"top": ["a", "b"]}, "return arrays of numbers"),
        ({"top": [[1], [2, 3]]}, "are not an array"),
        ({3: [1.0, 2.0]}, "extras 3 are an array"),
    ],
)
def test_extras_without_an_entry_per_token_fail_their_request(extras: Any, words: str, streams: bool) -> None:
    reply = chunk(extras=extras) if streams else changed(extras=extras)
    assert re.search(words, str(raised_by(FixedReplyServer(reply, name="gpu-1"), streams=streams)))


def test_extras_are_copied_and_read_only() -> None:
    mine = np.ones((2, 3))
    extras = checked(changed(extras={"top": mine, "more": [1, 2]})).extras
    mine[:] = 5
    assert extras["top"].tolist() == [[1.0] * 3] * 2
    assert extras["more"].tolist() == [1, 2]
    assert not extras["top"].flags.writeable


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "reply",
    [
        None,
        7,
        "hello",
        (),
        {"token_ids": [7]},
        object(),
        ValueError("x"),
        SimpleNamespace(token_ids=[]),
    ],
    ids=lambda reply: type(reply).__name__,
)
def test_a_reply_of_another_type_fails_its_request(reply: Any, streams: bool) -> None:
    word = "not a TokenChunk" if streams else "not a TokenOutput"
    assert word in str(raised_by(FixedReplyServer(reply, name="gpu-1"), streams=streams))


def test_a_chunk_is_not_a_completion_and_a_completion_is_not_a_chunk() -> None:
    assert "not a TokenOutput" in str(raised_by(FixedReplyServer(chunk(), name="gpu-1"), streams=False))
    assert "not a TokenChunk" in str(raised_by(FixedReplyServer(GOOD, name="gpu-1"), streams=True))


class CustomBaseException(BaseException):
    """A BaseException that is not an Exception."""


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        ValueError("a bug"),
        TimeoutError("a timeout of the server's own"),
        JournalError("an error that servers do not raise"),
        asyncio.CancelledError(),
        GeneratorExit(),
        SystemExit(3),
        KeyboardInterrupt(),
        CustomBaseException(),
        StopIteration(),
        StopAsyncIteration(),
        RecursionError(),
        ExceptionGroup("several", [ValueError("a bug")]),
        UnprintableError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_exception_of_a_server_fails_its_request(error: BaseException, streams: bool) -> None:
    def raises() -> None:
        raise error

    assert "raised" in str(raised_by(FixedReplyServer(raises, name="gpu-1"), streams=streams))


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([], "ended without a stop reason"),
        ([chunk(stop_reason=None)], "ended without a stop reason"),
        ([chunk(), chunk()], "it sent a chunk after its stop reason"),
        ([chunk(stop_reason=None), None, chunk()], "yielded None"),
        ([chunk(stop_reason=None)] * 3, "2 tokens where max_tokens was 0"),
        ([TokenChunk([], [])] * 10_002, "10000 chunks without a token"),
    ],
)
def test_a_malformed_stream_fails_its_request(chunks: list[Any], words: str) -> None:
    assert words in str(raised_by(FixedReplyServer(chunks, name="gpu-1"), streams=True))


@pytest.mark.parametrize("kind", ["coroutine", "list", "None"])
def test_a_stream_that_is_not_an_async_generator_fails_its_request(kind: str) -> None:
    async def coroutine() -> list[TokenChunk]:
        return [chunk()]

    class Plain(FixedReplyServer):
        def stream(self, *_: Any, **__: Any) -> Any:
            return coroutine() if kind == "coroutine" else [chunk()] if kind == "list" else None

    assert "not an async generator" in str(raised_by(Plain(None, name="gpu-1"), streams=True))


@pytest.mark.parametrize("streams", [False, True])
def test_a_generate_that_is_not_async_fails_its_request(streams: bool) -> None:
    class Plain(ScriptedServer):
        def generate(self, *_: Any, **__: Any) -> Any:
            return GOOD

    assert "TypeError" in str(raised_by(Plain([], name="gpu-1"), streams=streams))


# -- valid replies -----------------------------------------------------------------------------------------------------


def checked(output: TokenOutput) -> TokenOutput:
    return ReplyCheck(VOCAB_SIZE).output(output, server="s", request_id="r")


def test_a_valid_reply_is_copied_unchanged() -> None:
    mine, logprobs = [7, 8], [-0.5, 0.0]
    first = TokenChunk([6], [-1.0], weight_version=1, prefill_s=0.5)
    last = TokenChunk(mine, logprobs, 2, "length", num_preempted=1, num_cached_tokens=5)
    output = TokenOutput.from_chunks([first, last])
    passed = checked(output)
    assert (passed, passed.prefill_s) == (output, 0.5)
    mine[0], logprobs[0] = 10**9, math.nan
    assert (passed.token_ids, passed.log_probs) == ([6, 7, 8], [-1.0, -0.5, 0.0])


def test_numpy_arrays_and_scalars_become_python_values() -> None:
    output = changed(
        token_ids=np.array([7, 8]),
        logprobs=[np.float32(-0.5), np.float64(-0.25)],
        weight_version=np.int64(3),
    )
    passed = checked(output)
    assert passed == GOOD
    assert {type(token) for token in passed.token_ids} == {int}
    assert {type(logprob) for logprob in passed.log_probs or ()} == {float}


def test_logprobs_slightly_above_zero_become_zero() -> None:
    assert checked(changed(logprobs=[4.7e-7, -0.25])).log_probs == [0.0, -0.25]


def test_token_ids_must_fit_int32_if_the_vocabulary_size_is_unknown() -> None:
    check = ReplyCheck()
    assert (
        check.output(changed(token_ids=[7, 2**31 - 1]), server="s", request_id="r").token_ids[1] == 2**31 - 1
    )
    with pytest.raises(BadServerReply, match="expected int <= 2147483647"):
        check.output(changed(token_ids=[7, 2**31]), server="s", request_id="r")


def test_the_vocabulary_size_is_that_of_the_model_and_not_of_its_tokenizer(tmp_path: Path) -> None:
    small_tokenizer().save_pretrained(tmp_path)
    assert load_chat_template(str(tmp_path)).vocab_size == len(small_tokenizer()) < 512
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 512}', encoding="utf-8")
    assert load_chat_template(str(tmp_path)).vocab_size == 512


def test_token_level_loops_check_the_same_vocabulary_size() -> None:
    manager = AsyncLLMServerManager([FixedReplyServer(changed(token_ids=[7, 100]))], vocab_size=VOCAB_SIZE)
    for each in (manager.scope(), RememberingServerManager(manager, CompletionMemory())):
        with pytest.raises(BadServerReply, match="expected int <= 99"):
            run_virtual(ask(each))


# -- leases ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("reply", [None, "hello", changed(token_ids=None), 7])
def test_replies_of_wrong_types_do_not_block_later_requests(reply: Any, streams: bool) -> None:
    server = FixedReplyServer(reply, max_concurrent=2)
    manager = AsyncLLMServerManager([server])

    async def main() -> None:
        for number in range(4):
            with pytest.raises(BadServerReply):
                await ask(manager, f"bad{number}", streams=streams)
        server.reply = [chunk()] if streams else GOOD
        outputs = await run_together(ask(manager, f"good{n}", streams=streams) for n in range(5))
        assert [output.token_ids for output in outputs] == [[7, 8]] * 5
        assert manager.balancer.num_leases == 0

    run_virtual(main())


@pytest.mark.parametrize("streams", [False, True])
def test_the_lease_of_a_server_that_ignores_cancellation_is_released(streams: bool) -> None:
    class IgnoresCancellation(FixedReplyServer):
        async def generate(self, *_: Any, **__: Any) -> Any:
            return await ignore_cancellation()

        async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[Any]:
            yield chunk(token_ids=[7], logprobs=[-1.0], stop_reason=None)
            await ignore_cancellation()
            yield chunk()

    may_end = asyncio.Event()

    async def ignore_cancellation() -> TokenOutput:
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                continue
        return GOOD

    server = IgnoresCancellation(None, max_concurrent=1)
    manager = AsyncLLMServerManager([server], request_timeout_s=10)

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        with pytest.raises(ServerTimeout):
            await ask(manager, streams=streams)
        assert clock() == 10 + ABANDON_GRACE_S
        assert manager.balancer.num_leases == 0
        assert num_abandoned() == 1
        may_end.set()
        await asyncio.sleep(1)
        assert num_abandoned() == 0

    run_virtual(main())


def test_chunks_of_a_lost_server_are_ignored() -> None:
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

    async def main() -> None:
        async with manager.watching():
            output = await ask(manager)
        assert output.token_ids == [1, 7, 8]

    run_virtual(main())


# -- several servers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [False, True])
def test_the_chunks_of_a_dead_server_are_checked(streams: bool) -> None:
    invalid: list[Any] = [[chunk(token_ids=[-1, 7], stop_reason=None)], [None], None, [chunk(), chunk()]]

    async def main(chunks: Any) -> None:
        def dies() -> None:
            raise ServerDied("killed", server="a", chunks=chunks)

        manager = AsyncLLMServerManager([FixedReplyServer(dies, name="a")], vocab_size=VOCAB_SIZE)
        with pytest.raises(BadServerReply):
            await ask(manager, streams=streams)
        assert (manager.balancer.num_leases, set(manager.pool.lost)) == (0, {"a"})

    for chunks in invalid:
        run_virtual(main(chunks))


def test_only_the_raising_server_is_lost_if_its_error_names_another_server() -> None:
    def dies() -> None:
        raise ServerDied("killed", server="b")

    manager = AsyncLLMServerManager([FixedReplyServer(dies, name="a"), FixedReplyServer([chunk()], name="b")])

    async def main() -> None:
        for number in range(4):
            assert (await ask(manager, f"s{number}")).token_ids == [7, 8]
        assert set(manager.pool.lost) == {"a"}

    run_virtual(main())


@pytest.mark.parametrize("error", [ValueError("a bug"), SystemExit(1), ServerError("busy")])
def test_an_error_in_end_session_does_not_affect_other_requests(error: BaseException) -> None:
    class Breaks(FixedReplyServer):
        def end_session(self, request_id: str) -> None:
            raise error

    manager = AsyncLLMServerManager([Breaks(GOOD)])

    async def main() -> None:
        with manager.scope() as scope:
            for session in ("a", "b"):
                await ask(scope, session)
        assert manager.balancer.num_sessions == 0

    run_virtual(main())


@pytest.mark.parametrize(
    "health",
    [
        None,
        "fine",
        ServerHealth("yes", 0, 0, 0),  # pyright: ignore[reportArgumentType]
        ServerHealth(True, math.nan, 0, 0),  # pyright: ignore[reportArgumentType]
        ServerHealth(True, 0, -1, 0),
        ServerHealth(True, 0, 0, 0, kv_cache_share=math.nan),
    ],
)
def test_a_server_with_an_invalid_health_report_is_lost_and_watching_continues(health: Any) -> None:
    class InvalidHealth(FixedReplyServer):
        async def health(self) -> Any:
            return health

    manager = AsyncLLMServerManager(
        [InvalidHealth([chunk()], name="bad"), FixedReplyServer([chunk()], name="good")]
    )

    async def main() -> None:
        async with manager.watching():
            await asyncio.sleep(12)
            assert set(manager.pool.lost) == {"bad"}
            assert "health returned" in manager.pool.lost["bad"]
            assert (await ask(manager)).token_ids == [7, 8]
        assert manager.pool.num_running == 0

    run_virtual(main())


@pytest.mark.parametrize(
    "reply", [None, [None], [chunk(stop_reason=None)], [chunk(token_ids=[-1, 2])], [chunk(), chunk()]]
)
def test_invalid_replies_of_a_wrapped_server_fail_their_requests(reply: Any) -> None:
    manager = AsyncLLMServerManager([AbortAndResumeServer(FixedReplyServer(reply))])

    async def main() -> None:
        for streams in (False, True):
            with pytest.raises(BadServerReply):
                await ask(manager, streams=streams)
        assert manager.balancer.num_leases == 0

    run_virtual(main())
