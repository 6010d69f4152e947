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

ANSWERS = [
    "yes",
    "no",
    f"now:{call_text('add', a=1, b=2)}",
    call_text("add", a=1) + call_text("add", a=2),
    call_text("add", a=1)[:25],
    "<think>\nso\n</think>\n\nhm",
]
"""A few answers, so that conversations are often alike."""
QUESTIONS = ["why?", "how? ", "who?"]
SYSTEMS = ["lead", "help"]
REST = {"continue_final_message": True}


@dataclass
class Conversation:
    """Conversation as a program knows it."""

    messages: list[dict[str, Any]]
    """Messages as they were sent and received."""
    tokens: list[int] = field(default_factory=list)
    """Token ids of the last prompt and its completion."""
    is_cut: bool = False
    """Whether the last turn can be continued."""
    is_plain: bool = True
    """Whether all turns are as the chat template writes them, so that texts can be compared."""


class CyclingScript:
    """Script that returns the given texts in turn, each with a latency, and cut or not."""

    def __init__(self, choices: Sequence[tuple[int, int, bool]]) -> None:
        self._choices = choices
        self._num_sent = 0

    def __call__(self, _: ScriptedRequest) -> ScriptedReply:
        answer, latency_s, ends = self._choices[self._num_sent % len(self._choices)]
        self._num_sent += 1
        return text_reply(ANSWERS[answer], latency_s=latency_s, ends=ends)


class Client:
    """Client that runs conversations in one session, and checks each completion."""

    def __init__(self, create: Any) -> None:
        self._create = create
        self.known: list[Conversation] = []
        self.asked: list[tuple[list[int], list[int]]] = []
        """Prompt and completion of each request."""
        self.sent: list[tuple[dict[str, Any], list[int]]] = []
        """Each request with its completion."""

    async def do(self, action: str, which: int, what: int, style: int) -> None:
        """Run one step of a program."""
        past = self.known[which % len(self.known)] if self.known else None
        if action == "retry" and self.sent:
            request, _ = self.sent[which % len(self.sent)]
            again = await self._create(**request, extra_headers={"x-stainless-retry-count": "1"})
            assert again.choices[0].token_ids in [ids for sent, ids in self.sent if sent == request]
        elif past is None or action == "begin":
            system = {"role": "system", "content": SYSTEMS[what % len(SYSTEMS)]}
            await self._ask(Conversation([system, *user(QUESTIONS[style % len(QUESTIONS)])]))
        elif action == "go_on":
            await self._ask(self._next(past, what), style=style, past=past)
        elif action == "edit":
            places = [n for n, message in enumerate(past.messages) if message["role"] != "system"]
            kept = past.messages[: places[what % len(places)]]
            await self._ask(
                Conversation([*kept, *user(f"edited {style}")], is_plain=past.is_plain), style=style
            )
        elif action == "compact":
            await self._ask(Conversation([past.messages[0], *user(f"in short {what}")]))
        elif action == "force":
            await self._ask(self._next(past, what, is_plain=False), past=past, tool_choice="required")
        elif action == "prefill":
            begun = {"role": "assistant", "content": ANSWERS[what % len(ANSWERS)]}
            await self._ask(self._next(past, what, is_plain=False), past=past, begun=begun)
        elif action == "continue" and past.is_cut:
            *before, begun = past.messages
            prompt = await self._ask(Conversation(before, is_plain=False), begun=begun)
            assert any(prompt == c.tokens for c in self.known if c.is_cut and c.messages == past.messages)
        else:
            await self._ask(Conversation(past.messages[:-1], is_plain=past.is_plain), style=style)

    def _next(self, past: Conversation, what: int, *, is_plain: bool = True) -> Conversation:
        return Conversation([*past.messages, *_replies(past, what)], is_plain=is_plain and past.is_plain)

    async def _ask(
        self,
        conversation: Conversation,
        *,
        style: int = 0,
        past: Conversation | None = None,
        begun: dict[str, Any] | None = None,
        **fields: Any,
    ) -> list[int]:
        """Send a conversation, check the completion and return the tokens of the prompt.

        Args:
            conversation: The conversation to send.
            style: How the client rewrites the messages.
            past: Conversation that this one continues, if any.
            begun: Message that the model continues, if any.
            fields: Further fields of the request.
        """
        messages = [_restyled(message, style) for message in conversation.messages]
        sent = [*messages, begun] if begun else messages
        body = {"return_token_ids": True, **(REST if begun else {})}
        request = {"model": MODEL, "messages": sent, "tools": [ADD], "extra_body": body, **fields}
        reply = await self._create(**request)
        template, choice = hermes_template(), reply.choices[0]
        prompt: list[int] = reply.prompt_token_ids
        self.sent.append((request, choice.token_ids))
        self.asked.append((prompt, choice.token_ids))
        if conversation.is_plain:
            read = conversation_of([ChatMessage.model_validate(m) for m in conversation.messages])
            shown = _without_space(template.decode(prompt))
            assert shown == _without_space(template.decode(template.open(read, tools=[ADD])))
        if past is not None:
            # The conversation may be known twice, with and without a space at an end. Either may be continued.
            starts = [known.tokens for known in self.known if known.messages == past.messages]
            assert any(prompt[: len(start)] == start for start in starts)
        answer = choice.message.model_dump(exclude_none=True, exclude={"token_ids"})
        for name in ("content", "reasoning_content") if begun else ():
            if joined := (begun or {}).get(name, "") + (answer.get(name) or ""):
                answer[name] = joined
        is_cut = choice.finish_reason == "length"
        self.known.append(
            Conversation(
                [*conversation.messages, answer],
                [*prompt, *choice.token_ids],
                is_cut and bool(answer.get("content")) and not answer.get("tool_calls"),
                conversation.is_plain and not is_cut and "reasoning_content" not in answer,
            )
        )
        return prompt


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
    st.sampled_from(
        ["begin", "edit", "compact", "repeat", "retry", "prefill", "force"] + ["go_on"] * 3 + ["continue"] * 2
    ),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 15),
)


@examples(60)
@given(
    threads=st.lists(st.lists(ACTIONS, min_size=1, max_size=6), min_size=1, max_size=3),
    sayings=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.booleans()), min_size=1, max_size=5),
)
@example(threads=[[("begin", 0, 0, 1), ("repeat", 0, 0, 3), ("go_on", 0, 0, 3)]], sayings=[(0, 0, True)])
def test_recorded_tokens_match_the_server_and_texts_match_the_program(
    threads: list[list[tuple[str, int, int, int]]], sayings: list[tuple[int, int, bool]]
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
