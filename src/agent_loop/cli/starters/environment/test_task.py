"""Tests of the environment: python -m unittest"""

import unittest

import task
from conversations import new_row, solution


class TaskTest(unittest.TestCase):
    def play(self, row, turns):
        warehouse, messages = task.Warehouse(), list(row["prompt"])
        warehouse.reset(row)
        for turn in turns:
            messages.append(turn)
            if warehouse.reply(messages).is_over:
                break
        return warehouse.reward(messages)

    def test_the_solution_is_rewarded(self):
        row = new_row(1234)
        turns = [turn for turn in solution(row) if turn["role"] == "assistant"]
        self.assertEqual(self.play(row, turns), 1.0)

    def test_giving_up_is_not_rewarded(self):
        row = new_row(1234)
        self.assertEqual(self.play(row, [{"role": "assistant", "content": "I do not know."}]), 0.0)


if __name__ == "__main__":
    unittest.main()
