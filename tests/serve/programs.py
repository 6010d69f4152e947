"""Agent programs that tests refer to by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import openai

from tests.helpers import user
from tests.serve.harness import ADD


async def asks_once(row: Any, *, base_url: str, api_key: str) -> float:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        await client.chat.completions.create(model="m", messages=user("?"))
    return 1.0


async def leads_three_conversations(row: Any, *, base_url: str, api_key: str, http_client: Any) -> float:
    """Call tools in one conversation, branch at its start, and ask a helper with its own system prompt."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
    ask = partial(client.chat.completions.create, model="m", tools=[ADD])
    opening: list[Any] = [{"role": "user", "content": str(row["question"])}]
    first = (await ask(messages=opening)).choices[0].message
    messages = [*opening, first]
    reply = first
    while reply.tool_calls:
        messages += [{"role": "tool", "tool_call_id": c.id, "content": "3"} for c in reply.tool_calls]
        reply = (await ask(messages=messages)).choices[0].message
        messages.append(reply)
    helper = [{"role": "system", "content": "help"}, {"role": "user", "content": str(reply.content)}]
    stream = await ask(messages=helper, stream=True)
    help_given = [chunk.choices[0].delta.content or "" async for chunk in stream]
    answers = [{"role": "tool", "tool_call_id": c.id, "content": "other"} for c in first.tool_calls or ()]
    await ask(messages=[*opening, first, *answers, {"role": "user", "content": "".join(help_given)}])
    return 1.0


async def asks_something_else_each_time(row: Any, *, base_url: str, api_key: str, http_client: Any) -> float:
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
    for number in range(3):
        question = f"question {number} of run {NUM_RUNS['so far']}"
        await client.chat.completions.create(model="m", messages=user(question))
    NUM_RUNS["so far"] += 1
    return 1.0


NUM_RUNS = {"so far": 0}


async def continues_and_forces(row: Any, *, base_url: str, api_key: str, http_client: Any) -> float:
    """Continue a cut turn, begin a turn with a text, and force a call, each on a branch of its own."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
    ask = partial(client.chat.completions.create, model="m", tools=[ADD])
    rest = {"continue_final_message": True}
    opening: list[Any] = [{"role": "user", "content": str(row["question"])}]
    first = (await ask(messages=opening, tool_choice="none", max_tokens=2)).choices[0].message
    begun: Any = {"role": "assistant", "content": first.content}
    more = await ask(messages=[*opening, begun], tool_choice="none", extra_body=rest)
    answer = {"role": "assistant", "content": str(first.content) + str(more.choices[0].message.content)}
    next_turn = [*opening, answer, *user("next")]
    await ask(
        messages=[*next_turn, {"role": "assistant", "content": "Well, "}], tool_choice="none", extra_body=rest
    )
    await ask(messages=next_turn, tool_choice="none")
    await ask(messages=[*opening, *user("call")], tool_choice="required")
    return 1.0
