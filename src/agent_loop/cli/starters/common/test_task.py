"""Tests of the task: python -m unittest"""

import unittest
from types import SimpleNamespace

import task
from conversations import new_row, solution


class TaskTest(unittest.TestCase):
    def test_the_right_shelf_is_rewarded(self):
        row = new_row(1234)
        self.assertEqual(task.reward(SimpleNamespace(answer=row["answer"]), row), 1.0)
        self.assertEqual(task.reward(SimpleNamespace(answer="I do not know."), row), 0.0)

    def test_the_solution_ends_with_the_answer(self):
        row = new_row(1234)
        self.assertEqual(solution(row)[-1]["content"], row["answer"])


if __name__ == "__main__":
    unittest.main()
