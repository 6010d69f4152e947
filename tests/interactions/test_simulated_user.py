from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from agent_loop.errors import ConfigError, DataError, InteractionUnavailable
from agent_loop.interactions.simulated_user import SILENCE, SimulatedUser, with_roles_swapped
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason
from tests.helpers import text_reply
from tests.interactions.conversations import alternating
from tests.interactions.endpoint import Endpoint, PreparedResponse, endpoint
from tests.rollout.harness import WorkerHarness
from tests.serve.applications import MODEL, SpellingServer, serve_app

ROW = {"name": "user", "wish": "a refund"}


def user_at(url: str, **settings: Any) -> SimulatedUser:
    return SimulatedUser(
        {
            "name": "user",
            "model": "any",
            "base_url": url,
            "persona": "You want {wish}.",
            "max_retries": 0,
            **settings,
        }
    )


async def converse(user: SimulatedUser, answers: Sequence[str], **limits: Any) -> Trajectory:
    """Run one row, in real time, with a model that returns these answers."""
    harness = WorkerHarness([text_reply(answer) for answer in answers], interactions={"user": user}, **limits)
    row = {
        "raw_prompt": [{"role": "system", "content": "You help."}, {"role": "user", "content": "Hi."}],
        "interaction_kwargs": ROW,
    }
    [trajectory] = await harness.worker.run(harness.jobs([row]))
    assert user.num_open == 0
    return trajectory


def run(
    user_replies: Sequence[PreparedResponse | str], model_answers: Sequence[str], **settings: Any
) -> tuple[Trajectory, Endpoint]:
    async def main() -> tuple[Trajectory, Endpoint]:
        async with endpoint(*user_replies) as served:
            return await converse(user_at(served.url, **settings), model_answers), served

    return asyncio.run(main())


def test_the_user_model_sees_the_conversation_with_roles_swapped() -> None:
    trajectory, served = run(
        ["I want my money back.", "Thanks! ###STOP### bye"], ["How can I help?", "Done."], temperature=0.5
    )
    system = {"role": "system", "content": "You want a refund."}
    assert served.requests[0]["messages"] == [
        system,
        {"role": "user", "content": "Hello! How can I help you?"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "How can I help?"},
    ]
    assert served.requests[1]["messages"][-2:] == [
        {"role": "assistant", "content": "I want my money back."},
        {"role": "user", "content": "Done."},
    ]
    assert served.requests[0]["temperature"] == 0.5
    output = trajectory.output
    assert output.stop_reason is StopReason.INTERACTION_FINISHED
    assert [m["content"] for m in output.messages if m["role"] == "user"] == [
        "Hi.",
        "I want my money back.",
        "Thanks!",
    ]
    assert [f.extra for f in output.feedback] == [
        {"user_prompt_tokens": 11, "user_completion_tokens": 5, "is_cut": False}
    ] * 2


def test_the_user_can_open_the_conversation() -> None:
    trajectory, served = run(["I am Ada.", "Bye. ###STOP###"], ["Hello Ada."], opens=True)
    assert trajectory.output.messages[1] == {"role": "user", "content": "Hi.\n\nI am Ada."}
    assert served.requests[0]["messages"][1:] == [{"role": "user", "content": "Hello! How can I help you?"}]


def test_the_trajectory_ends_after_the_user_s_last_turn() -> None:
    trajectory, served = run(["One.", "Two."], ["a", "b", "c"], max_turns=2)
    assert len(served.requests) == 2
    assert trajectory.output.stop_reason is StopReason.INTERACTION_FINISHED
    assert trajectory.output.turn_scores == (0.0, 0.0, 0.0)


def test_a_request_to_a_busy_endpoint_is_retried() -> None:
    trajectory, served = run(
        [PreparedResponse(status=503), PreparedResponse(status=429), "Fine. ###STOP###"],
        ["Hello."],
        max_retries=2,
    )
    assert trajectory.output.failure is None
    assert len(served.requests) == 3


