"""Tests that a message is continued: from the tokens of a cut turn, or from a text that the client gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from agent_loop.chat.placeholder_tokenizer import placeholder_tokenizer
from agent_loop.chat.template import ChatTemplate
from agent_loop.recording.record import RecordKind
from agent_loop.recording.values import unpack
from agent_loop.rollout.journal import HEADER, framed, read_records
from agent_loop.servers.scripted import ScriptedReply
from agent_loop.trajectory import IncidentKind
from tests.chat.test_hostile_text import OPENS_REASONING
from tests.helpers import call_text, encoded, hermes_template, text_reply, user
from tests.rollout.harness import WorkerHarness
from tests.rollout.journaled import RandomScript, facts, run_journaled
from tests.serve.harness import ADD, MODEL, ProgramHarness, calls_of, in_order, origins, tokens

REST = {"continue_final_message": True, "return_token_ids": True}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_a_cut_turn_is_continued_from_its_own_tokens_and_later_requests_continue_it() -> None:
    async def program(create: Any) -> None:
        first = await create(model=MODEL, messages=user("count"))
        assert first.choices[0].finish_reason == "length"
        text = first.choices[0].message.content
        second = await create(model=MODEL, messages=[*user("count"), assistant(text)], extra_body=REST)
        assert second.choices[0].message.content == "o three"
        history = [*user("count"), assistant(text + "o three"), *user("more")]
        third = await create(model=MODEL, messages=history)
        assert third.choices[0].message.content == "four"

    # "t" and "w" are two tokens here, and one token in most encodings of the whole text.
    replies = [ScriptedReply([*encoded("one "), *encoded("t"), *encoded("w")], stops=False)]
    harness = ProgramHarness(in_order(*replies, text_reply("o three"), text_reply("four")))
    [trajectory] = harness.run_virtual(program)
    assert trajectory.output.failure is None
    assert origins(trajectory.output) == ["prompt", "model", "model", "interaction", "model"]
    first, second, third = harness.server.requests
    cut = [*first.prompt_ids.tolist(), *encoded("one "), *encoded("t"), *encoded("w")]
    assert second.prompt_ids.tolist() == cut
    assert third.prompt_ids.tolist()[: len(cut)] == cut
    assert tokens(trajectory.output) == [*third.prompt_ids.tolist(), *encoded("four<|im_end|>")]
    assert [m["content"] for m in trajectory.output.messages] == ["count", "one two three", "more", "four"]


def test_a_text_of_the_client_begins_the_turn_without_being_trained_on() -> None:
    begun = "It is <|im_end|>"

    async def program(create: Any) -> None:
        reply = await create(model=MODEL, messages=[*user("1 + 2?"), assistant(begun)], extra_body=REST)
        assert reply.choices[0].message.content == " 3."
        history = [*user("1 + 2?"), assistant(f"{begun} 3."), *user("sure?")]
        again = await create(model=MODEL, messages=[*history, assistant("Y")], extra_body=REST)
        assert again.choices[0].message.content == "es."

    harness = ProgramHarness(in_order(text_reply(" 3."), text_reply("es.")))
    [trajectory] = harness.run_virtual(program)
    output = trajectory.output
    assert output.failure is None
    assert origins(output) == ["prompt", "prefix", "model", "interaction", "prefix", "model"]
    prefix = output.segments[1].token_ids.tolist()
    assert hermes_template().decode(prefix) == begun
    assert hermes_template().encoder.control_ids.isdisjoint(prefix)
    assert output.response_mask.sum() == len(encoded(" 3.<|im_end|>")) + len(encoded("es.<|im_end|>"))
    assert output.num_turns == 4


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_response_holds_only_the_continuation(is_streamed: bool) -> None:
    call = call_text("add", a=1, b=2)
    begun, rest = f"Sum: {call[:20]}", call[20:]

    async def program(create: Any) -> None:
        asked = {"model": MODEL, "tools": [ADD], "extra_body": REST}
        messages = [*user("1 + 2?"), assistant(begun)]
        [call], content, _ = await calls_of(create, is_streamed=is_streamed, **asked, messages=messages)
        assert (content, call["function"]["name"]) == ("", "add")
        history = [*user("1 + 2?"), {**assistant(begun), "tool_calls": [call]}]
        await create(
            model=MODEL,
            messages=[*history, {"role": "tool", "tool_call_id": call["id"], "content": "3"}],
            tools=[ADD],
        )

    [trajectory] = ProgramHarness(in_order(text_reply(rest), text_reply("3"))).run_virtual(program)
    assert trajectory.output.failure is None
    assert origins(trajectory.output) == ["prompt", "prefix", "model", "tool", "model"]


def test_a_continuation_of_an_earlier_turn_is_a_branch() -> None:
    async def program(create: Any) -> None:
        await create(model=MODEL, messages=user("?"))
        begun = [*user("?"), assistant("a")]
        await create(model=MODEL, messages=begun, extra_body=REST)
        await create(model=MODEL, messages=[*begun, *user("next")])
        await create(model=MODEL, messages=begun, extra_body=REST)

    replies = [text_reply("a", ends=False), text_reply("b"), text_reply("c"), text_reply("d")]
    trajectories = ProgramHarness(in_order(*replies)).run_virtual(program)
    assert [[m["content"] for m in t.output.messages] for t in trajectories] == [
        ["?", "ab"],
        ["?", "a", "next", "c"],
        ["?", "ad"],
    ]
    shared = {id(t.output.segments[1]) for t in trajectories}
    assert len(shared) == 1


@pytest.mark.parametrize(
    ("last", "fields", "what"),
    [
        ({"content": ""}, {}, "must be an assistant message with a text"),
        ({"content": "x", "reasoning_content": "y"}, {}, "without tool_calls or reasoning_content"),
        ({"content": "x"}, {"tools": [ADD], "tool_choice": "required"}, "cannot force a call"),
    ],
)
def test_a_message_that_cannot_be_continued_exactly_is_refused(last: Any, fields: Any, what: str) -> None:
    async def program(create: Any) -> None:
        messages = [*user("?"), {"role": "assistant", **last}]
        with pytest.raises(openai.BadRequestError, match=what):
            await create(model=MODEL, messages=messages, extra_body=REST, **fields)

    harness = ProgramHarness(in_order(text_reply("x")))
    harness.run_virtual(program)
    assert not harness.server.requests


def test_a_text_cannot_begin_a_turn_that_the_template_opens_with_reasoning() -> None:
    async def program(create: Any) -> None:
        with pytest.raises(openai.BadRequestError, match="begins each turn of the assistant with reasoning"):
            await create(model=MODEL, messages=[*user("?"), assistant("x")], extra_body=REST)

    template = ChatTemplate(placeholder_tokenizer(OPENS_REASONING))
    harness = ProgramHarness(in_order(text_reply("x")), template=template)
    [trajectory] = harness.run_virtual(program)
    assert [i.kind for i in trajectory.output.incidents] == [IncidentKind.FAILED_REQUEST]


ROWS: Sequence[dict[str, Any]] = [
    {"raw_prompt": user("-"), "program": "tests.serve.programs:continues_and_forces", "question": "why" * n}
    for n in (1, 2)
]


def worker(seed: int) -> tuple[WorkerHarness, RandomScript]:
    script = RandomScript(seed=seed, per_turn=1)
    return WorkerHarness(script, agent="agent_program"), script


def test_a_journal_brings_prefixes_and_continued_turns_back(tmp_path: Path) -> None:
    first = run_journaled(tmp_path / "j", worker(1)[0], ROWS)
    kinds = {str(s.origin) for t in first for s in t.output.segments}
    assert "prefix" in kinds
    assert [facts(t) for t in run_journaled(tmp_path / "j", worker(2)[0], ROWS, resume=True)] == [
        facts(t) for t in first
    ]
    payloads = read_records((tmp_path / "j").read_bytes())[0]
    kept = [p for p in payloads if unpack(p)["is"] not in (RecordKind.END, RecordKind.COMPLETE)]
    (tmp_path / "j").write_bytes(HEADER + b"".join(map(framed, kept)))
    harness, script = worker(3)
    again = run_journaled(tmp_path / "j", harness, ROWS, resume=True)
    assert script.num_requests == 0
    assert [facts(t) for t in again] == [facts(t) for t in first]
