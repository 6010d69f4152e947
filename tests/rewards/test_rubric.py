"""Rubrics and rankings: criteria that judges answer about a trajectory, and judges that compare those of a group."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_loop.config import AgentConfig, RolloutConfig
from agent_loop.errors import ConfigError, RewardError, RewardUnavailable
from agent_loop.rewards.function import RewardFunction, Score, ScoreResult, load_batch_reward, load_reward
from agent_loop.rollout.failures import failure_of
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.testing.conformance import count_resources, find_leak
from agent_loop.trajectory import FailureKind
from tests.cli.project import make_project
from tests.cli.test_serve import running
from tests.helpers import hermes_template, text_reply, user
from tests.interactions.endpoint import Endpoint
from tests.rewards.judges import Reply, answer, flaky, judged_by, output_saying, prompt_of, write_file

Script = Callable[[list[dict[str, Any]]], Reply]
CORRECT = {"correct": {"question": "Does the answer agree with {solution}?", "weight": 3}}
CLEAR = {"clear": {"question": "How clear is the answer?", "answer": [1, 5]}}
CRITERIA = {**CORRECT, **CLEAR}
ROW = {"solution": "4"}


def by_criterion(**answers: Any) -> Script:
    """Return a script that answers each criterion, which a word of its question identifies."""

    def script(messages: list[dict[str, Any]]) -> Reply:
        return next(answer(value) for word, value in answers.items() if word in prompt_of(messages))

    return script


async def scored(folder: Path, *scripts: Script, say: str = "4", **settings: Any) -> tuple[Score, Endpoint]:
    """Score one output with a judge for each script. Return the score and the first judge."""
    async with judged_by(folder, *scripts, **{"criteria": CRITERIA, **settings}) as (path, judges):
        return await load_reward(path, timeout_s=60)(output_saying(say), ROW), judges[0]


def schema_of(request: dict[str, Any]) -> dict[str, Any]:
    return request["response_format"]["json_schema"]["schema"]


async def test_the_reward_is_the_weighted_mean_and_each_criterion_is_a_part(tmp_path: Path) -> None:
    score, judge = await scored(tmp_path, by_criterion(agree="yes", clear=2))
    assert score == Score((3 * 1.0 + 1 * 0.25) / 4, {"correct": 1.0, "clear": 0.25})
    assert len(judge.requests) == 2
    assert judge.requests[0]["model"] == "m"


async def test_the_judge_gets_the_filled_question_the_messages_and_the_form(tmp_path: Path) -> None:
    _, judge = await scored(tmp_path, by_criterion(agree="no", clear=5), say="\ud800 }}")
    asked = {prompt_of(request["messages"]).splitlines()[0]: request for request in judge.requests}
    request = asked["Criterion: Does the answer agree with 4?"]
    messages = json.loads(prompt_of(request["messages"]).split("Work:\n")[1].split("\n\n")[0])
    assert [message["content"] for message in messages] == ["What is 2 + 2?", "\ufffd }}"]
    schema = schema_of(request)
    assert schema["properties"]["answer"]["enum"] == ["yes", "no"]
    assert (schema["required"], schema["additionalProperties"]) == (["answer"], False)
    form = schema_of(asked["Criterion: How clear is the answer?"])["properties"]["answer"]
    assert (form["type"], form["minimum"], form["maximum"]) == ("integer", 1, 5)


async def test_the_judge_sees_only_the_task_and_the_last_answer_if_the_file_says_so(tmp_path: Path) -> None:
    first = output_saying("first try")
    messages = (*first.messages, *user("?"), *output_saying("4").messages[1:])
    output = first._with(messages=messages)  # pyright: ignore[reportPrivateUsage]
    yes = by_criterion(agree="yes")
    async with judged_by(tmp_path, yes, criteria=CORRECT, shows="answer") as (path, [judge]):
        await load_reward(path, timeout_s=60)(output, ROW)
    prompt = prompt_of(judge.requests[0]["messages"])
    assert '"content": "4"' in prompt
    assert "What is 2 + 2?" in prompt
    assert "first try" not in prompt


@pytest.mark.parametrize(("vote", "value"), [("mean", 2 / 3), ("median", 1.0)])
async def test_the_median_of_three_judges_is_the_majority(tmp_path: Path, vote: str, value: float) -> None:
    yes, no = by_criterion(agree="yes"), by_criterion(agree="no")
    score, _ = await scored(tmp_path, yes, yes, no, criteria=CORRECT, vote=vote)
    assert score.reward == pytest.approx(value)


async def test_reasons_are_asked_for_first_and_recorded(tmp_path: Path) -> None:
    def script(messages: list[dict[str, Any]]) -> Reply:
        value: Any = 3 if "clear" in prompt_of(messages) else "yes"
        return json.dumps({"reason": f"because {value}", "answer": value})

    score, judge = await scored(tmp_path, script, explain=True)
    assert score.extra["clear.reason"] == "because 3"
    assert score.extra["correct.reason"] == "because yes"
    assert list(schema_of(judge.requests[0])["properties"]) == ["reason", "answer"]


async def test_a_judges_settings_reach_its_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    settings = {"api_key_env": "JUDGE_KEY", "json_schema": False, "temperature": 0, "max_tokens": None}
    _, judge = await scored(
        tmp_path, by_criterion(agree="yes", clear=5), judge={**settings, "extra_body": {"top_k": 1}}
    )
    assert judge.keys == ["Bearer secret", "Bearer secret"]
    assert {"model", "messages", "temperature", "top_k"} == judge.requests[0].keys()


UNREADABLE = [
    "yes",
    '{"answer": "maybe"}',
    '{"answer": true}',
    '{"answer": "yes", "confidence": 1}',
    '```json\n{"answer": "yes"}\n```',
    '{"answer": ["yes"]}',
]


@pytest.mark.parametrize("reply", UNREADABLE)
async def test_an_unreadable_reply_is_asked_for_once_more_and_given_up(tmp_path: Path, reply: str) -> None:
    asked: list[str] = []

    def script(messages: list[dict[str, Any]]) -> Reply:
        asked.append(prompt_of(messages))
        return reply

    message = r"criterion 'correct': judge 'm' at .* was asked twice: its reply"
    with pytest.raises(RewardUnavailable, match=message):
        await scored(tmp_path, script, criteria=CORRECT)
    assert len(asked) == 2
    assert "An earlier reply" in asked[1]


@pytest.mark.parametrize("value", [0, 6, 3.5, True, "3"])
async def test_a_score_outside_of_the_scale_is_unreadable(tmp_path: Path, value: Any) -> None:
    with pytest.raises(RewardUnavailable, match="is not what was asked for: answer"):
        await scored(tmp_path, lambda _: answer(value), criteria=CLEAR)


@pytest.mark.parametrize("status", [400, 429, 503])
async def test_an_error_status_is_a_failure_of_infrastructure(tmp_path: Path, status: int) -> None:
    with pytest.raises(RewardUnavailable, match=f"returned no completion: .*{status}") as caught:
        await scored(tmp_path, lambda _: status)
    assert failure_of(caught.value).kind is FailureKind.REWARD
    assert ("json_schema: false" in str(caught.value)) == (status == 400)


@pytest.mark.parametrize(
    ("judge", "error"),
    [({"timeout_s": 0.2}, "APITimeoutError"), ({"base_url": "http://127.0.0.1:9/v1"}, "APIConnectionError")],
)
async def test_a_judge_that_hangs_or_is_gone_is_unavailable(
    tmp_path: Path, judge: dict[str, Any], error: str
) -> None:
    with pytest.raises(RewardUnavailable, match=error):
        await scored(tmp_path, lambda _: None, judge=judge)


async def test_a_row_without_the_field_of_a_question_is_a_fault_of_the_row(tmp_path: Path) -> None:
    path = write_file(tmp_path, {"judges": [{"model": "m"}], "criteria": CRITERIA})
    message = r"criterion 'correct' cannot be filled with the columns \['x'\]"
    with pytest.raises(RewardError, match=message) as caught:
        await load_reward(path, timeout_s=60)(output_saying("4"), {"x": 1})
    assert failure_of(caught.value).kind is FailureKind.CODE


SURE = by_criterion(agree="yes", clear=5)


async def test_an_answer_is_asked_for_once_for_equal_content(tmp_path: Path) -> None:
    async with judged_by(tmp_path, SURE, criteria=CRITERIA) as (path, [judge]):
        reward = load_reward(path, timeout_s=60)
        await asyncio.gather(*(reward(output_saying(text), ROW) for text in ("4", "4", "5")))
        await reward(output_saying("4"), ROW)
    assert len(judge.requests) == 4


async def test_answers_in_a_file_are_not_asked_for_again_by_a_later_run(tmp_path: Path) -> None:
    cache = str(tmp_path / "run" / "judges.sqlite")
    async with judged_by(tmp_path, SURE, criteria=CRITERIA, cache=cache) as (path, [judge]):
        for text in ("4", "5", "4", "5"):
            score = await load_reward(path, timeout_s=60)(output_saying(text), ROW)
            assert score.reward == 1.0
    assert len(judge.requests) == 4


def open_files() -> dict[str, int]:
    """Count open files. Threads that look up host names stay for later look-ups, so they are not counted."""
    return {**count_resources(), "thread": sys.maxsize, "task": sys.maxsize}


async def test_requests_are_bounded_and_share_connections_that_are_closed_at_the_end(tmp_path: Path) -> None:
    limit = {"max_concurrent": 3}
    async with judged_by(tmp_path, SURE, criteria=CRITERIA, judge=limit) as (path, [judge]):
        reward = load_reward(path, timeout_s=0.001)
        since = open_files()
        await asyncio.gather(*(reward(output_saying(str(number)), ROW) for number in range(20)))
        assert await find_leak(1, since=since) is None
        assert len(judge.connections) <= 3
    assert (judge.max_running, len(judge.requests)) == (3, 40)


async def test_a_cancelled_reward_leaves_no_connection(tmp_path: Path) -> None:
    async with judged_by(tmp_path, lambda _: None, criteria=CRITERIA) as (path, [judge]):
        reward = load_reward(path, timeout_s=60)
        since = open_files()
        task = asyncio.create_task(reward(output_saying("4"), ROW))
        await judge.until_running(2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await judge.until_running(0)
        assert await find_leak(1, since=since) is None


def manager_with(reward: RewardFunction) -> AgentLoopManager:
    return AgentLoopManager(
        RolloutConfig(n=2, max_failed_share=1.0, retries=0, agent=AgentConfig(num_workers=2)),
        servers=[ScriptedServer(lambda request: text_reply(str(len(request.prompt_ids) % 7)))],
        template=hermes_template(),
        reward=reward,
    )


@pytest.mark.parametrize(("max_retries", "seed"), [(0, 0), (3, 2)])
async def test_rows_of_a_judge_that_fails_often_are_scored_or_unscored(
    tmp_path: Path, max_retries: int, seed: int
) -> None:
    script = flaky(by_criterion(agree="yes", clear=4), share=1 / 3, seed=seed)
    rows = [{"raw_prompt": user(f"question {n}"), "solution": str(n)} for n in range(30)]
    judge = {"max_retries": max_retries}
    async with judged_by(tmp_path, script, criteria=CRITERIA, judge=judge) as (path, _):
        trajectories = await manager_with(load_reward(path, timeout_s=60)).run(rows)
    assert len(trajectories) == 60
    unscored = [t for t in trajectories if t.output.failure is not None]
    for trajectory in trajectories:
        failure = trajectory.output.failure
        if failure is None:
            assert trajectory.reward == pytest.approx((3 + 0.75) / 4)
            assert dict(trajectory.reward_extra) == {"correct": 1.0, "clear": 0.75}
        else:
            assert trajectory.reward is None
            assert trajectory.reward_extra == {}
            assert failure.kind is FailureKind.REWARD
            assert failure.error.startswith("RewardUnavailable: criterion '")
    assert len(unscored) < 60
    assert unscored or max_retries


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


def work_in(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a judge of a group sees."""
    [line] = [line for line in prompt_of(messages).splitlines() if line.startswith("{")]
    return json.loads(line)


