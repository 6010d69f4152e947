"""Demonstrations of Kuhn poker: random legal games, whose deals no held-out row has."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice

import pytest

from agent_loop.config import load_config
from agent_loop.rollout.rows import load_rows
from examples.kuhn_poker.task import demonstrations
from examples.run import RECIPES, conversations_of, tokenizer_texts
from tests.examples.conftest import load_task

pytestmark = pytest.mark.environments

CONFIG = load_config("examples/kuhn_poker/config.yaml")


def test_demonstrations_are_valid_and_choose_each_move_equally_often() -> None:
    moves: Counter[str] = Counter()
    for messages in islice(demonstrations(random.Random(0)), 300):
        assert not any("invalid" in message["content"] for message in messages)
        moves.update(message["content"] for message in messages if message["role"] == "assistant")
    assert set(moves) == {"[check]", "[bet]", "[call]", "[fold]"}
    assert moves["[check]"] == pytest.approx(moves["[bet]"], rel=0.15)
    assert moves["[call]"] == pytest.approx(moves["[fold]"], rel=0.15)


def test_training_is_self_play_and_validation_gives_the_policy_each_seat_against_a_random_player() -> None:
    train, val = (
        load_rows(files, prompt_key=CONFIG.data.prompt_key)
        for files in (CONFIG.data.train_files, CONFIG.data.val_files)
    )
    assert {tuple(row["players"]) for row in train} == {("policy", "policy")}
    seats = Counter(row["players"].index("policy") for row in val)
    assert seats[0] == pytest.approx(seats[1], rel=0.2)
    assert {row["task"]["seed"] for row in train}.isdisjoint(row["task"]["seed"] for row in val)


def test_phrases_of_the_observations_become_tokens() -> None:
    recipe = RECIPES["kuhn_poker"]
    conversations = conversations_of(load_task("kuhn_poker"), recipe, rng=random.Random(0))
    texts = tokenizer_texts(
        load_task("kuhn_poker"), conversations, merges_observations=recipe.merges_observations
    )
    roles = {message["role"] for messages in islice(texts, 50) for message in messages}
    assert roles == {"user", "assistant"}
