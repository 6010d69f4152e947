"""Arbitrary server responses to some rows do not change other rows, keep no lease, and are not trained on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.config import RolloutConfig
from agent_loop.errors import JournalError, SamplingParamsError, ServerDied, ServerError
from agent_loop.rollout.batch import assemble
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.runtime.isolated_task import num_abandoned
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason, TokenChunk, TokenOutput
from tests.harness import examples
from tests.helpers import hermes_template, text_reply, user

VOCAB_SIZE = hermes_template().vocab_size
NUM_GOOD = 6
TIMEOUT_S = 60.0


class CustomBaseException(BaseException):
    """BaseException that is not an Exception."""


@dataclass(frozen=True)
class HostileReply:
    """Behaviour of a server for one request."""

    fields: dict[str, Any]
    """Fields that are set on a completion without validation."""
    error: type[BaseException] | None
    instead: Any
    """Value that is returned instead of a completion, if not None."""
    latency_s: float
    ends: bool
    """Whether the stream ends with a stop reason."""
    num_chunks: int

    async def wait(self) -> None:
        """Wait for the latency, then raise the error if there is one."""
        await asyncio.sleep(self.latency_s)
        if self.error is not None:
            raise self.error("hostile")

    def create(self, kind: type[Any]) -> Any:
        """Return the reply of `generate` or `stream`: a `TokenOutput` or a `TokenChunk`, or the value of `instead`."""
        if self.instead is not None:
            return self.instead
        chunk = TokenChunk([7, 8], [-0.5, -0.25], stop_reason="stop")
        fields = dict(self.fields)
        chunks = fields.pop("chunks", (chunk,))
        for name, value in fields.items():
            object.__setattr__(chunk, name, value)
        if kind is TokenChunk:
            return chunk
        output = TokenOutput([7, 8], None, "stop")
        object.__setattr__(output, "chunks", chunks)
        return output


NUMBERS: st.SearchStrategy[Any] = st.one_of(
    st.integers(-3, VOCAB_SIZE + 3),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(max_size=2),
    st.sampled_from([2**31, 2**63, 2**64, 10**400, -(10**400), np.int64(3), np.float32("nan"), -0.5, 1e-9]),
)
LISTS: st.SearchStrategy[Any] = st.one_of(
    st.lists(NUMBERS, max_size=4),
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=4),
    st.lists(st.floats(-5, 0), min_size=1, max_size=4),
    st.lists(st.floats(-5, 0), min_size=2, max_size=2).map(np.array),
    st.lists(st.integers(0, 9), min_size=600, max_size=600),
    NUMBERS,
)
CHUNKS: st.SearchStrategy[Any] = st.one_of(
    NUMBERS,
    st.lists(st.builds(TokenChunk, LISTS, LISTS, NUMBERS), max_size=3).map(tuple),
    st.just((TokenChunk([7], [-0.5]), TokenChunk([8], [-0.25], 1, stop_reason="stop"))),
)
EXTRAS: st.SearchStrategy[Any] = st.one_of(
    NUMBERS, st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), LISTS, max_size=2)
)
FIELDS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "token_ids": LISTS,
        "logprobs": LISTS,
        "weight_version": NUMBERS,
        "stop_reason": st.sampled_from(["stop", "length", "aborted", None, "because", 3, ["stop"]]),
        "num_preempted": NUMBERS,
        "num_cached_tokens": NUMBERS,
        "prefill_s": NUMBERS,
        "chunks": CHUNKS,
        "extras": EXTRAS,
    },
)
ERRORS: list[type[BaseException]] = [
    ValueError,
    TimeoutError,
    ServerError,
    SamplingParamsError,
    JournalError,
    asyncio.CancelledError,
    GeneratorExit,
    SystemExit,
    StopAsyncIteration,
    RecursionError,
    MemoryError,
    CustomBaseException,
]
REPLIES: st.SearchStrategy[HostileReply] = st.builds(
    HostileReply,
    fields=FIELDS,
    error=st.one_of(st.none(), st.none(), st.sampled_from(ERRORS)),
    instead=st.one_of(
        st.none(), st.none(), NUMBERS, LISTS, LISTS.map(lambda ids: {"token_ids": ids}), st.builds(ValueError)
    ),
    latency_s=st.sampled_from([0.0, 0.0, 0.3, 5.0, 200.0, 1e9]),
    ends=st.booleans(),
    num_chunks=st.integers(0, 3),
)


class HostileServer(ScriptedServer):
    """Server that returns scripted completions to harmless rows, and to each hostile row its own response."""

    def __init__(self, replies: Sequence[HostileReply], *, streams: bool, name: str) -> None:
        super().__init__(complete, name=name, vocab_size=VOCAB_SIZE, max_concurrent=2, streams=streams)
        self._replies = replies

    def _hostile(self, prompt_ids: Any) -> HostileReply | None:
        _, found, number = hermes_template().decode(prompt_ids).partition("hostile ")
        if not found:
            return None
        reply = self._replies[int(number.split("<")[0])]
        return replace(reply, error=None) if reply.error is ServerDied and self.name != "s0" else reply

    async def stream(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        reply = self._hostile(prompt_ids)
        if reply is None:
            async for chunk in super().stream(prompt_ids, *args, **kwargs):
                yield chunk
            return
        for _ in range(reply.num_chunks):
            yield TokenChunk([5], [-1.0])
        await reply.wait()
        chunk = reply.create(TokenChunk)
        if not reply.ends and isinstance(chunk, TokenChunk):
            object.__setattr__(chunk, "stop_reason", None)
        yield chunk


def complete(request: ScriptedRequest) -> ScriptedReply:
    """Return the whole completion of a prompt. The prompt may already contain its first tokens."""
    text = hermes_template().decode(request.prompt_ids)
    question, _, begun = text.rpartition("<|im_start|>assistant\n")
    number = question.rpartition("good ")[2].partition("<")[0]
    whole = text_reply(f"answer {number}").token_ids
    rest = whole[len(hermes_template().encode(begun)) :]
    return ScriptedReply(rest, logprobs=[-0.125] * len(rest), latency_s=0.5 * len(rest))


def run_rows(
    replies: Sequence[HostileReply], *, num_servers: int, streams: bool
) -> tuple[list[Trajectory], dict[str, Any]]:
    """Run the harmless rows with one hostile row per response. Return the trajectories and the leaks."""
    servers = [HostileServer(replies, streams=streams, name=f"s{n}") for n in range(num_servers)]
    config = RolloutConfig(
        prompt_length=256, response_length=64, max_failed_share=1.0, request_timeout_s=TIMEOUT_S
    )
    manager = AgentLoopManager(config, servers=servers, template=hermes_template())
    good = [{"raw_prompt": user(f"good {number}")} for number in range(NUM_GOOD)]
    hostile = [{"raw_prompt": user(f"hostile {number}")} for number in range(len(replies))]
    balancer = manager.server_manager.balancer

    async def main() -> tuple[list[Trajectory], dict[str, Any]]:
        trajectories = await manager.run([*good, *hostile])
        leaked = {
            "leases": balancer.num_leases,
            "queued": balancer.num_queued,
            "sessions": balancer.num_sessions,
            "tasks": len(asyncio.all_tasks()) - 1,
        }
        await manager.close()
        return trajectories, leaked

    return run_virtual(main())


def training_values(trajectory: Trajectory) -> tuple[Any, ...]:
    output = trajectory.output
    versions = [segment.weight_version for segment in output.segments]
    return (
        list(output.prompt_ids),
        list(output.response_ids),
        list(output.response_mask),
        [] if output.response_logprobs is None else list(output.response_logprobs),
        versions,
        output.stop_reason,
        output.messages,
        trajectory.reward,
    )


@examples(40)
@given(
    replies=st.lists(REPLIES, min_size=1, max_size=12), num_servers=st.integers(1, 2), streams=st.booleans()
)
def test_responses_to_hostile_rows_do_not_change_other_rows_and_are_not_trained_on(
    replies: list[HostileReply], num_servers: int, streams: bool
) -> None:
    alone, _ = run_rows([], num_servers=num_servers, streams=streams)
    trajectories, leaked = run_rows(replies, num_servers=num_servers, streams=streams)
    assert leaked == {"leases": 0, "queued": 0, "sessions": 0, "tasks": 0}
    assert num_abandoned() == 0  # (the count excludes event loops that are closed)
    assert [training_values(t) for t in trajectories[:NUM_GOOD]] == [training_values(t) for t in alone]
    assert all(t.output.stop_reason is StopReason.ANSWERED for t in alone)
    for trajectory in trajectories[NUM_GOOD:]:
        failure = trajectory.output.failure
        if failure is not None:
            kind = failure.error.partition(":")[0]
            assert kind in {"BadServerReply", "ServerError", "ServerTimeout", "SamplingParamsError"}
    batch = assemble(trajectories, pad_token_id=hermes_template().pad_token_id)
    assert int(batch["input_ids"].min()) >= 0
    assert int(batch["input_ids"].max()) < VOCAB_SIZE
    if "rollout_log_probs" in batch:  # (a server may return none)
        assert (
            -10_000 <= float(batch["rollout_log_probs"].min()) <= float(batch["rollout_log_probs"].max()) <= 0
        )
    assert int(batch["weight_versions"].min()) >= -1


def test_rows_of_a_server_that_reports_its_death_move_without_changes() -> None:
    died = HostileReply({}, ServerDied, None, 0.7, True, 1)
    alone, _ = run_rows([], num_servers=2, streams=True)
    trajectories, leaked = run_rows([died], num_servers=2, streams=True)
    assert leaked == {"leases": 0, "queued": 0, "sessions": 0, "tasks": 0}
    assert [training_values(t) for t in trajectories[:NUM_GOOD]] == [training_values(t) for t in alone]
    assert list(trajectories[NUM_GOOD].output.response_ids)[-2:] == [7, 8]
