from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from agent_loop.errors import ConfigError, DataError
from agent_loop.interactions.simulated_user import SILENCE, SimulatedUser, with_roles_swapped
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason
from tests.helpers import text_reply
from tests.interactions.conversations import alternating
from tests.interactions.endpoint import Endpoint, PreparedResponse, endpoint
from tests.rollout.harness import WorkerHarness
from tests.serve.applications import MODEL, SpellingServer, serve_app

NOWHERE = "http://127.0.0.1:9/v1"


def user_at(url: str, **settings: Any) -> SimulatedUser:
    defaults = {"name": "user", "model": "any", "persona": "You want {wish}.", "max_retries": 0}
    return SimulatedUser({**defaults, "base_url": url, **settings})


async def converse(user: SimulatedUser, answers: Sequence[str], **limits: Any) -> Trajectory:
    """Run one row, in real time, with a model that returns these answers."""
    script = [text_reply(answer) for answer in answers]
    harness = WorkerHarness(script, interactions={"user": user}, **limits)
    prompt = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Hi."}]
    row = {"raw_prompt": prompt, "interaction_kwargs": {"name": "user", "wish": "a refund"}}
    [trajectory] = await harness.worker.run(harness.jobs([row]))
    assert user.num_open == 0
    return trajectory


async def run(
    user_replies: Sequence[PreparedResponse | str], model_answers: Sequence[str], **settings: Any
) -> tuple[Trajectory, Endpoint]:
    async with endpoint(*user_replies) as served:
        return await converse(user_at(served.url, **settings), model_answers), served


async def test_the_user_model_sees_the_conversation_with_roles_swapped() -> None:
    said = ["I want my money back.", "Thanks! ###STOP### bye"]
    trajectory, served = await run(said, ["How can I help?", "Done."], temperature=0.5)
    heard = alternating("Hello! How can I help you?", "Hi.", "How can I help?", said[0], "Done.")
    system = {"role": "system", "content": "You want a refund."}
    assert served.requests[0]["messages"] == [system, *heard[:3]]
    assert served.requests[1]["messages"] == [system, *heard]
    assert served.requests[0]["temperature"] == 0.5
    output = trajectory.output
    assert output.stop_reason is StopReason.INTERACTION_FINISHED
    texts = [m["content"] for m in output.messages if m["role"] == "user"]
    assert texts == ["Hi.", "I want my money back.", "Thanks!"]
    usage = {"user_prompt_tokens": 11, "user_completion_tokens": 5, "is_cut": False}
    assert [f.extra for f in output.feedback] == [usage] * 2


async def test_the_user_can_open_the_conversation() -> None:
    trajectory, served = await run(["I am Ada.", "Bye. ###STOP###"], ["Hello Ada."], opens=True)
    assert trajectory.output.messages[1] == {"role": "user", "content": "Hi.\n\nI am Ada."}
    assert served.requests[0]["messages"][1:] == alternating("Hello! How can I help you?")


async def test_the_trajectory_ends_after_the_user_s_last_turn() -> None:
    trajectory, served = await run(["One.", "Two."], ["a", "b", "c"], max_turns=2)
    assert len(served.requests) == 2
    assert trajectory.output.stop_reason is StopReason.INTERACTION_FINISHED
    assert trajectory.output.turn_scores == (0.0, 0.0, 0.0)


async def test_a_request_to_a_busy_endpoint_is_retried() -> None:
    replies = [PreparedResponse(status=503), PreparedResponse(status=429), "Fine. ###STOP###"]
    trajectory, served = await run(replies, ["Hello."], max_retries=2)
    assert trajectory.output.failure is None
    assert len(served.requests) == 3


@pytest.mark.parametrize(
    ("response", "settings", "message"),
    [
        (PreparedResponse(status=500), {}, "returned no completion (without retries): InternalServerError"),
        (PreparedResponse(status=404), {"max_retries": 3}, "NotFoundError: Error code: 404"),
        (PreparedResponse(hangs=True), {"timeout_s": 0.2}, "APITimeoutError"),
        (PreparedResponse(), {"base_url": NOWHERE}, "APIConnectionError"),
        (PreparedResponse(None), {}, "returned a completion without text"),
        (PreparedResponse(" \n"), {}, "returned a completion without text"),
        (PreparedResponse(body='"a page"'), {}, "returned a completion without text: 'a page'"),
        (PreparedResponse(body='{"choices": [{"message": null}]}'), {}, "returned a completion without text"),
        (PreparedResponse(body="<html>"), {}, "returned no completion (without retries): JSONDecodeError"),
    ],
)
async def test_an_endpoint_without_a_valid_response_fails_the_trajectory_and_is_named(
    response: PreparedResponse, settings: dict[str, Any], message: str
) -> None:
    trajectory, _ = await run([response], ["Hello."], **settings)
    failure = trajectory.output.failure
    assert failure is not None
    assert failure.error.startswith("InteractionUnavailable: interaction 'user': model 'any' at http://")
    assert message in failure.error
    assert len(trajectory.output.response_ids) > 0


async def test_cancellation_closes_the_request_to_the_endpoint() -> None:
    async with endpoint(PreparedResponse(hangs=True)) as served:
        trajectory = await converse(user_at(served.url), ["Hello."], deadline_s=0.3)
    assert trajectory.output.stop_reason is StopReason.DEADLINE


async def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "api_key_env is 'USER_KEY', but that environment variable is not set"
    with pytest.raises(ConfigError, match=message):
        user_at(NOWHERE, api_key_env="USER_KEY")
    monkeypatch.setenv("USER_KEY", "secret")
    _, served = await run(["###STOP###"], ["Hello."], api_key_env="USER_KEY")
    assert served.keys == ["Bearer secret"]


async def test_a_row_without_a_field_of_the_persona_is_a_data_error() -> None:
    user = user_at(NOWHERE)
    message = r"with the fields \['name'\] of interaction_kwargs: KeyError: 'wish'"
    with pytest.raises(DataError, match=message):
        await user.start_interaction("1", name="x")
    await user.finalize_interaction("1")


def test_a_pool_served_by_this_package_can_play_the_user() -> None:
    with serve_app([SpellingServer(text_reply("I want tea. ###STOP###"))]) as served:
        user = user_at(served.url, model=MODEL)
        trajectory = asyncio.run(converse(user, ["What would you like?"]))
    assert trajectory.output.failure is None
    assert trajectory.output.messages[-1] == {"role": "user", "content": "I want tea."}


def test_tool_results_and_empty_turns_are_not_shown_to_the_user() -> None:
    parts = [{"type": "image", "image": "x.png"}, {"type": "text", "text": "What is it?"}]
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "Let me look.", "tool_calls": [{"function": {"name": "look"}}]},
        {"role": "tool", "content": "a cat"},
        {"role": "assistant", "content": "A cat."},
    ]
    swapped = alternating("Yes?", "What is it?", "Let me look.\n\nA cat.")
    assert with_roles_swapped(messages, greeting="Yes?") == swapped
    [*_, last] = with_roles_swapped(alternating("Hi.", ""), greeting="Yes?")
    assert last == {"role": "user", "content": SILENCE}
