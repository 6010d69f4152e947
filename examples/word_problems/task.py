"""Task: word problems of two or three steps on two-digit numbers, with a calculator, for a pretrained model."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from agent_loop.tools.calculator import calculate
from agent_loop.trajectory import AgentLoopOutput
from agent_loop.types import Message, ToolCall
from examples.common.rows import draw_rows, tool_turns

SYSTEM = "Solve the problem. Use the calculator, then say: The answer is NUMBER."
ANSWER = "The answer is {}."
NAMES = ("Ada", "Ben", "Chen", "Dina", "Emil", "Fatima", "Gita", "Hugo", "Ines", "Jonas", "Kofi", "Lena")
THINGS = ("apples", "books", "cards", "candles", "eggs", "pencils", "stamps", "tickets", "tiles", "toys")
BOXES = ("bags", "baskets", "boxes", "crates", "packs", "shelves")
PATTERNS = (
    ("{name} has {a} {boxes} with {b} {things} each and finds {c} more {things}. How many is that?", "a*b+c"),
    ("There are {c} {things} on the floor. {name} brings {a} {boxes} of {b} {things}. How many is that?", "c+a*b"),
    ("{name} fills {a} {boxes} with {b} {things} each and gives {c} {things} away. How many are left?", "a*b-c"),
    ("At {d} o'clock {name} counts {a} {things}. A friend counts {b}. They each count them {c} times. "
     "How many do they count in all?", "(a+b)*c"),
    ("{name} has {a} red and {b} blue {things} in each of {c} {boxes}. {d} people watch. How many {things} are there?",
     "(a+b)*c"),
    ("A shop with {d} {boxes} gets {a} {things} on each of {b} days and sells {c} {things} a day. "
     "How many are left after those days?", "(a-c)*b"),
    ("{name} earns {a} dollars an hour and works {b} hours, then {c} hours more. How many dollars is that?", "a*(b+c)"),
    ("{name} sells {a} {things} for {b} dollars each and {c} {boxes} for {d} dollars each. "
     "How many dollars does {name} get?", "a*b+c*d"),
)  # fmt: skip
"""Questions, and the expressions that answer them. Some name a number that does not matter."""


def train_rows(seed: int = 0, count: int = 4096) -> list[dict[str, Any]]:
    """Return rows with numbers that are not held out."""
    return _rows(seed, count, held_out=False)


def val_rows(seed: int = 1, count: int = 128) -> list[dict[str, Any]]:
    """Return rows with held-out numbers, which no training row has."""
    return _rows(seed, count, held_out=True)


def reward(output: AgentLoopOutput, row: Mapping[str, Any]) -> float:
    """Return 1 if the last turn says the right number, else 0."""
    said = re.fullmatch(r"The answer is (-?\d+)\.", output.answer.strip())
    return float(said is not None and int(said[1]) == row["answer"])


def solution(row: Mapping[str, Any]) -> list[Message]:
    """Return the turns that earn the reward."""
    call = ToolCall("calculator", {"expression": row["expression"]})
    return tool_turns([(call, row["answer"])], answer=ANSWER.format(row["answer"]))


def prepare_model(folder: Path) -> Path:
    """Return the folder of the pretrained model, which is made if it is not there yet."""
    from examples.word_problems.pretrained import make_model  # late: rollouts do not need it

    return make_model(folder / "gemma-3-270m")


def _rows(seed: int, count: int, *, held_out: bool) -> list[dict[str, Any]]:
    """Return rows that have the patterns in turn, so that each batch has all of them."""
    num_turns = -(-count // len(PATTERNS))
    columns = [
        draw_rows(
            partial(_row, pattern=pattern),
            seed=seed * len(PATTERNS) + number,
            count=num_turns,
            held_out=held_out,
        )
        for number, pattern in enumerate(PATTERNS)
    ]
    return [row for turn in zip(*columns, strict=True) for row in turn][:count]


def _row(rng: random.Random, *, pattern: tuple[str, str]) -> dict[str, Any]:
    question, formula = pattern
    numbers = {letter: rng.randrange(11, 100) for letter in "abcd"}
    if formula == "(a-c)*b":
        numbers["a"], numbers["c"] = rng.randrange(60, 100), rng.randrange(11, 60)
    words = {"name": rng.choice(NAMES), "things": rng.choice(THINGS), "boxes": rng.choice(BOXES)}
    expression = re.sub("[a-d]", lambda letter: str(numbers[letter[0]]), formula)
    return {
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": question.format(**numbers, **words)},
        ],
        "agent_name": "tool_agent",
        "expression": re.sub(r"([-+*])", r" \1 ", expression),
        "answer": int(calculate(expression)),
        **numbers,
    }
