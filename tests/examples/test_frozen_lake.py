"""Tests of the demonstrations of the frozen lake, whose environment is Gymnasium's."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from agent_loop.config import load_config
from agent_loop.rollout.rows import load_rows
from agent_loop.types import Message
from examples.frozen_lake.task import demonstrations
from tests.examples.conftest import load_task

NUM_WALKS = 500
CONFIG = load_config("examples/frozen_lake/config.yaml")


@pytest.fixture(scope="module")
def walks() -> list[list[Message]]:
    return list(islice(demonstrations(random.Random(0)), NUM_WALKS))


def test_demonstrations_take_each_action_equally_often_whatever_the_map(walks: list[list[Message]]) -> None:
    moves = [message["content"] for walk in walks for message in walk if message["role"] == "assistant"]
    shares = {action: moves.count(action) / len(moves) for action in ("left", "down", "right", "up")}
    assert all(0.2 < share < 0.3 for share in shares.values()), shares


def test_no_demonstration_walks_on_a_held_out_map(walks: list[list[Message]]) -> None:
    held_out = {row["raw_prompt"][-1]["content"] for row in rows(CONFIG.data.val_files)}
    assert held_out.isdisjoint(walk[1]["content"] for walk in walks)


def test_training_maps_and_held_out_maps_are_disjoint() -> None:
    train, val = (
        {row["raw_prompt"][-1]["content"] for row in rows(files)}
        for files in (CONFIG.data.train_files, CONFIG.data.val_files)
    )
    assert train.isdisjoint(val)
    assert len(val) > 60


def rows(sources: list[str]) -> list[dict[str, object]]:
    return [dict(row) for row in load_rows(sources, prompt_key=CONFIG.data.prompt_key)]


def test_the_standard_map_is_an_example_of_its_own_with_the_same_warm_start() -> None:
    files = load_config("examples/frozen_lake_4x4/config.yaml").data.train_files
    maps = {row["raw_prompt"][-1]["content"] for row in rows(files)}
    assert len(maps) == 1
    assert load_task("frozen_lake_4x4").demonstrations is demonstrations
