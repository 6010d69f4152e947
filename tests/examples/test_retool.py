"""Tests of the ReTool example with a scripted model that writes programs, in the real sandbox."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from agent_loop.rollout.rows import load_rows
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest
from agent_loop.types import StopReason
from examples.retool.task import PROBLEMS
from tests.examples.scripted import context_of, run_scripted
from tests.helpers import text_reply, tool_call_reply
from tests.tools.sandboxes import python_tool

FOLDER = Path("examples/retool")
ROOMY = ["rollout.prompt_length=4000", "rollout.multi_turn.max_tool_response_length=2000"]
PROGRAMS = {
    168: "sum(all(n % d for d in range(2, int(n**0.5) + 1)) for n in range(2, 1000))",
    1366: "sum(int(digit) for digit in str(2**1000))",
    292: "def ways(left, coins):\n    if not coins:\n        return left == 0\n    return "
    "sum(ways(left - used, coins[1:]) for used in range(0, left + 1, coins[0]))\nways(100, (50, 25, 10, 5, 1))",
    232792560: "import math\nmath.lcm(*range(1, 21))",
    198: "sum(str(n) == str(n)[::-1] for n in range(1, 10001))",
    6857: "n, d = 600851475143, 2\nwhile d * d <= n:\n    n, d = (n // d, d) if n % d == 0 else (n, d + 1)\nn",
    92: "from itertools import permutations\nsum(len({q + c for c, q in enumerate(p)}) == len({q - c for c, q in "
    "enumerate(p)}) == 8 for p in permutations(range(8)))",
    556308: "a, b = 0, 1\nfor _ in range(100):\n    a, b = b, a + b\na % 1000007",
}


@pytest.fixture
def sandbox() -> None:
    """Skip the test if no isolation mechanism is available."""
    python_tool(python=sys.executable)


def solver(request: ScriptedRequest) -> ScriptedReply:
    """Return a program with an error, then its fixed last line, then the boxed result."""
    context = context_of(request)
    [program] = [PROGRAMS[answer] for question, answer in PROBLEMS if question in context]
    *setup, last = program.split("\n")
    if request.turn == 0:
        return tool_call_reply("python", code="\n".join([*setup, "undefined_name"]))
    if request.turn == 1:
        assert "NameError" in context
        return tool_call_reply("python", code=last)
    found = re.findall(r"<tool_response>\s*(\d+)\s*</tool_response>", context)
    return text_reply(rf"The answer is \boxed{{{found[-1]}}}.")


@pytest.mark.usefixtures("sandbox")
def test_problems_are_solved_with_code_and_mistakes_are_read() -> None:
    rows = load_rows(["examples/retool/task.py:rows"], prompt_key="prompt")
    trajectories = run_scripted(FOLDER, rows, solver, overrides=ROOMY)
    assert [t.output.failure for t in trajectories] == [None] * len(PROBLEMS)
    assert [t.output.stop_reason for t in trajectories] == [StopReason.ANSWERED] * len(PROBLEMS)
    assert [t.reward for t in trajectories] == [1.0] * len(PROBLEMS)
    assert {t.output.metrics.num_tool_calls for t in trajectories} == {2}


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("answer", ["168", r"\boxed{169}", r"\boxed{168} or \boxed{1}"])
def test_a_wrong_or_unboxed_answer_has_a_reward_of_minus_one(answer: str) -> None:
    [row, *_] = load_rows(["examples/retool/task.py:rows"], prompt_key="prompt")
    [trajectory] = run_scripted(FOLDER, [row], lambda _: text_reply(answer), overrides=ROOMY)
    assert trajectory.reward == -1.0
