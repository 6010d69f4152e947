"""Tests of clients that change the arguments of calls in their record of a conversation, as Claude Code does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agent_loop.trajectory import IncidentKind
from tests.helpers import call_text, text_reply, user
from tests.serve.harness import MODEL, ProgramHarness, in_order, origins, prompts
from tests.serve.test_anthropic import ADD, client_of

CLAUDE_CODE = {"user-agent": "claude-cli/2.1.197 (external, cli)"}
FIRST = f"Now:{call_text('add', a=1)}"
SECOND = call_text("add", a=2)


def program_of(change: Callable[[dict[str, Any]], dict[str, Any]], headers: dict[str, str]) -> Any:
    """Return a program with three requests, in which the blocks of the first completion are changed."""

    async def program(row: Any, *, anthropic_base_url: str, api_key: str, http_client: Any) -> None:
        create = client_of(anthropic_base_url, api_key, http_client).messages.create
        messages: list[Any] = user("1 + 2?")
        for _ in range(3):
            reply = await create(
                model=MODEL, max_tokens=64, tools=[ADD], messages=messages, extra_headers=headers
            )
            blocks = [change(block.model_dump(exclude_none=True)) for block in reply.content]
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": "3"}
                for block in blocks
                if block["type"] == "tool_use"
            ]
            messages = [*messages, {"role": "assistant", "content": blocks}]
            messages = [*messages, {"role": "user", "content": results or "?"}]

    return program


def fill_in(block: dict[str, Any]) -> dict[str, Any]:
    return {**block, "input": {**block["input"], "b": 0}} if block["type"] == "tool_use" else block


def harness() -> ProgramHarness:
    return ProgramHarness(in_order(text_reply(FIRST), text_reply(SECOND), text_reply("Done.")))


def test_calls_of_claude_code_are_recognised_by_their_ids() -> None:
    ran = harness()
    [trajectory] = ran.run_virtual(program_of(fill_in, CLAUDE_CODE))
    assert origins(trajectory.output) == ["prompt", "model", "tool", "model", "tool", "model"]
    assert [i.kind for i in trajectory.output.incidents] == [IncidentKind.REWRITTEN_CALL]
    last = prompts(ran.server.requests)[-1]
    assert FIRST in last  # as sampled, not as the client has it
    assert SECOND in last


def test_calls_that_are_unchanged_leave_no_incident() -> None:
    [trajectory] = harness().run_virtual(program_of(lambda block: block, CLAUDE_CODE))
    assert len(origins(trajectory.output)) == 6
    assert trajectory.output.incidents == ()


def test_changed_calls_of_other_clients_start_a_new_conversation() -> None:
    trajectories = harness().run_virtual(program_of(fill_in, {}))
    assert [origins(each.output) for each in trajectories] == [["prompt", "model"]] * 3


@pytest.mark.parametrize(
    "change",
    [
        lambda block: {**block, "name": "subtract"} if block["type"] == "tool_use" else block,
        lambda block: {**block, "id": f"other-{block['id']}", "input": {}} if "input" in block else block,
        lambda block: {**block, "text": "Later:"} if block["type"] == "text" else fill_in(block),
    ],
    ids=["name", "id", "text"],
)
def test_other_changes_by_claude_code_start_a_new_conversation(change: Any) -> None:
    first, *_ = harness().run_virtual(program_of(change, CLAUDE_CODE))
    assert origins(first.output) == ["prompt", "model"]
