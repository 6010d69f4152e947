"""Episodes: exact records within limits, single use, failures, cancellation, branches and early stops."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.episode import Episode, EpisodeStopped
from agent_loop.episode.limits import EpisodeLimits
from agent_loop.errors import EpisodeError, ServerError
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.trajectory import AgentLoopOutput
from agent_loop.types import Origin, StopReason
from tests.harness import examples
from tests.helpers import call_text, encoded, hermes_template, text_reply, user


def make_episode(script: Any, **limits: Any) -> tuple[Episode, ScriptedServer]:
    server = ScriptedServer(script)
    episode = Episode(
        user("hello"),
        template=hermes_template(),
        server_manager=AsyncLLMServerManager([server]),
        limits=EpisodeLimits(**{"prompt_length": 512, "response_length": 512, **limits}),
    )
    return episode, server


def in_order(*replies: ScriptedReply) -> Any:
    """Return a script of these replies, whatever the turn of the request."""
    left = iter(replies)
    return lambda _: next(left)


class DrawnTurns:
    """Script that samples the tokens of drawn turns, and keeps what it returned."""

    def __init__(self, turns: list[dict[str, Any]]) -> None:
        self.returned: list[list[int]] = []
        self._turns = turns

    def __call__(self, request: ScriptedRequest) -> ScriptedReply:
        drawn = self._turns[len(self.returned)]
        ids = [*drawn["token_ids"], *([encoded("<|im_end|>")[0]] if drawn["ends"] else [])]
        self.returned.append(ids[: request.sampling_params.max_tokens])
        return ScriptedReply(ids, logprobs=[-0.25 * n for n in range(len(ids))], stops=drawn["ends"])


vocabulary = st.integers(0, len(encoded("x")) + 300)
turn = st.fixed_dictionaries(
    {
        "token_ids": st.lists(vocabulary, min_size=1, max_size=30),
        "ends": st.booleans(),
        "max_tokens": st.one_of(st.none(), st.integers(1, 12)),
        "reply": st.text(max_size=20),
        "role": st.sampled_from(["tool", "user"]),
    }
)


@examples(150)
@given(
    turns=st.lists(turn, max_size=6),
    response_length=st.integers(1, 150),
    max_assistant_turns=st.one_of(st.none(), st.integers(1, 4)),
    max_user_turns=st.one_of(st.none(), st.integers(1, 4)),
    max_turn_tokens=st.one_of(st.none(), st.integers(1, 10)),
)
def test_any_script_of_turns_is_recorded_exactly_and_within_limits(
    turns: list[dict[str, Any]], response_length: int, **turn_limits: int | None
) -> None:
    script = DrawnTurns(turns)
    returned = script.returned
    episode, server = make_episode(script, response_length=response_length, **turn_limits)

    async def scenario() -> AgentLoopOutput:
        with contextlib.suppress(EpisodeStopped):
            async with episode:
                for drawn in turns:
                    params = {} if drawn["max_tokens"] is None else {"max_tokens": drawn["max_tokens"]}
                    await episode.generate(params)
                    await episode.observe([{"role": drawn["role"], "content": drawn["reply"]}])
        return episode.output()

    output = run_virtual(scenario())
    record = np.concatenate([s.token_ids for s in output.segments]).tolist()
    assert record == [*output.prompt_ids.tolist(), *output.response_ids.tolist()]
    for request in server.requests:
        assert record[: len(request.prompt_ids)] == request.prompt_ids.tolist()
    sampled = [s.token_ids.tolist() for s in output.segments if s.origin is Origin.MODEL]
    assert sampled == returned
    assert output.response_mask.sum() == sum(map(len, returned))
    assert len(output.response_ids) <= response_length
    assert output.response_logprobs is not None
    assert len(output.response_logprobs) == len(output.response_mask) == len(output.weight_versions)
    assert ((output.weight_versions >= 0) == (output.response_mask == 1)).all()
    if turn_limits["max_assistant_turns"] is not None:
        assert len(returned) <= turn_limits["max_assistant_turns"]
    if turn_limits["max_user_turns"] is not None:
        assert episode.user_turns <= turn_limits["max_user_turns"]
    if turn_limits["max_turn_tokens"] is not None:
        assert all(len(ids) <= turn_limits["max_turn_tokens"] for ids in returned)


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>", "<tool_response>"])
async def test_the_token_at_which_the_server_stops_is_not_text(end: str) -> None:
    episode, _ = make_episode([ScriptedReply(encoded(f"hello{end}")), text_reply("the model")])
    async with episode:
        first = await episode.generate({})
        assert first.content == "hello"
        assert first.token_ids == encoded(f"hello{end}")
        await episode.observe(user("more"))
        await episode.generate({"stop_token_ids": encoded(" model")[-1:]})
    assert episode.output().answer == "the model"


async def test_an_episode_cannot_be_entered_twice() -> None:
    episode, _ = make_episode([text_reply("hi")])
    async with episode:
        await episode.generate({})
    with pytest.raises(EpisodeError, match="entered before"):
        await episode.__aenter__()


async def test_a_step_after_the_end_raises_episode_stopped_and_keeps_the_record() -> None:
    episode, _ = make_episode([text_reply("hi")])
    with pytest.raises(EpisodeStopped):
        async with episode:
            await episode.generate({})
            await episode.finish()
            await episode.observe(user("more"))
    output = episode.output()
    assert output.stop_reason is StopReason.ANSWERED
    assert output.answer == "hi"


async def test_an_exception_in_the_body_is_raised_and_sets_the_stop_reason() -> None:
    episode, _ = make_episode([text_reply("hi")])
    with pytest.raises(ZeroDivisionError):
        async with episode:
            await episode.generate({})
            raise ZeroDivisionError
    assert episode.output().stop_reason is StopReason.FAILED


@pytest.mark.virtual_time
async def test_a_cancelled_generation_keeps_the_tokens_sampled_so_far() -> None:
    episode, _ = make_episode([ScriptedReply(encoded("abcd"), latency_s=4.0)])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.5), episode:
            await episode.generate({})
    output = episode.output()
    assert output.stop_reason is StopReason.CANCELLED
    assert output.response_ids.tolist() == encoded("abcd")[:2]


async def test_an_episode_that_is_over_can_branch_from_an_earlier_mark() -> None:
    replies = in_order(*(text_reply(f"reply {number}") for number in range(1, 5)))
    episode, _ = make_episode(replies, max_assistant_turns=2)
    async with episode:
        before = episode.mark()
        await episode.generate({})
        between = episode.mark()
        await episode.observe(user("more"))
        await episode.generate({})
        with pytest.raises(EpisodeStopped):
            await episode.generate({})
        async with episode.branch(at=before) as first, episode.branch(at=between) as other:
            await first.generate({})
            await other.observe(user("something else"))
            await other.generate({})
    assert [m["content"] for m in first.output().messages] == ["hello", "reply 3"]
    contents = [m["content"] for m in other.output().messages]
    assert contents == ["hello", "reply 1", "something else", "reply 4"]
    assert other.output().segments[1] is episode.output().segments[1]


async def test_on_token_can_end_a_turn() -> None:
    episode, _ = make_episode([text_reply("one two three"), text_reply("done")])
    received: list[int] = []

    def on_token(chunk: Any) -> bool:
        received.extend(chunk.token_ids)
        return len(received) < 3

    async with episode:
        completion = await episode.generate({}, on_token=on_token)
        assert completion.token_ids == received == encoded("one two three")[:3]
        assert not completion.is_cut
        assert await episode.observe(user("go on"))
        assert (await episode.generate({})).content == "done"


async def test_a_stop_text_ends_the_turn_at_the_token_that_completes_it() -> None:
    ids = encoded("<search>the fox</search> and so on<|im_end|>")
    episode, server = make_episode([ScriptedReply(ids), text_reply("It is brown.")])
    async with episode:
        completion = await episode.generate({"stop": ["</search>", "never"]})
        num_tokens = len(completion.token_ids)
        assert list(completion.token_ids) == ids[:num_tokens]
        assert completion.content == "<search>the fox</search>"
        assert "</search>" not in hermes_template().decode(ids[: num_tokens - 1])
        assert not completion.is_cut
        found = hermes_template().encode("<result>brown</result>")
        whole = await episode.generate({"stop": "</search>"}, prefix=found, continues_turn=True)
        assert whole.content == "<search>the fox</search><result>brown</result>It is brown."
    manager = AsyncLLMServerManager([server], decode=hermes_template().decode)
    context = hermes_template().open(user("hello"))
    alone = await manager.generate("alone", prompt_ids=context, sampling_params={"stop": "</search>"})
    assert (alone.token_ids, alone.stop_reason) == (ids[:num_tokens], "stop")


begun_turn = st.fixed_dictionaries(
    {
        "token_ids": st.lists(st.integers(9, 300), min_size=1, max_size=12),
        "ends": st.booleans(),
        "prefix": st.lists(st.integers(9, 300), max_size=6),
        "continues": st.booleans(),
        "forks": st.booleans(),
        "reply": st.text(max_size=10),
    }
)


@examples(150)
@given(turns=st.lists(begun_turn, min_size=1, max_size=6), response_length=st.integers(10, 200))
def test_tokens_on_record_are_those_of_the_server(turns: list[dict[str, Any]], response_length: int) -> None:
    script = DrawnTurns(turns)
    first, server = make_episode(script, response_length=response_length)
    episodes = [first]

    async def scenario() -> list[AgentLoopOutput]:
        async with contextlib.AsyncExitStack() as stack:
            episode = await stack.enter_async_context(first)
            with contextlib.suppress(EpisodeStopped):
                for drawn in turns:
                    if drawn["forks"] and script.returned:
                        episode = await stack.enter_async_context(episode.branch())
                        episodes.append(episode)
                    if drawn["continues"] and episode._transcript.ends_in_open_turn:
                        await episode.generate({}, continues_turn=True)
                        continue
                    if script.returned:
                        await episode.observe(user(drawn["reply"]))
                    await episode.generate({}, prefix=drawn["prefix"])
        return [each.output() for each in episodes]

    outputs = run_virtual(scenario())
    sampled = {id(s): s for o in outputs for s in o.segments if s.origin is Origin.MODEL}
    assert sorted(s.token_ids.tolist() for s in sampled.values()) == sorted(script.returned)
    records = [np.concatenate([s.token_ids for s in o.segments]).tolist() for o in outputs]
    for request, completion in zip(server.requests, script.returned, strict=True):
        whole = [*request.prompt_ids.tolist(), *completion]
        assert any(record[: len(whole)] == whole for record in records)
    for output in outputs:
        assert len(output.response_ids) <= response_length
        assert output.response_mask.sum() == sum(len(s) for s in output.segments if s.origin is Origin.MODEL)


async def test_a_turn_is_parsed_together_with_its_prefix() -> None:
    begun, rest = call_text("add", a=1)[:30], call_text("add", a=1)[30:]
    episode, server = make_episode([text_reply(rest)])
    async with episode:
        completion = await episode.generate({}, prefix=encoded(begun))
    [call] = completion.calls
    assert (call.name, call.arguments) == ("add", {"a": 1})
    assert completion.sampled.token_ids == encoded(rest + "<|im_end|>")
    assert episode.messages[-1]["tool_calls"][0]["function"]["name"] == "add"
    output = episode.output()
    assert [s.origin for s in output.segments] == [Origin.PROMPT, Origin.PREFIX, Origin.MODEL]
    assert output.num_turns == 2
    assert output.response_mask.tolist() == [0] * len(encoded(begun)) + [1] * len(completion.token_ids)
    assert server.requests[0].prompt_ids.tolist()[-len(encoded(begun)) :] == encoded(begun)


async def test_a_cut_turn_is_continued_from_its_own_tokens_and_a_complete_turn_is_not() -> None:
    episode, server = make_episode(in_order(text_reply("one tw", ends=False), text_reply("o three")))
    async with episode:
        with pytest.raises(EpisodeError, match="cannot be continued"):
            await episode.generate({}, continues_turn=True)
        assert (await episode.generate({})).is_cut
        assert (await episode.generate({}, continues_turn=True)).content == "one two three"
        with pytest.raises(EpisodeError, match="cannot be continued"):
            await episode.generate({}, continues_turn=True)
    output = episode.output()
    assert [message["content"] for message in episode.messages] == ["hello", "one two three"]
    assert [s.origin for s in output.segments] == [Origin.PROMPT, Origin.MODEL, Origin.MODEL]
    first, second = server.requests
    assert second.prompt_ids.tolist() == [*first.prompt_ids.tolist(), *encoded("one tw")]
    assert output.num_turns == 2


async def test_a_prefix_is_not_kept_if_the_completion_fails() -> None:
    episode, _ = make_episode(in_order(ScriptedReply([], error="lost"), text_reply("yes")))
    async with episode:
        before = episode.context.tolist()
        with pytest.raises(ServerError):
            await episode.generate({}, prefix=encoded("a"))
        assert episode.context.tolist() == before
        await episode.generate({}, prefix=encoded("b"))
    assert episode.messages[-1]["content"] == "byes"


async def test_a_reply_that_fills_the_response_length_exactly_is_added_and_ends_the_episode() -> None:
    async def ends(response_length: int) -> tuple[bool, StopReason | None, int]:
        episode, _ = make_episode([text_reply("hm")], response_length=response_length)
        async with episode:
            await episode.generate({})
            was_added = await episode.observe(user("and then?"))
        return was_added, episode.stop_reason, len(episode.output().response_ids)

    _, _, length = await ends(512)
    assert await ends(length) == (True, StopReason.RESPONSE_LENGTH, length)


async def test_a_prefix_counts_towards_the_response_length() -> None:
    episode, server = make_episode([text_reply("x" * 50)], response_length=8)
    with pytest.raises(EpisodeStopped):
        async with episode:
            await episode.generate({}, prefix=[20] * 8)
    assert episode.output().stop_reason is StopReason.RESPONSE_LENGTH
    assert not server.requests
