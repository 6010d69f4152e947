"""Rankings: judges that compare the trajectories of a group."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_loop.config import AgentConfig, RolloutConfig
from agent_loop.errors import RewardUnavailable
from agent_loop.rewards.function import ScoreResult, load_batch_reward
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.trajectory import FailureKind, Trajectory
from tests.helpers import hermes_template, text_reply, user
from tests.rewards.judges import (
    Reply,
    ScriptedJudge,
    flaky,
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


@pytest.mark.parametrize("seed", [0])
def test_every_group_ends_scored_or_unscored_by_name_with_a_judge_that_fails_a_third_of_its_requests(
    tmp_path: Path, seed: int
) -> None:
    async def main() -> list[Trajectory]:
        async with judging(flaky(by_number, share=1 / 3, seed=seed)) as judge:
            path = write_file(tmp_path, {**settings_of(judge), "ranking": RANKING})
            manager = AgentLoopManager(
                RolloutConfig(n=3, max_failed_share=1.0, retries=0, agent=AgentConfig(num_workers=2)),
                servers=[ScriptedServer(lambda request: text_reply(str(len(request.prompt_ids) % 7)))],
                template=hermes_template(),
                reward=load_batch_reward(path, timeout_s=60),
            )
            rows = [{"raw_prompt": user(f"question {'x' * n}"), "solution": n} for n in range(20)]
            return await manager.run(rows)

    groups: dict[int, list[Trajectory]] = {}
    for trajectory in asyncio.run(main()):
        groups.setdefault(trajectory.group, []).append(trajectory)

    assert len(groups) == 20
    num_scored = 0
    for group in groups.values():
        assert len(group) == 3
        failures = [each.output.failure for each in group if each.output.failure is not None]
        num_scored += not failures
        if failures:
            assert [failure.kind for failure in failures] == [FailureKind.REWARD] * 3
            assert failures[0].error.startswith("RewardUnavailable: ranking: judge 'm' at ")
            assert [each.reward for each in group] == [None] * 3
        else:
            assert [each.reward for each in group] == [int(each.output.answer) / 100 for each in group]
    assert 0 < num_scored < 20
