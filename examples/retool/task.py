"""Task: problems that are tedious by hand and short as code, after ReTool (https://arxiv.org/abs/2504.11536)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agent_loop.trajectory import AgentLoopOutput

SYSTEM = (
    "Solve the problem. You may run Python with the tool; what you define is kept between calls. "
    r"End with the answer as \boxed{...}."
)
PROBLEMS = (
    ("How many primes are there below 1000?", 168),
    ("What is the sum of the digits of 2 to the power of 1000?", 1366),
    ("How many ways are there to make 100 from coins of 1, 5, 10, 25 and 50?", 292),
    ("What is the smallest positive number that 1 to 20 all divide?", 232792560),
    ("How many of the numbers from 1 to 10000 are the same read backwards?", 198),
    ("What is the largest prime factor of 600851475143?", 6857),
    ("In how many ways can 8 queens stand on a chessboard without attacking each other?", 92),
    ("What is the 100th Fibonacci number modulo 1000007, if the first two are 1?", 556308),
)
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


def rows() -> list[dict[str, Any]]:
    """Return one row for each problem."""
    return [
        {
            "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
            "agent_name": "tool_agent",
            "answer": answer,
        }
        for question, answer in PROBLEMS
    ]


def reward(output: AgentLoopOutput, row: Mapping[str, Any]) -> float:
    """Return 1 if the last box contains the right number, else -1, as in ReTool."""
    boxed = _BOXED.findall(output.answer)
    return 1.0 if boxed and boxed[-1].replace(",", "").strip() == str(row["answer"]) else -1.0