def by_number(messages: list[dict[str, Any]]) -> Reply:
    """Give each attempt the number in its answer."""
    attempts = work_in(messages)["attempts"]
    numbers = {name: re.findall(r"\d+", each[-1]["content"]) for name, each in attempts.items()}
    return json.dumps({"answer": {name: int(found[-1]) for name, found in numbers.items()}})


async def ranked(
    folder: Path, *texts: str, script: Script = by_number
) -> tuple[list[ScoreResult], dict[str, Any]]:
    """Rank outputs. Return their scores and the only request."""
    ranking = "The sum is {solution}, and brief answers are better."
    async with judged_by(folder, script, ranking=ranking) as (path, [judge]):
        outputs = [output_saying(text) for text in texts]
        results = await load_batch_reward(path, timeout_s=60)(outputs, [{"solution": 4}] * len(texts))
        [request] = judge.requests
        return results, request


async def test_one_request_scores_all_trajectories_of_a_group(tmp_path: Path) -> None:
    results, request = await ranked(tmp_path, "20", "100", "20", "0")
    scores = [result.score for result in results if result.score is not None]
    found = [(score.reward, score.extra["rank"]) for score in scores]
    assert found == [(0.2, 2), (1.0, 1), (0.2, 2), (0.0, 4)]
    prompt = prompt_of(request["messages"])
    assert "What counts: The sum is 4, and brief answers are better." in prompt
    assert prompt.count("What is 2 + 2?") == 1
    attempts = {
        str(number): [{"role": "assistant", "content": text}]
        for number, text in enumerate(("20", "100", "20", "0"), 1)
    }
    assert work_in(request["messages"]) == {"task": user("What is 2 + 2?"), "attempts": attempts}


