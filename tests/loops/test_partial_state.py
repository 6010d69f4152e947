"""Resumption after calls of tools whose state cannot be restored. Tokens are kept unless the lost state is read."""

from __future__ import annotations

import random
from typing import Any, ClassVar
from uuid import uuid4

import pytest

from agent_loop.integrations import verl
from agent_loop.runtime.instances import OnReplay
from agent_loop.testing import run_virtual
from agent_loop.trajectory import AgentLoopOutput, IncidentKind
from agent_loop.types import StopReason
from tests.helpers import call_text, encoded
from tests.loops.partials import TOKEN_S, CountingTool, PartialRunner, facts, random_turns

LATENCY_S = 0.4
LOOK = f"I look. {call_text('look', a=0)}"
NOT_RESTORABLE = {"look": (OnReplay.RESTART, LATENCY_S)}


class Judge(CountingTool):
    """Tool whose reward is the number of calls of its trajectory."""

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        self._counts.started["verdict"] += 1
        return float(self.open[instance_id])


class VerlTool(verl.BaseTool):
    """Tool as written for verl: it has state, a reward that reads the state, and no `on_replay`."""

    started: ClassVar[list[str]] = []

    def __init__(self, name: str, counts: Any, **options: Any) -> None:
        parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        function = {"name": name, "description": "Does.", "parameters": parameters}
        super().__init__({}, {"type": "function", "function": function})
        self.open: dict[str, int] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, Any]:
        instance_id = instance_id or str(uuid4())
        self.open[instance_id] = 0
        return instance_id, verl.ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.started.append(instance_id)
        self.open[instance_id] += 1
        return verl.ToolResponse(text="done"), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(self.open[instance_id])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.open[instance_id]


def after_calls(*turns: str, tokens: int = 3, latency_s: float = LATENCY_S) -> float:
    """Return the time at which `tokens` tokens are sampled after these turns. Each turn calls one tool."""
    sampled = sum(len(encoded(f"{turn}<|im_end|>")) for turn in turns)
    return (sampled + tokens + 0.5) * TOKEN_S + len(turns) * latency_s


def restarts(output: AgentLoopOutput) -> list[str]:
    return [i.detail for i in output.incidents if i.kind is IncidentKind.RESTARTED]


def test_a_new_call_of_a_tool_whose_state_is_lost_starts_the_trajectory_again() -> None:
    turns = [LOOK, LOOK, "It is done."]
    runner = PartialRunner(turns, tools=NOT_RESTORABLE)
    part = run_virtual(runner.run(cancel_after_s=after_calls(LOOK)))
    output = run_virtual(runner.run(partial_output=part))
    [reason] = restarts(output)
    assert "tool 'look' is called after tool 'look', whose state cannot be restored" in reason
    assert output.stop_reason is StopReason.ANSWERED
    assert runner.counts.started["look"] == 3


@pytest.mark.parametrize(
    ("on_replay", "num_restarts"), [("recorded", 0), ("rerun", 0), ("once", 1), ("restart", 1)]
)
def test_other_tools_may_be_called_later_if_they_cannot_read_the_lost_state(
    on_replay: str, num_restarts: int
) -> None:
    turns = [LOOK, f"And now. {call_text('book', a=0)}", "It is done."]
    tools = {**NOT_RESTORABLE, "book": (OnReplay(on_replay), LATENCY_S)}
    runner = PartialRunner(turns, tools=tools)
    part = run_virtual(runner.run(cancel_after_s=after_calls(LOOK)))
    output = run_virtual(runner.run(partial_output=part))
    assert len(restarts(output)) == num_restarts
    assert output.stop_reason is StopReason.ANSWERED
    assert runner.counts.started["book"] == 1
    assert runner.counts.started["look"] == 1 + num_restarts


def test_a_tool_reward_is_calculated_at_the_cancellation_and_counts_at_the_end() -> None:
    turns = [LOOK, LOOK, "It is done."]
    runner = PartialRunner(turns, tools=NOT_RESTORABLE, tool_class=Judge)
    part = run_virtual(runner.run(cancel_after_s=after_calls(LOOK, LOOK)))
    assert part.reward_score is None
    again = run_virtual(runner.run(partial_output=part, cancel_after_s=2.5 * TOKEN_S))
    assert again.stop_reason is StopReason.CANCELLED
    assert again.reward_score is None
    output = run_virtual(runner.run(partial_output=again))
    assert output.reward_score == 2.0
    assert not restarts(output)
    assert runner.counts.started == {"look": 2, "verdict": 1}


def test_a_tool_of_verl_keeps_tokens_and_reward() -> None:
    VerlTool.started.clear()
    runner = PartialRunner([LOOK, "It is done."], tools=NOT_RESTORABLE, tool_class=VerlTool)  # type: ignore[arg-type]
    part = run_virtual(runner.run(cancel_after_s=after_calls(LOOK, latency_s=0)))
    output = run_virtual(runner.run(partial_output=part))
    assert not restarts(output)
    assert output.reward_score == 1.0
    assert output.response_ids.tolist()[: len(part.response_ids)] == part.response_ids.tolist()
    assert len(VerlTool.started) == 1


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("first_seed", range(0, 60, 20))
def test_any_cancelled_and_resumed_trajectory_ends_as_one_without_a_cancellation(first_seed: int) -> None:
    num_cut = num_restarts = 0
    tools = {**NOT_RESTORABLE, "book": (OnReplay.RESTART, 0.7), "step": (OnReplay.RERUN, 0.3)}
    for seed in range(first_seed, first_seed + 20):
        rng = random.Random(seed)
        turns = random_turns(rng, many=["look", "book"], one="step")
        runner = PartialRunner(turns, tools=tools, tool_class=Judge)
        whole = run_virtual(PartialRunner(turns, tools=tools, tool_class=Judge).run())
        cuts = [rng.uniform(0, whole.metrics.total) for _ in range(rng.randint(1, 3))]
        output, parts = run_virtual(runner.run_in_parts(cuts))
        num_cut += len(parts)
        num_restarts += bool(restarts(output))
        expected, found = facts(whole), facts(output)
        incidents = [i for i in output.incidents if i.kind is not IncidentKind.RESTARTED]
        found["incidents"] = expected["incidents"] if incidents == list(whole.incidents) else incidents
        assert found == expected, seed
        assert output.reward_score == whole.reward_score, seed
    assert num_cut > num_restarts > 0
