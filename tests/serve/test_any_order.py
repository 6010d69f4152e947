"""Property tests: recorded tokens match the server and texts match the program, for any sequence of requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import openai
from hypothesis import example, given
from hypothesis import strategies as st

from agent_loop.serve.chat import conversation_of
from agent_loop.serve.chat_requests import ChatMessage
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest
from tests.harness import examples
from tests.helpers import call_text, hermes_template, text_reply, user
from tests.serve.harness import ADD, MODEL, ProgramHarness, tokens

ANSWERS = ["yes", "no", f"now:{call_text('add', a=1, b=2)}", call_text("add", a=1) + call_text("add", a=2)]
"""A few answers, so that conversations are often alike. They match the template, so that texts can be compared."""
QUESTIONS = ["why?", "how? ", "who?"]
SYSTEMS = ["lead", "help"]


@dataclass
class Conversation:
    """Conversation as a program knows it."""

    messages: list[dict[str, Any]]
    """Messages as they were sent and received."""
    tokens: list[int] = field(default_factory=list)
    """Token ids of the last prompt and its completion."""


class CyclingScript:
    """Script that returns the given texts in turn, each with a latency."""

    def __init__(self, choices: Sequence[tuple[int, int]]) -> None:
        self._choices = choices
        self._num_sent = 0

    def __call__(self, _: ScriptedRequest) -> ScriptedReply:
        answer, latency_s = self._choices[self._num_sent % len(self._choices)]
        self._num_sent += 1
        return text_reply(ANSWERS[answer], latency_s=latency_s)


class Client:
    """Client that runs conversations in one session, and checks each completion."""

    def __init__(self, create: Any) -> None:
        self._create = create
        self.known: list[Conversation] = []
        self.asked: list[tuple[list[int], list[int]]] = []
        """Prompt and completion of each request."""
        self.sent: list[tuple[list[dict[str, Any]], Any]] = []
        self.retried: list[tuple[list[dict[str, Any]], Any]] = []

    async def do(self, action: str, which: int, what: int, style: int) -> None:
        """Run one step of a program."""
        past = self.known[which % len(self.known)] if self.known else None
        if action == "retry" and self.sent:
            await self._retry(which)
        elif past is None or action == "begin":
            system = {"role": "system", "content": SYSTEMS[what % len(SYSTEMS)]}
            past = Conversation([system, *user(QUESTIONS[style % len(QUESTIONS)])])
            await self._ask(past, style=0)
        elif action == "go_on":
            await self._ask(Conversation([*past.messages, *_replies(past, what)]), style=style, past=past)
        elif action == "edit":
            places = [n for n, message in enumerate(past.messages) if message["role"] != "system"]
            kept = past.messages[: places[what % len(places)]]
            await self._ask(Conversation([*kept, *user(f"edited {style}")]), style=style)
        elif action == "compact":
            await self._ask(Conversation([past.messages[0], *user(f"in short {what}")]), style=0)
        else:
            await self._ask(Conversation(past.messages[:-1]), style=style)

    async def _ask(self, conversation: Conversation, *, style: int, past: Conversation | None = None) -> None:
        """Send a conversation and check the completion.

        Args:
            conversation: The conversation to send.
            style: How the client rewrites the messages.
            past: Conversation that this one continues, if any.
        """
        messages = [_restyled(message, style) for message in conversation.messages]
        reply = await self._send(messages, retries=0)
        self.sent.append((messages, reply.choices[0]))
        self._check(reply, conversation, past=past)

    async def _retry(self, which: int) -> None:
        """Send a request again as a retry."""
        messages, _ = self.sent[which % len(self.sent)]
        self.retried.append((messages, (await self._send(messages, retries=1)).choices[0]))

    async def _send(self, messages: list[dict[str, Any]], *, retries: int) -> Any:
        return await self._create(
            model=MODEL,
            messages=messages,
            tools=[ADD],
            extra_body={"return_token_ids": True},
            extra_headers={"x-stainless-retry-count": str(retries)},
        )

    def _check(self, reply: Any, conversation: Conversation, *, past: Conversation | None) -> None:
        template, choice = hermes_template(), reply.choices[0]
        prompt: list[int] = reply.prompt_token_ids
        read = conversation_of([ChatMessage.model_validate(m) for m in conversation.messages])
        shown = template.decode(prompt)
        assert _without_space(shown) == _without_space(template.decode(template.open(read, tools=[ADD])))
        if past is not None:
            # The conversation may be known twice, with and without a space at an end. Either may be continued.
            starts = [known.tokens for known in self.known if known.messages == past.messages]
            assert any(prompt[: len(start)] == start for start in starts)
        self.asked.append((prompt, choice.token_ids))
        answer = choice.message.model_dump(exclude_none=True, exclude={"token_ids"})
        self.known.append(Conversation([*conversation.messages, answer], [*prompt, *choice.token_ids]))


def _without_space(text: str) -> str:
    """Remove the space at the end of a message, which may differ."""
    return text.replace(" <|im_end|>", "<|im_end|>")


def _replies(past: Conversation, what: int) -> list[dict[str, Any]]:
    calls = past.messages[-1].get("tool_calls") or []
    answers = [{"role": "tool", "tool_call_id": c["id"], "content": f"it is {what}"} for c in calls]
    return answers or user(QUESTIONS[what % len(QUESTIONS)])


def _restyled(message: dict[str, Any], style: int) -> dict[str, Any]:
    """Return the message as another client would write it."""
    message = dict(message)
    if message["role"] == "user" and style & 1:
        text = message["content"].rstrip() if style & 2 else message["content"]
        message["content"] = [{"type": "text", "text": text}]
    if message["role"] != "assistant":
        return message
    if style & 2:
        message |= {"refusal": None, "annotations": [], "name": "agent", "notes": {"x": 1}}
    if style & 4 and not message.get("content"):
        message["content"] = None if style & 1 else ""
    if style & 8 and message.get("tool_calls"):
        message["tool_calls"] = [_call_restyled(call) for call in message["tool_calls"]]
    return message


def _call_restyled(call: dict[str, Any]) -> dict[str, Any]:
    arguments = dict(reversed(list(json.loads(call["function"]["arguments"]).items())))
    return {**call, "function": {**call["function"], "arguments": json.dumps(arguments, indent=1)}}


ACTIONS = st.tuples(
    st.sampled_from(["begin", "go_on", "go_on", "go_on", "edit", "compact", "repeat", "retry"]),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 15),
)


@examples(30)
@given(
    threads=st.lists(st.lists(ACTIONS, min_size=1, max_size=6), min_size=1, max_size=3),
    sayings=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=5),
)
@example(threads=[[("begin", 0, 0, 1), ("repeat", 0, 0, 3), ("go_on", 0, 0, 3)]], sayings=[(0, 0)])
def test_recorded_tokens_match_the_server_and_texts_match_the_program(
    threads: list[list[tuple[str, int, int, int]]], sayings: list[tuple[int, int]]
) -> None:
    asked: list[tuple[list[int], list[int]]] = []

    async def program(row: Any, *, base_url: str, api_key: str, http_client: Any) -> None:
        client = openai.AsyncOpenAI(
            base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0
        )
        speaker = Client(client.chat.completions.create)

        async def lead(actions: Sequence[tuple[str, int, int, int]]) -> None:
            for action in actions:
                await speaker.do(*action)

        async with asyncio.TaskGroup() as group:
            for actions in threads:
                group.create_task(lead(actions))
        asked.extend(speaker.asked)

    harness = ProgramHarness(CyclingScript(sayings))
    trajectories = harness.run_virtual(program)
    assert [t.output.failure for t in trajectories] == [None] * len(trajectories)
    records = [tokens(t.output) for t in trajectories]
    assert sorted(prompt for prompt, _ in asked) == sorted(
        request.prompt_ids.tolist() for request in harness.server.requests
    )
    for prompt, completion in asked:
        whole = [*prompt, *completion]
        assert any(record[: len(whole)] == whole for record in records)
    segments = {id(s): s for t in trajectories for s in t.output.segments if s.weight_version is not None}
    assert sum(map(len, segments.values())) == sum(len(completion) for _, completion in asked)