@pytest.mark.parametrize(
    "scores", [{"1": 5}, {"1": 5, "2": 5, "3": 5}, {"1": 5, "2": 101}, {"1": 5, "2": "5"}, [5, 5]], ids=repr
)
async def test_scores_that_do_not_fit_the_group_are_unreadable(tmp_path: Path, scores: Any) -> None:
    with pytest.raises(RewardUnavailable, match=r"ranking: judge 'm' .* was asked twice"):
        await ranked(tmp_path, "1", "2", script=lambda _: json.dumps({"answer": scores}))


@pytest.mark.slow
def test_a_served_model_answers_with_a_schema_and_is_unreadable_without_one(tmp_path: Path) -> None:
    """Run `agent-loop serve` with a small random model."""
    make_project(tmp_path)
    scale = {"question": "Clear?", "answer": [1, 3], "weight": 2}
    criteria = {"criteria": {"right": {"question": "Right?"}, "clear": scale}}
    first, second = (output_saying(text) for text in ("4", "5"))

    def file(url: str, values: dict[str, Any], **settings: Any) -> str:
        judge = {"model": "model", "base_url": url, "max_tokens": 64, **settings}
        return write_file(tmp_path, {"judges": [judge], **values})

    async def main(url: str) -> tuple[Score, list[ScoreResult]]:
        score = await load_reward(file(url, criteria), timeout_s=60)(first, {})
        unreadable = load_reward(file(url, criteria, json_schema=False), timeout_s=60)
        with pytest.raises(RewardUnavailable, match=r"was asked twice: its reply .* is not what was asked"):
            await unreadable(first, {})
        group = load_batch_reward(file(url, {"ranking": "The better sum."}), timeout_s=60)
        return score, await group([first, second], [{}, {}])

    with running(tmp_path, "model", "--max-model-len", "4096") as served:
        score, results = asyncio.run(main(served.url))
    assert score.extra["right"] in (0.0, 1.0)
    assert score.extra["clear"] in (0.0, 0.5, 1.0)
    assert score.reward == pytest.approx((score.extra["right"] + 2 * score.extra["clear"]) / 3)
    rewards = [result.score.reward for result in results if result.score is not None]
    assert len(rewards) == 2
    assert all(0 <= reward <= 1 for reward in rewards)
