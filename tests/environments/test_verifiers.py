"""Environments of verifiers, which run in an interpreter of their own, behind the gateway."""

from __future__ import annotations

import asyncio
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from agent_loop.environments.verifiers import EnvironmentSpec, VerifiersSuite, _processes, environment_process
from agent_loop.errors import ConfigError, EnvironmentUnavailable
from agent_loop.rollout.jobs import Job
from agent_loop.rollout.rows import load_rows
from agent_loop.servers.scripted import Script, ScriptedReply, ScriptedRequest
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason
from tests.helpers import call_text, hermes_template, text_reply, user
from tests.serve.harness import ProgramHarness, in_order, origins, tokens

pytestmark = [pytest.mark.environments, pytest.mark.timeout(240)]

FILES = Path(__file__).parent / "verifiers_files"
PYTHON = os.environ.get(
    "VERIFIERS_PYTHON", str(Path(__file__).parents[2] / ".venv-environments/verifiers/bin/python")
)


@cache
def rows_of(name: str, **options: Any) -> list[dict[str, Any]]:
    query = "&".join(f"{name}={value}" for name, value in {"python": PYTHON, **options}.items())
    return load_rows([f"verifiers:{FILES / name}.py?{query}"], prompt_key="prompt")


def play(
    rows: list[dict[str, Any]], script: Script, **limits: Any
) -> tuple[list[Trajectory], ProgramHarness]:
    """Play rows, and check that the tokens of every trajectory are the servers' and that nothing is left open."""

    async def run() -> tuple[list[Trajectory], ProgramHarness]:
        harness = ProgramHarness(script, **limits)
        jobs = [Job(row, group, 0, {}) for group, row in enumerate(rows)]
        trajectories = await harness.worker.run(jobs)
        harness.assert_nothing_is_left()
        harness.assert_tokens_match_the_servers([trajectory.output for trajectory in trajectories])
        assert not _processes.get(asyncio.get_running_loop())
        return trajectories, harness

    return asyncio.run(run())


def reply_by_prompt(answers: dict[str, str]) -> Script:
    """Return a script that answers the prompt that holds a text with the reply to that text."""

    def script(request: ScriptedRequest) -> ScriptedReply:
        prompt = hermes_template().decode(request.prompt_ids)
        return text_reply(next(answer for text, answer in answers.items() if text in prompt))

    return script


def test_the_rows_of_an_environment_are_its_tasks() -> None:
    rows = rows_of("guess")
    prompt = [{"role": "system", "content": "Say a number."}, *user("Guess my number, from 1 to 9.")]
    assert [row["raw_prompt"] for row in rows] == [prompt] * 2
    suite = VerifiersSuite()
    assert len({suite.identity(row) for row in rows}) == 2
    assert len(rows_of("sums", size=3, **{"taskset.size": "5"})) == 3
    splits = [rows_of("sums", split=split, **{"taskset.size": "30"}) for split in ("train", "val")]
    train, val = ({suite.identity(row) for row in rows} for rows in splits)
    assert len(train) + len(val) == 30
    assert not train & val


def test_one_reply_is_scored_by_the_environments_reward_functions() -> None:
    rows = rows_of("sums", **{"taskset.size": "2"})
    questions = [row["raw_prompt"][0]["content"] for row in rows]
    right = str(eval(questions[0].rpartition(":")[2].rstrip("= ")))
    trajectories, harness = play(rows, reply_by_prompt({questions[0]: right, questions[1]: "no idea"}))
    for trajectory, row in zip(trajectories, rows, strict=True):
        assert trajectory.output.failure is None
        assert origins(trajectory.output) == ["prompt", "model"]
        prompt = hermes_template().open(row["raw_prompt"]).tolist()
        assert tokens(trajectory.output)[: len(prompt)] == prompt
        assert trajectory.output.extra_fields["score_answer"] == trajectory.reward
    assert trajectories[0].reward == 1.0
    assert trajectories[1].reward is not None
    assert trajectories[1].reward < 1.0
    assert trajectories[1].output.extra_fields["length"] == len("no idea")
    assert len(harness.server.requests) == 2


