"""Tests of the task: python -m unittest"""

import unittest

import task
from agent_loop import AgentLoopOutput
from agent_loop.trajectory import AgentLoopMetrics
from conversations import new_row, solution


def output_of(row, turns):
    """Return the output of a conversation, as a rollout gives it to the reward. Its tokens are placeholders."""
    num_tool_calls = sum(len(turn.get("tool_calls", [])) for turn in turns)
    return AgentLoopOutput(
        prompt_ids=[0],
        response_ids=[0],
        response_mask=[1],
        messages=[*row["prompt"], *turns],
        metrics=AgentLoopMetrics(num_tool_calls=num_tool_calls),
    )


class TaskTest(unittest.TestCase):
    def test_the_right_shelf_is_rewarded(self):
        row = new_row(1234)
        self.assertEqual(task.reward(output_of(row, solution(row)), row), 1.0)

    def test_giving_up_is_not_rewarded(self):
        row = new_row(1234)
        turns = [{"role": "assistant", "content": "I do not know."}]
        self.assertEqual(task.reward(output_of(row, turns), row), 0.0)

    def test_the_solution_ends_with_the_answer(self):
        row = new_row(1234)
        self.assertEqual(solution(row)[-1]["content"], row["answer"])


if __name__ == "__main__":
    unittest.main()
