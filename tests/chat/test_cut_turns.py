from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.servers.scripted import ScriptedReply
from agent_loop.trajectory import AgentLoopOutput, Trajectory
from agent_loop.types import MalformedCall, Message, Origin
from tests.helpers import call_text, encoded, text_reply
from tests.rollout.harness import Adder, WorkerHarness

START, END, NEWLINE = encoded("<|im_start|>"), encoded("<|im_end|>"), encoded("\n")
ROLE_OF = {tuple(encoded(role)): role for role in ("user", "assistant")}
TEXTS = [
    call_text("add", a=1, b=2),
    "First this.\n" + call_text("add", a=10, b=-3),
    call_text("add", a=1, b=2) + "\n" + call_text("add", a=3, b=4),
    "<think>\nadd?\n</think>\n\n" + call_text("add", a=5, b=5),
    "It is 3.\n",
    "",
]


@register("continues_after_truncated_turns")
class ContinuesAfterTruncatedTurns(AgentLoopBase):
    """Loop with one turn per limit of the row. Tools reply to calls, and the user replies to everything else."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        async with self.episode(row["raw_prompt"], tools=self.context.tools) as episode:
            for max_tokens in row["limits"]:
                completion = await episode.generate({**sampling_params, "max_tokens": max_tokens})
                results = iter(await episode.call_tools(completion.parsed.tool_calls))
                replies: list[Message] = [
                    {"role": "tool", "content": call.error}
                    if isinstance(call, MalformedCall)
                    else {"role": "tool", "name": call.name, "content": next(results).response.text or ""}
                    for call in completion.calls
                ]
                await episode.observe(replies or [{"role": "user", "content": "Continue."}])
            await episode.finish()
            return episode.output()


def run(turns: list[tuple[str, int]]) -> tuple[Trajectory, WorkerHarness]:
    script = [text_reply(text) for text, _ in turns]
    harness = WorkerHarness(script, tools=[Adder()], agent="continues_after_truncated_turns")
    limits = [min(limit, len(reply.token_ids)) for reply, (_, limit) in zip(script, turns, strict=True)]
    return harness.run_one(limits=limits), harness


def turns_of(ids: list[int]) -> list[list[int]]:
    """Return the tokens of each turn, from after its start token to the next start token."""
    starts = [i for i, token_id in enumerate(ids) if token_id == START[0]]
    return [ids[a + 1 : b] for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)]


turns = st.lists(st.tuples(st.sampled_from(TEXTS), st.integers(1, 200)), min_size=1, max_size=6)


@settings(deadline=None)
@given(turns)
def test_turns_truncated_at_any_token_are_closed_exactly_once(turns: list[tuple[str, int]]) -> None:
    trajectory, harness = run(turns)
    output = trajectory.output
    assert output.failure is None
    record = np.concatenate([segment.token_ids for segment in output.segments]).tolist()
    for request in harness.server.requests:
        assert record[: len(request.prompt_ids)] == request.prompt_ids.tolist()

    *closed, last = turns_of(record)
    for number, turn in enumerate(closed[1:]):  # The first turn is the system prompt.
        role = ROLE_OF[tuple(turn[: turn.index(NEWLINE[0])])]
        assert role == ("assistant" if number % 2 else "user")
        assert turn.count(END[0]) == 1
        assert turn[-2:] == [*END, *NEWLINE]
    assert tuple(last[: last.index(NEWLINE[0])]) == tuple(encoded("assistant"))
    assert END[0] not in last


@settings(deadline=None)
@given(turns)
def test_truncated_turns_have_exactly_the_sampled_tokens(turns: list[tuple[str, int]]) -> None:
    trajectory, _ = run(turns)
    output = trajectory.output
    sampled = [segment.token_ids.tolist() for segment in output.segments if segment.origin is Origin.MODEL]
    scripted: list[ScriptedReply] = [text_reply(text) for text, _ in turns]
    expected = [list(r.token_ids)[:limit] for r, (_, limit) in zip(scripted, turns, strict=True)]
    assert sampled == expected
    assert len(output.response_ids) == len(output.response_mask)
    assert int(output.response_mask.sum()) == sum(map(len, expected))
    assert output.response_logprobs is not None
    assert (output.response_logprobs[output.response_mask == 0] == 0).all()