@pytest.mark.parametrize(
    ("response", "settings", "message"),
    [
        (PreparedResponse(status=500), {}, "returned no completion (without retries): InternalServerError"),
        (PreparedResponse(status=404), {"max_retries": 3}, "NotFoundError: Error code: 404"),
        (PreparedResponse(hangs=True), {"timeout_s": 0.2}, "APITimeoutError"),
        (PreparedResponse(None), {}, "returned a completion without text"),
        (PreparedResponse(" \n"), {}, "returned a completion without text"),
        (PreparedResponse(body='"a page"'), {}, "returned a completion without text: 'a page'"),
        (PreparedResponse(body='{"choices": [{"message": null}]}'), {}, "returned a completion without text"),
        (PreparedResponse(body="<html>"), {}, "returned no completion (without retries): JSONDecodeError"),
    ],
)
def test_an_endpoint_without_a_valid_response_fails_the_trajectory_and_is_named(
    response: PreparedResponse, settings: dict[str, Any], message: str
) -> None:
    trajectory, _ = run([response], ["Hello."], **settings)
    failure = trajectory.output.failure
    assert failure is not None
    assert failure.error.startswith("InteractionUnavailable: interaction 'user': model 'any' at http://")
    assert message in failure.error
    assert len(trajectory.output.response_ids) > 0


def test_an_unreachable_endpoint_raises_interaction_unavailable() -> None:
    async def main() -> None:
        user = user_at("http://127.0.0.1:9/v1")
        await user.start_interaction("1", wish="peace")
        with pytest.raises(InteractionUnavailable, match="APIConnectionError"):
            await user.generate_response("1", alternating("Hi.", "Hello."))
        await user.finalize_interaction("1")

    asyncio.run(main())


def test_cancellation_closes_the_request_to_the_endpoint() -> None:
    async def main() -> None:
        async with endpoint(PreparedResponse(hangs=True)) as served:
            trajectory = await converse(user_at(served.url), ["Hello."], deadline_s=0.3)
            assert trajectory.output.stop_reason is StopReason.DEADLINE

    asyncio.run(main())


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match="api_key_env is 'USER_KEY', but that environment variable is not set"
    ):
        user_at("http://127.0.0.1:9/v1", api_key_env="USER_KEY")
    monkeypatch.setenv("USER_KEY", "secret")
    _, served = run(["###STOP###"], ["Hello."], api_key_env="USER_KEY")
    assert served.keys == ["Bearer secret"]


def test_a_row_without_a_field_of_the_persona_is_a_data_error() -> None:
    async def main() -> None:
        user = user_at("http://127.0.0.1:9/v1")
        with pytest.raises(
            DataError, match=r"with the fields \['name'\] of interaction_kwargs: KeyError: 'wish'"
        ):
            await user.start_interaction("1", name="x")
        await user.finalize_interaction("1")

    asyncio.run(main())


def test_a_pool_served_by_this_package_can_play_the_user() -> None:
    pool = SpellingServer(text_reply("I want tea. ###STOP###"))

    with serve_app([pool]) as served:
        user = user_at(served.url, model=MODEL)
        trajectory = asyncio.run(converse(user, ["What would you like?"]))
    assert trajectory.output.failure is None
    assert trajectory.output.messages[-1] == {"role": "user", "content": "I want tea."}


def test_tool_results_and_empty_turns_are_not_shown_to_the_user() -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {
            "role": "user",
            "content": [{"type": "image", "image": "x.png"}, {"type": "text", "text": "What is it?"}],
        },
        {"role": "assistant", "content": "Let me look.", "tool_calls": [{"function": {"name": "look"}}]},
        {"role": "tool", "content": "a cat"},
        {"role": "assistant", "content": "A cat."},
    ]
    assert with_roles_swapped(messages, greeting="Yes?") == [
        {"role": "user", "content": "Yes?"},
        {"role": "assistant", "content": "What is it?"},
        {"role": "user", "content": "Let me look.\n\nA cat."},
    ]
    assert with_roles_swapped(alternating("Hi.", ""), greeting="Yes?")[-1] == {
        "role": "user",
        "content": SILENCE,
    }
