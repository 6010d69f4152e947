"""Tests of parsing an action from a model's answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from agent_loop.environments.gymnasium import ActionReader, InvalidAction

READER = ActionReader(words={}, pattern=None)
PAIR = spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (1,))))


FIELDS = spaces.Dict({"a": spaces.Box(-1, 1, (1,)), "b": spaces.Discrete(2)})


@pytest.mark.parametrize(
    ("text", "space", "action"),
    [
        (" 2 ", spaces.Discrete(3), 2),
        ("go", spaces.Text(5), "go"),
        ("[1, 2]", spaces.MultiDiscrete([2, 3]), np.array([1, 2])),
        ("[0.5, -1]", spaces.Box(-1, 1, (2,)), np.array([0.5, -1], np.float32)),
        ("[1, [0.5]]", PAIR, (1, np.array([0.5], np.float32))),
        ('{"a": [0.5], "b": 1}', FIELDS, {"a": np.array([0.5], np.float32), "b": 1}),
        ("[2, 0]", spaces.Sequence(spaces.Discrete(3)), (2, 0)),
    ],
)
def test_an_action_is_converted_to_the_types_of_its_space(text: str, space: Any, action: Any) -> None:
    assert repr(READER.read(text, space)) == repr(action)


@pytest.mark.parametrize(
    ("text", "space"),
    [
        ("5", spaces.Discrete(3)),
        ("left", spaces.Discrete(3)),
        ("[3, 3]", spaces.MultiDiscrete([2, 3])),
        ('["a", "b"]', spaces.Box(-1, 1, (2,))),
        ("[[1], 2]", spaces.Box(-1, 1, (2,))),
        ("[2, [0.5]]", PAIR),
        ('{"a": [0.5], "c": 1}', FIELDS),
    ],
)
def test_a_value_outside_the_space_is_an_invalid_action(text: str, space: Any) -> None:
    with pytest.raises(InvalidAction):
        READER.read(text, space)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "[" * 100_000,
        "1" * 5000,
        "true",
        "null",
        "4",
        "1.5",
        '"1"',
        "[1e999]",
        "[1" + "0" * 40 + "]",
        "{}",
    ],
)
@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(4),
        spaces.MultiDiscrete([3, 4]),
        spaces.MultiBinary(1),
        spaces.Box(0, 9, (1,), np.uint8),
        PAIR,
    ],
)
def test_any_other_text_is_an_invalid_action_and_not_a_crash(text: str, space: Any) -> None:
    with pytest.raises(InvalidAction):
        READER.read(text, space)


def test_a_number_is_rejected_rather_than_rounded() -> None:
    with pytest.raises(InvalidAction, match="is not in MultiDiscrete"):
        READER.read("[1.5, 0]", spaces.MultiDiscrete([3, 4]))
    with pytest.raises(InvalidAction, match="out of bounds"):
        READER.read("[300]", spaces.Box(0, 255, (1,), np.uint8))


def test_the_last_match_of_the_pattern_is_the_action() -> None:
    reader = ActionReader(words={"left": 0, "right": 2}, pattern=r"<go>(.*?)</go>")
    assert reader.read("<go>left</go> or rather <go> Right </go>", spaces.Discrete(4)) == 2
    with pytest.raises(InvalidAction, match="'up' is not one of the actions left, right"):
        reader.read("<go>up</go>", spaces.Discrete(4))
    with pytest.raises(InvalidAction, match="nothing in the answer matches"):
        reader.read("left", spaces.Discrete(4))
