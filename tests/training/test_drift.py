from __future__ import annotations

import pytest

from agent_loop.chat.report import Cause
from agent_loop.servers.scripted import ScriptedReply
from agent_loop.training.step_metrics import drift_metrics, find_drift
from tests.helpers import encoded, hermes_template, text_reply, tool_call_reply
from tests.rollout.harness import Adder, WorkerHarness

LETTERS = [token_id for letter in "the fox" for token_id in encoded(letter)]
MERGED = ScriptedReply([*LETTERS, *encoded("<|im_end|>")])
DENSE = text_reply('<tool_call>{"name":"add","arguments":{"a":1,"b":2}}</tool_call>')


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ([text_reply("hello")], None),
        ([tool_call_reply("add", a=1, b=2), text_reply("It is 3.")], None),
        ([DENSE, text_reply("It is 3.")], Cause.REWRITTEN_TURN),
        (
            [
                text_reply('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'),
                text_reply("3"),
            ],
            None,
        ),
        ([MERGED], Cause.MERGED_TOKENS),
        ([text_reply("<think>hm</think>hello")], Cause.STRIPPED_REASONING),
        ([text_reply("an answer that is", ends=False)], None),
    ],
)
def test_a_trajectory_is_compared_with_a_full_render(
    script: list[ScriptedReply], cause: Cause | None
) -> None:
    trajectory = WorkerHarness(script, tools=[Adder()], max_turn_tokens=500).run_one()
    assert find_drift(trajectory.output, template=hermes_template()) == cause


def test_drift_is_reported_as_shares_by_cause() -> None:
    replies = iter([text_reply("hello"), MERGED, text_reply("hello"), text_reply("bye")])
    trajectories = WorkerHarness(lambda _: next(replies)).run(
        [{"raw_prompt": [{"role": "user", "content": "?"}]}] * 4
    )
    assert drift_metrics(trajectories, template=hermes_template()) == {
        "rollout/template_exact_share": 0.75,
        "rollout/template_drift/merged_tokens": 0.25,
    }
