"""tau2-bench, played through the loop of environments with its gold actions."""

from __future__ import annotations

from typing import Any

import pytest

from agent_loop.checks.solutions import play_turns
from agent_loop.environments.factory import EnvironmentFactory
from agent_loop.environments.live import LiveEnvironment
from agent_loop.environments.suite import SolutionTurn
from agent_loop.environments.tau2 import Tau2Options, Tau2Suite, inspect, load_domain, tau2
from agent_loop.errors import ConfigError, ToolError
from agent_loop.types import StopReason
from tests.environments.suites import DONE, calls_turn, part, play, texts
from tests.interactions.endpoint import PreparedResponse, endpoint

pytestmark = [
    pytest.mark.environments,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:`__get_validators__` is deprecated"),  # a dependency of Inspect
]

NUM_TASKS = {"retail": 114, "airline": 50}
PENDING_ORDER = "#W5918442"


@pytest.fixture(scope="module")
def suite() -> Tau2Suite:
    return Tau2Suite()


def rows_of(suite: Tau2Suite, domain: str, **options: Any) -> list[dict[str, Any]]:
    return list(suite.rows(domain, Tau2Options(**options)))


def changes_data_base(task: dict[str, Any]) -> bool:
    """Return whether the gold actions of a task leave another data base than the first one."""
    domain = load_domain(task["domain"])
    inspect("util._store").init_subtask_store(domain.store())
    data_base_after = tau2("common.scorer").get_expected_db
    gold = domain.task(task["id"]).evaluation_criteria.actions
    return data_base_after(domain.name, gold).db != data_base_after(domain.name, []).db


@pytest.mark.parametrize("domain", NUM_TASKS)
def test_the_gold_actions_solve_every_task(suite: Tau2Suite, domain: str) -> None:
    rows = rows_of(suite, domain)
    assert len(rows) == NUM_TASKS[domain]
    unsolved: dict[str, Any] = {}
    for row in rows:
        trajectory = play(suite, row, suite.solution(row))
        if trajectory.reward != 1:
            unsolved[row["task"]["id"]] = (part(trajectory, "db"), part(trajectory, "communicate"))
    assert unsolved == {}


@pytest.mark.parametrize(("domain", "step"), [("retail", 12), ("airline", 8)])
def test_doing_nothing_solves_only_tasks_that_need_nothing(suite: Tau2Suite, domain: str, step: int) -> None:
    rewards: list[float | None] = []
    for row in rows_of(suite, domain)[::step]:
        trajectory = play(suite, row, [])
        needs_nothing = not changes_data_base(row["task"])
        assert part(trajectory, "db") == needs_nothing, row["task"]["id"]
        must_tell = suite.solution(row)[-1] != DONE
        assert part(trajectory, "communicate") == (not must_tell)
        assert trajectory.reward == (needs_nothing and not must_tell)
        rewards.append(trajectory.reward)
    assert 0 in rewards


def test_telling_the_user_counts_only_in_turns_that_the_user_reads(suite: Tau2Suite) -> None:
    [row, *_] = [row for row in rows_of(suite, "retail") if suite.solution(row)[-1] != DONE]
    actions, told = suite.solution(row)
    beside_calls = SolutionTurn(calls=actions.calls, text=told.text)
    silent = play(suite, row, [beside_calls, DONE])
    assert (silent.reward, part(silent, "db"), part(silent, "communicate")) == (0, 1, 0)


def test_the_scripted_user_tells_what_it_knows_and_ends_when_the_task_is_solved(suite: Tau2Suite) -> None:
    row = rows_of(suite, "retail")[0]
    asks = SolutionTurn(text="What can I do for you?")
    trajectory = play(suite, row, [asks, asks, *suite.solution(row), asks])
    opening, instructions, consent, *ending = texts(trajectory, "user")
    assert "Yusuf Rossi" in opening
    assert "email address" in instructions
    assert consent.startswith("Yes")
    assert ending == ["###STOP###"]
    assert trajectory.output.stop_reason is StopReason.INTERACTION_FINISHED
    assert trajectory.reward == 1


def test_the_model_reads_what_is_wrong_with_its_calls(suite: Tau2Suite) -> None:
    turns = [
        calls_turn("get_user_details", user_id="nobody"),
        calls_turn("get_user_details"),
        calls_turn("calculate", expression="1 / 0"),
        DONE,
    ]
    unknown, missing, zero = texts(play(suite, rows_of(suite, "retail")[0], turns), "tool")
    assert "User not found" in unknown
    assert "'user_id' is a required property" in missing
    assert "division by zero" in zero


async def test_trajectories_of_one_row_have_data_bases_of_their_own(suite: Tau2Suite) -> None:
    row = {**rows_of(suite, "retail")[0]}
    reads = ("get_order_details", {"order_id": PENDING_ORDER})
    cancels = ("cancel_pending_order", {"order_id": PENDING_ORDER, "reason": "no longer needed"})
    factory = EnvironmentFactory(suite.environment, where="tau2")
    first, second = (LiveEnvironment(factory, row=row) for _ in range(2))
    try:
        await first.open()
        await second.open()
        assert '"status":"cancelled"' in await first.call("call", *cancels)
        assert '"status":"cancelled"' in await first.call("call", *reads)
        assert '"status":"pending"' in await second.call("call", *reads)
        assert '"status":"cancelled"' in await second.call("call", *cancels)
        with pytest.raises(ToolError, match="Non-pending order cannot be cancelled"):
            await first.call("call", *cancels)
    finally:
        await first.close()
        await second.close()


async def test_a_language_model_plays_the_user_by_the_rules_of_the_benchmark(suite: Tau2Suite) -> None:
    async with endpoint("Hi, my keyboard is wrong.", "Thank you! ###STOP###") as served:
        row = rows_of(suite, "retail", user="model", user_url=served.url, user_model="customer")[0]
        actions, _ = suite.solution(row)
        beside_calls = SolutionTurn(calls=actions.calls, text="Let me look.")
        trajectory = await play_turns(suite, row, [beside_calls, SolutionTurn(text="Fixed."), DONE])
    assert texts(trajectory, "user") == ["Hi, my keyboard is wrong.", "Thank you!"]
    assert trajectory.output.stop_reason is StopReason.INTERACTION_FINISHED
    assert trajectory.reward == 1
    opening, later = served.requests
    system, begin = opening["messages"]
    assert "###STOP###" in system["content"]
    assert "Yusuf Rossi" in system["content"]
    assert begin["content"].startswith("Begin the interaction.")
    told = [message["content"] for message in later["messages"][2:]]
    assert told == ["Hi, my keyboard is wrong.", "Fixed."]


@pytest.mark.parametrize("replies", [[], ["Hi."]])
async def test_a_server_of_the_user_that_died_fails_the_trajectory_without_a_reward(
    suite: Tau2Suite, replies: list[str]
) -> None:
    async with endpoint(*replies, PreparedResponse(status=503)) as served:
        options = {"user_url": served.url, "user_model": "customer", "user_max_retries": 0}
        row = rows_of(suite, "airline", user="model", **options)[0]
        trajectory = await play_turns(suite, row, [SolutionTurn(text="Hello."), DONE])
    assert trajectory.reward is None
    assert trajectory.output.failure is not None
    error = trajectory.output.failure.error
    assert "EnvironmentUnavailable" in error
    assert "'customer'" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"user": "model"}, "needs user_url and user_model"),
        ({"user_url": "http://127.0.0.1:8000/v1"}, "add user=model"),
    ],
)
def test_options_that_do_not_fit_the_user_are_refused(
    suite: Tau2Suite, options: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        rows_of(suite, "retail", **options)
