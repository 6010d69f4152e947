"""Turns that begin with given tokens, and turns that continue after a cut."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.chat.template import ChatTemplate
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


def make_episode(script: Any, *, template: ChatTemplate | None = None, **limits: Any) -> tuple[Any, Any]:
    server = ScriptedServer(script)
    episode = Episode(
        user("hello"),
        template=template or hermes_template(),
        server_manager=AsyncLLMServerManager([server]),
        limits=EpisodeLimits(**{"prompt_length": 512, "response_length": 512, **limits}),
    )
    return episode, server


turn = st.fixed_dictionaries(
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
@given(turns=st.lists(turn, min_size=1, max_size=6), response_length=st.integers(10, 200))
def test_tokens_on_record_are_those_that_the_server_received_and_returned(
    turns: list[dict[str, Any]], response_length: int
) -> None:
    returned: list[list[int]] = []

    def script(request: ScriptedRequest) -> ScriptedReply:
        drawn = turns[len(returned)]
        ids = [*drawn["token_ids"], *([encoded("<|im_end|>")[0]] if drawn["ends"] else [])]
        returned.append(ids[: request.sampling_params.max_tokens])
        return ScriptedReply(ids, stops=drawn["ends"])

    first, server = make_episode(script, response_length=response_length)
    episodes = [first]

    async def scenario() -> list[AgentLoopOutput]:
        async with contextlib.AsyncExitStack() as stack:
            episode = await stack.enter_async_context(first)
            with contextlib.suppress(EpisodeStopped):
                for drawn in turns:
                    if drawn["forks"] and len(returned):
                        episode = await stack.enter_async_context(episode.branch())
                        episodes.append(episode)
                    if drawn["continues"] and episode._transcript.ends_in_open_turn:
                        await episode.generate({}, continues_turn=True)
                        continue
                    if len(returned):
                        await episode.observe(user(drawn["reply"]))
                    await episode.generate({}, prefix=drawn["prefix"])
        return [each.output() for each in episodes]

    outputs = run_virtual(scenario())
    received = [request.prompt_ids.tolist() for request in server.requests]
    sampled = {id(s): s for o in outputs for s in o.segments if s.origin is Origin.MODEL}
    assert sorted(s.token_ids.tolist() for s in sampled.values()) == sorted(returned)
    records = [np.concatenate([s.token_ids for s in o.segments]).tolist() for o in outputs]
    for prompt, completion in zip(received, returned, strict=True):
        whole = [*prompt, *completion]
        assert any(record[: len(whole)] == whole for record in records)
    for output in outputs:
        assert len(output.response_ids) <= response_length
        assert output.response_mask.sum() == sum(len(s) for s in output.segments if s.origin is Origin.MODEL)


def test_a_turn_is_parsed_together_with_its_prefix() -> None:
    begun, rest = call_text("add", a=1)[:30], call_text("add", a=1)[30:]
    episode, server = make_episode(lambda _: text_reply(rest))

    async def scenario() -> Any:
        async with episode:
            return await episode.generate({}, prefix=encoded(begun))

    completion = run_virtual(scenario())
    [call] = completion.calls
    assert (call.name, call.arguments) == ("add", {"a": 1})
    assert completion.sampled.token_ids == encoded(rest + "<|im_end|>")
    assert episode.messages[-1]["tool_calls"][0]["function"]["name"] == "add"
    output = episode.output()
    assert [s.origin for s in output.segments] == [Origin.PROMPT, Origin.PREFIX, Origin.MODEL]
    assert output.num_turns == 2
    assert output.response_mask.tolist() == [0] * len(encoded(begun)) + [1] * len(completion.token_ids)
    assert server.requests[0].prompt_ids.tolist()[-len(encoded(begun)) :] == encoded(begun)


def test_a_cut_turn_is_continued_from_its_own_tokens() -> None:
    replies = [text_reply("one tw", ends=False), text_reply("o three")]
    episode, server = make_episode(lambda _: replies.pop(0))

    async def scenario() -> None:
        async with episode:
            first = await episode.generate({})
            assert first.is_cut
            second = await episode.generate({}, continues_turn=True)
            assert second.content == "one two three"

    run_virtual(scenario())
    output = episode.output()
    assert [message["content"] for message in episode.messages] == ["hello", "one two three"]
    assert [s.origin for s in output.segments] == [Origin.PROMPT, Origin.MODEL, Origin.MODEL]
    first, second = server.requests
    assert second.prompt_ids.tolist() == [*first.prompt_ids.tolist(), *encoded("one tw")]
    assert output.num_turns == 2


def test_a_complete_turn_cannot_be_continued() -> None:
    episode, _ = make_episode(lambda _: text_reply("done"))

    async def scenario() -> None:
        async with episode:
            with pytest.raises(EpisodeError, match="cannot be continued"):
                await episode.generate({}, continues_turn=True)
            await episode.generate({})
            with pytest.raises(EpisodeError, match="cannot be continued"):
                await episode.generate({}, continues_turn=True)

    run_virtual(scenario())


def test_a_prefix_is_not_kept_if_the_completion_fails() -> None:
    replies: list[Any] = [ScriptedReply([], error="lost"), text_reply("yes")]
    episode, _ = make_episode(lambda _: replies.pop(0))

    async def scenario() -> None:
        async with episode:
            before = episode.context.tolist()
            with pytest.raises(ServerError):
                await episode.generate({}, prefix=encoded("a"))
            assert episode.context.tolist() == before
            await episode.generate({}, prefix=encoded("b"))

    run_virtual(scenario())
    assert episode.messages[-1]["content"] == "byes"


def test_a_prefix_counts_towards_the_response_length() -> None:
    episode, server = make_episode(lambda _: text_reply("x" * 50), response_length=8)

    async def scenario() -> None:
        async with episode:
            with pytest.raises(EpisodeStopped):
                await episode.generate({}, prefix=[20] * 8)

    run_virtual(scenario())
    assert episode.output().stop_reason is StopReason.RESPONSE_LENGTH
    assert not server.requests
