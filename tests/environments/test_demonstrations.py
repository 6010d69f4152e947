"""Demonstrations of the examples on reasoning-gym and TextArena: varied, and of nothing that is held out."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice
from typing import Any

import pytest

from agent_loop.config import load_config
from agent_loop.rollout.rows import load_rows
from examples.count_friends import task as count_friends
from examples.kuhn_poker import task as kuhn_poker
from examples.run import RECIPES, conversations_of, right_answer, tokenizer_texts
from tests.examples.conftest import load_task

pytestmark = pytest.mark.environments

NUM_RIDDLES = 1500


def rows_of(example: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of an example to train on, and its held-out rows."""
    data = load_config(f"examples/{example}/config.yaml").data
    train, val = (
        load_rows(files, prompt_key=data.prompt_key) for files in (data.train_files, data.val_files)
    )
    return [dict(row) for row in train], [dict(row) for row in val]


def question(row: dict[str, Any]) -> str:
    return str(row["raw_prompt"][-1]["content"])


def test_riddles_are_answered_with_each_digit_equally_often_and_none_is_held_out() -> None:
    riddles = list(islice(count_friends.demonstrations(random.Random(0)), NUM_RIDDLES))
    answers = Counter(messages[-1]["content"] for messages in riddles)
    assert set(answers) == {f"<answer>{digit}</answer>" for digit in range(1, 10)}
    assert all(0.07 < count / NUM_RIDDLES < 0.15 for count in answers.values()), answers
    train, val = ({question(row) for row in rows} for rows in rows_of("count_friends"))
    assert train.isdisjoint(val)
    assert len(val) > 190
    assert val.isdisjoint(str(messages[1]["content"]) for messages in riddles)


def test_the_answer_is_one_more_than_the_number_of_female_friends() -> None:
    task = load_task("count_friends")
    for row in rows_of("count_friends")[1]:
        number = question(row).split(" female friends")[0].split()[-1]
        assert right_answer(task, row) == f"<answer>{int(number) + 1}</answer>"


def test_games_of_poker_are_valid_and_choose_each_move_equally_often() -> None:
    moves: Counter[str] = Counter()
    for messages in islice(kuhn_poker.demonstrations(random.Random(0)), 300):
        assert not any("invalid" in message["content"] for message in messages)
        moves.update(message["content"] for message in messages if message["role"] == "assistant")
    assert set(moves) == {"[check]", "[bet]", "[call]", "[fold]"}
    assert moves["[check]"] == pytest.approx(moves["[bet]"], rel=0.15)
    assert moves["[call]"] == pytest.approx(moves["[fold]"], rel=0.15)


def test_training_is_self_play_and_validation_gives_the_policy_each_seat_against_a_random_player() -> None:
    train, val = rows_of("kuhn_poker")
    assert {tuple(row["players"]) for row in train} == {("policy", "policy")}
    seats = Counter(row["players"].index("policy") for row in val)
    assert seats[0] == pytest.approx(seats[1], rel=0.2)
    assert {row["task"]["seed"] for row in train}.isdisjoint(row["task"]["seed"] for row in val)


def test_phrases_of_the_observations_become_tokens() -> None:
    task, recipe = load_task("kuhn_poker"), RECIPES["kuhn_poker"]
    conversations = conversations_of(task, recipe, rng=random.Random(0))
    texts = tokenizer_texts(task, conversations, merges_observations=recipe.merges_observations)
    assert {message["role"] for messages in islice(texts, 50) for message in messages} == {
        "user",
        "assistant",
    }
