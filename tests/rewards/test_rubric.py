"""Rubrics: criteria that judges answer about one trajectory."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_loop.config import AgentConfig, RolloutConfig
from agent_loop.errors import ConfigError, RewardError, RewardUnavailable
from agent_loop.rewards.function import RewardFunction, Score, load_batch_reward, load_reward
from agent_loop.rollout.failures import failure_of
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.testing.conformance import count_resources, find_leak
from agent_loop.trajectory import FailureKind, Trajectory
from tests.helpers import hermes_template, text_reply, user
from tests.rewards.judges import (
    Reply,
    ScriptedJudge,
    answer,
    flaky,
    judging,
    output_saying,
    prompt_of,
    settings_of,
    write_file,
)

CRITERIA = {
    "correct": {"question": "Does the answer agree with {solution}?", "weight": 3},
    "clear": {"question": "How clear is the answer?", "answer": [1, 5]},
}
ROW = {"solution": "4"}


def by_criterion(**answers: Any) -> Callable[[list[dict[str, Any]]], Reply]:
    """Return a script that answers each criterion, which a word of its question identifies."""

    def script(messages: list[dict[str, Any]]) -> Reply:
        return next(answer(value) for word, value in answers.items() if word in prompt_of(messages))

    return script


def scored(
    folder: Path, *scripts: Callable[[list[dict[str, Any]]], Reply], say: str = "4", **settings: Any
) -> tuple[Score, list[ScriptedJudge]]:
    """Score one output with a judge for each script."""

    async def main() -> tuple[Score, list[ScriptedJudge]]:
        async with judging(scripts[0]) as first, judging(scripts[-1]) as last:
            judges = [first, last][: len(scripts)]
            judge_settings = settings.pop("judge", {})
            values = {**settings_of(*judges, **judge_settings), "criteria": CRITERIA, **settings}
            reward = load_reward(write_file(folder, values), timeout_s=60)
            return await reward(output_saying(say), ROW), judges

    return asyncio.run(main())


def test_the_reward_is_the_weighted_mean_and_each_criterion_is_a_part(tmp_path: Path) -> None:
    score, [judge] = scored(tmp_path, by_criterion(agree="yes", clear=2))

    assert score == Score((3 * 1.0 + 1 * 0.25) / 4, {"correct": 1.0, "clear": 0.25})
    assert len(judge.requests) == 2
    assert judge.requests[0]["model"] == "m"


def test_the_judge_gets_the_question_with_fields_of_the_row_the_messages_and_the_form_of_the_reply(
    tmp_path: Path,
) -> None:
    _, [judge] = scored(tmp_path, by_criterion(agree="no", clear=5), say="\ud800 }}")

    asked = {prompt_of(request["messages"]).splitlines()[0]: request for request in judge.requests}
    request = asked["Criterion: Does the answer agree with 4?"]
    messages = json.loads(prompt_of(request["messages"]).split("Work:\n")[1].split("\n\n")[0])
    assert [message["content"] for message in messages] == ["What is 2 + 2?", "\ufffd }}"]
    schema = request["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["answer"]["enum"] == ["yes", "no"]
    assert (schema["required"], schema["additionalProperties"]) == (["answer"], False)
    clear = asked["Criterion: How clear is the answer?"]["response_format"]["json_schema"]["schema"]
    form = clear["properties"]["answer"]
    assert (form["type"], form["minimum"], form["maximum"]) == ("integer", 1, 5)


def test_the_judge_sees_only_the_task_and_the_last_answer_if_the_file_says_so(tmp_path: Path) -> None:
    async def main() -> str:
        async with judging(by_criterion(agree="yes")) as judge:
            values = {
                **settings_of(judge),
                "criteria": {"correct": CRITERIA["correct"]},
                "shows": "answer",
            }
            reward = load_reward(write_file(tmp_path, values), timeout_s=60)
            output = output_saying("first try")
            messages = [
                *output.messages,
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": "4"},
            ]
            await reward(output._with(messages=tuple(messages)), ROW)  # pyright: ignore[reportPrivateUsage]
            return prompt_of(judge.requests[0]["messages"])

    prompt = asyncio.run(main())
    assert '"content": "4"' in prompt
    assert "What is 2 + 2?" in prompt
    assert "first try" not in prompt


@pytest.mark.parametrize(("vote", "value"), [("mean", 2 / 3), ("median", 1.0)])
def test_the_median_of_three_judges_is_the_majority(tmp_path: Path, vote: str, value: float) -> None:
    async def main() -> Score:
        yes, no = by_criterion(agree="yes"), by_criterion(agree="no")
        async with judging(yes) as first, judging(yes) as second, judging(no) as third:
            values = {**settings_of(first, second, third), "criteria": {"correct": CRITERIA["correct"]}}
            reward = load_reward(write_file(tmp_path, {**values, "vote": vote}), timeout_s=60)
            return await reward(output_saying("4"), ROW)

    assert asyncio.run(main()).reward == pytest.approx(value)


def test_reasons_are_asked_for_first_and_recorded(tmp_path: Path) -> None:
    def script(messages: list[dict[str, Any]]) -> Reply:
        value: Any = 3 if "clear" in prompt_of(messages) else "yes"
        return json.dumps({"reason": f"because {value}", "answer": value})

    score, [judge] = scored(tmp_path, script, explain=True)

    assert score.extra["clear.reason"] == "because 3"
    assert score.extra["correct.reason"] == "because yes"
    schema = judge.requests[0]["response_format"]["json_schema"]["schema"]
    assert list(schema["properties"]) == ["reason", "answer"]


def test_settings_of_a_judge_reach_its_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    judge_settings = {
        "api_key_env": "JUDGE_KEY",
        "json_schema": False,
        "temperature": 0,
        "max_tokens": None,
        "extra_body": {"top_k": 1},
    }
    _, [judge] = scored(tmp_path, by_criterion(agree="yes", clear=5), judge=judge_settings)

    assert judge.keys == ["Bearer secret", "Bearer secret"]
    assert {"model", "messages", "temperature", "top_k"} == judge.requests[0].keys()


# -- failures --------------------------------------------------------------------------------------------------------


UNREADABLE = [
    "yes",
    "",
    '{"answer": "maybe"}',
    '{"answer": true}',
    '{"answer": 3}',
    '{"answer": "yes", "confidence": 1}',
    '```json\n{"answer": "yes"}\n```',
    '{"answer": ["yes"]}',
    "[" * 100_000,
]


@pytest.mark.parametrize("reply", UNREADABLE, ids=range(len(UNREADABLE)))
def test_an_unreadable_reply_is_asked_once_more_and_then_leaves_the_criterion_unanswered(
    tmp_path: Path, reply: str
) -> None:
    asked: list[str] = []

    def script(messages: list[dict[str, Any]]) -> Reply:
        asked.append(prompt_of(messages))
        return reply

    with pytest.raises(
        RewardUnavailable, match=r"criterion 'correct': judge 'm' at .* was asked twice: its reply"
    ):
        scored(tmp_path, script, criteria={"correct": CRITERIA["correct"]})
    assert len(asked) == 2
    assert "An earlier reply" in asked[1]


@pytest.mark.parametrize("value", [0, 6, 3.5, True, "3"])
def test_a_score_outside_of_the_scale_is_unreadable(tmp_path: Path, value: Any) -> None:
    with pytest.raises(RewardUnavailable, match="is not what was asked for: answer"):
        scored(tmp_path, lambda _: answer(value), criteria={"clear": CRITERIA["clear"]})


@pytest.mark.parametrize("status", [400, 429, 503])
def test_an_error_status_is_a_failure_of_infrastructure(tmp_path: Path, status: int) -> None:
    with pytest.raises(RewardUnavailable, match=f"returned no completion: .*{status}") as caught:
        scored(tmp_path, lambda _: status)
    assert failure_of(caught.value).kind is FailureKind.REWARD
    assert ("json_schema: false" in str(caught.value)) == (status == 400)


def test_a_judge_that_hangs_or_is_gone_is_a_failure_of_infrastructure(tmp_path: Path) -> None:
    with pytest.raises(RewardUnavailable, match="APITimeoutError"):
        scored(tmp_path, lambda _: None, judge={"timeout_s": 0.2})

    values = {"judges": [{"model": "m", "base_url": "http://127.0.0.1:9/v1", "max_retries": 0}]}
    reward = load_reward(write_file(tmp_path, {**values, "criteria": CRITERIA}), timeout_s=60)
    with pytest.raises(RewardUnavailable, match="APIConnectionError"):
        asyncio.run(reward(output_saying("4"), ROW))


def test_a_row_without_the_field_of_a_question_is_a_fault_of_the_row(tmp_path: Path) -> None:
    reward = load_reward(
        write_file(tmp_path, {"judges": [{"model": "m"}], "criteria": CRITERIA}), timeout_s=60
    )
    with pytest.raises(
        RewardError, match=r"criterion 'correct' cannot be filled with the columns \['x'\]"
    ) as caught:
        asyncio.run(reward(output_saying("4"), {"x": 1}))
    assert failure_of(caught.value).kind is FailureKind.CODE


# -- cache, concurrency and connections ------------------------------------------------------------------------------


def test_an_answer_is_asked_for_once_for_equal_content(tmp_path: Path) -> None:
    async def main() -> int:
        async with judging(by_criterion(agree="yes", clear=5)) as judge:
            values = {**settings_of(judge), "criteria": CRITERIA}
            reward = load_reward(write_file(tmp_path, values), timeout_s=60)
            async with asyncio.TaskGroup() as group:
                for text in ("4", "4", "5"):
                    group.create_task(reward(output_saying(text), ROW))
            await reward(output_saying("4"), ROW)
            return len(judge.requests)

    assert asyncio.run(main()) == 4


def test_answers_in_a_file_are_not_asked_for_again_by_a_later_run(tmp_path: Path) -> None:
    cache = tmp_path / "run" / "judges.sqlite"

    async def main() -> list[int]:
        async with judging(by_criterion(agree="yes", clear=5)) as judge:
            values = {**settings_of(judge), "criteria": CRITERIA, "cache": str(cache)}
            path = write_file(tmp_path, values)
            await load_reward(path, timeout_s=60)(output_saying("4"), ROW)
            await load_reward(path, timeout_s=60)(output_saying("5"), ROW)
            numbers = [len(judge.requests)]
            reward = load_reward(path, timeout_s=60)
            scores = [await reward(output_saying(text), ROW) for text in ("4", "5")]
            assert [score.reward for score in scores] == [1.0, 1.0]
            return [*numbers, len(judge.requests)]

    assert asyncio.run(main()) == [4, 4]


def test_requests_are_bounded_and_all_share_connections_that_are_closed_at_the_end(tmp_path: Path) -> None:
    async def main() -> tuple[int, int]:
        async with judging(by_criterion(agree="yes", clear=5)) as judge:
            values = {**settings_of(judge, max_concurrent=3), "criteria": CRITERIA}
            reward = load_reward(write_file(tmp_path, values), timeout_s=0.001)
            since = open_files()
            async with asyncio.TaskGroup() as group:
                for number in range(20):
                    group.create_task(reward(output_saying(str(number)), ROW))
            assert await find_leak(1, since=since) is None
            assert len(judge.connections) <= 3
            return judge.max_running, len(judge.requests)

    assert asyncio.run(main()) == (3, 40)


def open_files() -> dict[str, int]:
    """Count open files. Threads that look up host names stay for later look-ups, so they are not counted."""
    return {**count_resources(), "thread": sys.maxsize, "task": sys.maxsize}


def test_a_cancelled_reward_leaves_no_connection(tmp_path: Path) -> None:
    async def main() -> None:
        async with judging(lambda _: None) as judge:
            values = {**settings_of(judge), "criteria": CRITERIA}
            reward = load_reward(write_file(tmp_path, values), timeout_s=60)
            since = open_files()
            task = asyncio.create_task(reward(output_saying("4"), ROW))
            await judge.until_running(2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await judge.until_running(0)
            assert await find_leak(1, since=since) is None

    asyncio.run(main())


# -- a judge that fails often ----------------------------------------------------------------------------------------


def rollout(reward: RewardFunction, *, num_rows: int, retries: int) -> Awaitable[list[Trajectory]]:
    manager = AgentLoopManager(
        RolloutConfig(n=2, max_failed_share=1.0, retries=retries, agent=AgentConfig(num_workers=2)),
        servers=[ScriptedServer(lambda request: text_reply(str(len(request.prompt_ids) % 7)))],
        template=hermes_template(),
        reward=reward,
    )
    return manager.run([{"raw_prompt": user(f"question {n}"), "solution": str(n)} for n in range(num_rows)])


@pytest.mark.parametrize(("max_retries", "seed"), [(0, 0), (3, 2)])
def test_every_row_ends_scored_or_unscored_by_name_with_a_judge_that_fails_a_third_of_its_requests(
    tmp_path: Path, max_retries: int, seed: int
) -> None:
    async def main() -> list[Trajectory]:
        script = flaky(by_criterion(agree="yes", clear=4), share=1 / 3, seed=seed)
        async with judging(script) as judge:
            values = {**settings_of(judge, max_retries=max_retries), "criteria": CRITERIA}
            reward = load_reward(write_file(tmp_path, values), timeout_s=60)
            return await rollout(reward, num_rows=30, retries=0)

    trajectories = asyncio.run(main())

    assert len(trajectories) == 60
    scored, unscored = [], []
    for trajectory in trajectories:
        failure = trajectory.output.failure
        (scored if failure is None else unscored).append(trajectory)
        if failure is None:
            assert trajectory.reward == pytest.approx((3 + 0.75) / 4)
            assert dict(trajectory.reward_extra) == {"correct": 1.0, "clear": 0.75}
        else:
            assert trajectory.reward is None
            assert trajectory.reward_extra == {}
            assert failure.kind is FailureKind.REWARD
            assert failure.error.startswith("RewardUnavailable: criterion '")
    assert scored
    assert unscored or max_retries


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"judges": []}, "judges"),
        ({}, "give either criteria or a ranking"),
        ({"criteria": CRITERIA, "ranking": "best"}, "give either criteria or a ranking"),
        ({"criteria": {"a b": {"question": "?"}}}, "a b"),
        ({"criteria": {"reward": {"question": "?"}}}, "choose another"),
        ({"criteria": {"a": {"question": "?", "answer": [5, 1]}}}, "as in .1, 5."),
        ({"criteria": {"a": {"question": "?", "answer": "maybe"}}}, "answer"),
        ({"criteria": {"a": {"question": "?", "weight": 0}}}, "weight"),
        ({"criteria": {"a": {"question": "?", "wieght": 1}}}, "unknown key"),
        ({"judges": [{"model": "m"}, {"model": "m"}], "criteria": CRITERIA}, "the same judge twice"),
        ({"criteria": CRITERIA, "judges": [{"model": "m", "api_key_env": "NO_SUCH_KEY"}]}, "NO_SUCH_KEY"),
        ({"ranking": "best"}, "set batch to true"),
        ({"criteria": CRITERIA, "cache": "/proc/none/judges"}, "cannot be opened"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(tmp_path: Path, values: dict[str, Any], says: str) -> None:
    path = write_file(tmp_path, {"judges": [{"model": "m"}], **values})
    with pytest.raises(ConfigError, match=says):
        load_reward(path, timeout_s=60)


def test_a_list_and_a_rubric_for_groups_are_refused(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("[1]")
    with pytest.raises(ConfigError, match="holds a list"):
        load_reward(str(tmp_path / "list.yaml"), timeout_s=60)
    path = write_file(tmp_path, {"judges": [{"model": "m"}], "criteria": CRITERIA})
    with pytest.raises(ConfigError, match="leave batch out"):
        load_batch_reward(path, timeout_s=60)