def test_several_turns_are_one_conversation_with_the_environments_reward() -> None:
    [trajectory], _ = play(rows_of("guess")[:1], in_order(*map(text_reply, ("5", "2", "3"))))
    assert trajectory.reward == 0.5
    assert trajectory.output.extra_fields["num_guesses"] == 3.0
    assert [m["content"] for m in trajectory.output.messages] == [
        "Say a number.", "Guess my number, from 1 to 9.", "5", "lower", "2", "higher", "3",
    ]  # fmt: skip
    assert origins(trajectory.output) == ["prompt", "model", "interaction", "model", "interaction", "model"]


def test_tools_of_an_environment_are_called_in_its_own_server() -> None:
    asks = call_text("price_of", fruit="pear") + call_text("price_of", fruit="plum")
    [trajectory], _ = play(rows_of("shop"), in_order(text_reply(asks), text_reply("7")))
    assert trajectory.output.failure is None
    assert trajectory.reward == 2.0
    assert trajectory.output.extra_fields["is_right"] == 2.0
    assert [m["content"] for m in trajectory.output.messages if m["role"] == "tool"] == ["3", "4"]


def test_an_error_of_an_environment_is_a_failure_and_no_reward() -> None:
    rows = rows_of("guess")
    trajectories, _ = play(rows, in_order(text_reply("five")))
    for trajectory in trajectories:
        assert trajectory.reward is None
        assert "invalid literal for int()" in trajectory.output.failure.error
        assert "guess.py" in trajectory.output.failure.traceback


def test_a_limit_ends_a_rollout_whose_turns_so_far_are_scored() -> None:
    [trajectory], _ = play(rows_of("guess")[:1], in_order(text_reply("5")), max_assistant_turns=2)
    assert trajectory.output.failure is None
    assert trajectory.reward == 0.0
    assert trajectory.output.stop_reason is StopReason.MAX_ASSISTANT_TURNS
    assert trajectory.output.extra_fields["num_guesses"] == 2.0


def test_a_process_that_dies_is_a_failure_and_no_reward() -> None:
    [trajectory], _ = play(rows_of("guess")[:1], in_order(text_reply("die")))
    assert trajectory.reward is None
    error = trajectory.output.failure.error
    assert error.startswith("EnvironmentUnavailable: the process of the environment")


async def test_a_process_that_died_is_started_again_for_the_next_rollout() -> None:
    spec = EnvironmentSpec(str(FILES / "guess.py"), "{}", PYTHON)
    async with environment_process(spec, env={}) as process:
        assert process._process is not None
        process._process.kill()
        await process._process.wait()
        with pytest.raises(EnvironmentUnavailable):
            await process.run({})
        async with environment_process(spec, env={}) as same:
            assert same is process
            request = {"index": 0, "key": "", "base_url": "", "api_key": ""}
            assert "is not the row's task" in (await same.run(request))["error"]
    assert not _processes[asyncio.get_running_loop()]


def test_the_policy_plays_no_seat_that_is_not_trained() -> None:
    rows = rows_of("guess", id="user-sim", size=1)
    [trajectory], harness = play(rows, in_order(text_reply("3")))
    assert "the seat 'user' is not trained" in trajectory.output.failure.error
    assert not harness.server.requests


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        (f"no_such?python={PYTHON}", ["does not start in", "'no_such' not found"]),
        ("guess?python=/no/such/python", ["does not start in", "/no/such/python"]),
        ("guess", ["pip install"]),
    ],
    ids=["no environment", "no interpreter", "an interpreter without verifiers"],
)
def test_an_environment_that_cannot_be_loaded_is_refused_with_the_reason(
    source: str, messages: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_rows([f"verifiers:{source}"], prompt_key="prompt")
    assert [message for message in messages if message not in str(refusal.value)] == []
