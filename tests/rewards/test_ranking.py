"""Rankings: judges that compare the trajectories of a group."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_loop.errors import RewardUnavailable
from agent_loop.rewards.function import ScoreResult, load_batch_reward
from tests.rewards.judges import (
    Reply,
    ScriptedJudge,
    judging,
    output_saying,
    prompt_of,
    settings_of,
    write_file,
)

RANKING = "The sum is {solution}, and brief answers are better."


def work_in(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a judge sees."""
    [line] = [line for line in prompt_of(messages).splitlines() if line.startswith("{")]
    return json.loads(line)


def by_number(messages: list[dict[str, Any]]) -> Reply:
    """Give each attempt the number in its answer."""
    attempts = work_in(messages)["attempts"]
    numbers = {name: re.findall(r"\d+", each[-1]["content"]) for name, each in attempts.items()}
    return json.dumps({"answer": {name: int(found[-1]) for name, found in numbers.items()}})


def ranked(
    folder: Path, *texts: str, script: Callable[[list[dict[str, Any]]], Reply] = by_number, **settings: Any
) -> tuple[list[ScoreResult], ScriptedJudge]:
    async def main() -> tuple[list[ScoreResult], ScriptedJudge]:
        async with judging(script) as judge:
            path = write_file(folder, {**settings_of(judge), "ranking": RANKING, **settings})
            reward = load_batch_reward(path, timeout_s=60)
            outputs = [output_saying(text) for text in texts]
            return await reward(outputs, [{"solution": 4}] * len(texts)), judge

    return asyncio.run(main())


def values_of(results: list[ScoreResult]) -> list[tuple[float, Any]]:
    return [
        (result.score.reward, result.score.extra["rank"]) for result in results if result.score is not None
    ]


def test_one_request_scores_all_trajectories_of_a_group(tmp_path: Path) -> None:
    results, judge = ranked(tmp_path, "20", "100", "20", "0")

    assert values_of(results) == [(0.2, 2), (1.0, 1), (0.2, 2), (0.0, 4)]
    [request] = judge.requests
    assert "What counts: The sum is 4, and brief answers are better." in prompt_of(request["messages"])


def test_the_task_is_sent_once(tmp_path: Path) -> None:
    _, judge = ranked(tmp_path, "20", "30")

    prompt = prompt_of(judge.requests[0]["messages"])
    assert prompt.count("What is 2 + 2?") == 1
    assert work_in(judge.requests[0]["messages"]) == {
        "task": [{"role": "user", "content": "What is 2 + 2?"}],
        "attempts": {
            "1": [{"role": "assistant", "content": "20"}],
            "2": [{"role": "assistant", "content": "30"}],
        },
    }


@pytest.mark.parametrize(
    "scores",
    [
        {"1": 5},
        {"1": 5, "2": 5, "3": 5},
        {"1": 5, "2": 101},
        {"1": 5, "2": "5"},
        {"1": 5, "2": None},
        [5, 5],
        {},
    ],
    ids=repr,
)
def test_scores_that_do_not_fit_the_group_are_unreadable(tmp_path: Path, scores: Any) -> None:
    with pytest.raises(RewardUnavailable, match=r"ranking: judge 'm' .* was asked twice"):
        ranked(tmp_path, "1", "2", script=lambda _: json.dumps({"answer": scores}))
