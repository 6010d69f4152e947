"""Tests of the game. The tests of all examples include its rows and rewards."""

from __future__ import annotations

import asyncio

from agent_loop.checks import check_interaction
from examples.guess_the_number.task import GuessTheNumber, solution, val_rows


def test_four_guesses_at_the_middle_are_enough() -> None:
    lengths = {(len(solution(row)) + 1) // 2 for row in val_rows(count=500)}
    assert lengths == {2, 3, 4}


def test_the_game_passes_check_interaction() -> None:
    row = {"low": 20, "high": 34, "secret": 30}
    answers = ["Is it 27?", "Is it 31?", "Is it 19?"]
    report = asyncio.run(check_interaction(GuessTheNumber({}), interaction_kwargs=row, answers=answers))
    report.raise_if_failed()
