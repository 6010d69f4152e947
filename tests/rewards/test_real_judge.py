"""A judge in a process of its own: `agent-loop serve` with a small random model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent_loop.errors import RewardUnavailable
from agent_loop.rewards.function import Score, ScoreResult, load_batch_reward, load_reward
from tests.cli.project import make_project
from tests.cli.test_serve import running
from tests.rewards.judges import output_saying, write_file

pytestmark = pytest.mark.slow

CRITERIA = {"right": {"question": "Right?"}, "clear": {"question": "Clear?", "answer": [1, 3], "weight": 2}}


def judges_at(url: str, **settings: Any) -> dict[str, Any]:
    return {"judges": [{"model": "model", "base_url": url, "max_tokens": 64, **settings}]}


def test_a_served_model_answers_with_a_schema_and_is_unreadable_without_one(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    make_project(tmp_path)
    with running(tmp_path, "model", "--max-model-len", "4096") as served:
        rubric = {**judges_at(served.url), "criteria": CRITERIA}
        free = {**judges_at(served.url, json_schema=False), "criteria": CRITERIA}
        ranking = {**judges_at(served.url), "ranking": "The better sum."}

        async def main() -> tuple[Score, list[ScoreResult]]:
            outputs = [output_saying(text) for text in ("4", "5")]
            score = await load_reward(write_file(tmp_path, rubric), timeout_s=60)(outputs[0], {})
            with pytest.raises(
                RewardUnavailable, match=r"was asked twice: its reply .* is not what was asked for"
            ):
                await load_reward(write_file(tmp_path, free), timeout_s=60)(outputs[0], {})
            group = load_batch_reward(write_file(tmp_path, ranking), timeout_s=60)
            return score, await group(outputs, [{}, {}])

        score, results = asyncio.run(main())

    assert score.extra["right"] in (0.0, 1.0)
    assert score.extra["clear"] in (0.0, 0.5, 1.0)
    assert score.reward == pytest.approx((score.extra["right"] + 2 * score.extra["clear"]) / 3)
    rewards = [result.score.reward for result in results if result.score is not None]
    assert len(rewards) == 2
    assert all(0 <= reward <= 1 for reward in rewards)
