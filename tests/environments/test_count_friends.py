"""Demonstrations of the riddles about friends: random digits, for riddles that no held-out row has."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice
from typing import Any

import pytest

from agent_loop.config import load_config
from agent_loop.rollout.rows import load_rows
from examples.count_friends.task import demonstrations
from examples.run import right_answer
from tests.examples.conftest import load_task

pytestmark = pytest.mark.environments

NUM_RIDDLES = 1500
CONFIG = load_config("examples/count_friends/config.yaml")


def test_demonstrations_answer_with_each_digit_equally_often() -> None:
    answers = Counter(
        messages[-1]["content"] for messages in islice(demonstrations(random.Random(0)), NUM_RIDDLES)
    )
    assert set(answers) == {f"<answer>{digit}</answer>" for digit in range(1, 10)}
    assert all(0.07 < count / NUM_RIDDLES < 0.15 for count in answers.values()), answers


def test_no_demonstration_has_a_held_out_riddle() -> None:
    held_out = {question(row) for row in rows(CONFIG.data.val_files)}
    riddles = islice(demonstrations(random.Random(0)), NUM_RIDDLES)
    assert held_out.isdisjoint(str(messages[1]["content"]) for messages in riddles)


def test_training_riddles_and_held_out_riddles_are_disjoint() -> None:
    train, val = (
        {question(row) for row in rows(files)} for files in (CONFIG.data.train_files, CONFIG.data.val_files)
    )
    assert train.isdisjoint(val)
    assert len(val) > 190


def test_the_answer_is_one_more_than_the_number_of_female_friends() -> None:
    task = load_task("count_friends")
    for row in rows(CONFIG.data.val_files):
        number = question(row).split(" female friends")[0].split()[-1]
        assert right_answer(task, row) == f"<answer>{int(number) + 1}</answer>"


def rows(sources: list[str]) -> list[dict[str, Any]]:
    return [dict(row) for row in load_rows(sources, prompt_key=CONFIG.data.prompt_key)]


def question(row: dict[str, Any]) -> str:
    return str(row["raw_prompt"][-1]["content"])
