"""What a model may say where an environment wants an action."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from agent_loop.interactions.actions import ActionReader, NoAction

READER = ActionReader(words={}, pattern=None)
PAIR = spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (1,))))


PLACE = spaces.Dict({"a": spaces.Box(-1, 1, (1,)), "b": spaces.Discrete(2)})


@pytest.mark.parametrize(
    ("said", "space", "action"),
    [
        (" 2 ", spaces.Discrete(3), 2),
        ("go", spaces.Text(5), "go"),
        ("[1, 2]", spaces.MultiDiscrete([2, 3]), np.array([1, 2])),
        ("[0.5, -1]", spaces.Box(-1, 1, (2,)), np.array([0.5, -1], np.float32)),
        ("[1, [0.5]]", PAIR, (1, np.array([0.5], np.float32))),
        ('{"a": [0.5], "b": 1}', PLACE, {"a": np.array([0.5], np.float32), "b": 1}),
        ("[2, 0]", spaces.Sequence(spaces.Discrete(3)), (2, 0)),
    ],
)
def test_an_action_is_read_as_its_space_has_it(said: str, space: Any, action: Any) -> None:
    read = READER.read(said, space)
    assert repr(read) == repr(action)


@pytest.mark.parametrize(
    ("said", "space"),
    [
        ("5", spaces.Discrete(3)),
        ("left", spaces.Discrete(3)),
        ("[3, 3]", spaces.MultiDiscrete([2, 3])),
        ('["a", "b"]', spaces.Box(-1, 1, (2,))),
        ("[[1], 2]", spaces.Box(-1, 1, (2,))),
        ("[2, [0.5]]", PAIR),
        ('{"a": [0.5], "c": 1}', PLACE),
    ],
)
def test_what_the_space_does_not_hold_is_no_action(said: str, space: Any) -> None:
    with pytest.raises(NoAction):
        READER.read(said, space)


@pytest.mark.parametrize(
    "said",
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
def test_whatever_else_a_model_says_is_no_action_and_no_fault(said: str, space: Any) -> None:
    with pytest.raises(NoAction):
        READER.read(said, space)


def test_a_number_that_is_not_whole_is_not_rounded() -> None:
    with pytest.raises(NoAction, match="is not in MultiDiscrete"):
        READER.read("[1.5, 0]", spaces.MultiDiscrete([3, 4]))
    with pytest.raises(NoAction, match="out of bounds"):
        READER.read("[300]", spaces.Box(0, 255, (1,), np.uint8))


def test_the_last_match_of_the_pattern_counts() -> None:
    reader = ActionReader(words={"left": 0, "right": 2}, pattern=r"<go>(.*?)</go>")
    assert reader.read("<go>left</go> or rather <go> Right </go>", spaces.Discrete(4)) == 2
    with pytest.raises(NoAction, match="'up' is none of the actions left, right"):
        reader.read("<go>up</go>", spaces.Discrete(4))
    with pytest.raises(NoAction, match="nothing in the answer has the form"):
        reader.read("left", spaces.Discrete(4))
