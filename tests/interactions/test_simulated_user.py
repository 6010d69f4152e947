from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from agent_loop.errors import ConfigError, DataError, InteractionUnavailable
from agent_loop.interactions.flipping import SILENCE, flipped, num_replies
from agent_loop.interactions.simulated_user import SimulatedUser
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason
from tests.helpers import says
from tests.interactions.conversations import said
from tests.interactions.endpoint import Endpoint, Says, endpoint
from tests.rollout.harness import Stage
from tests.serving.harness import MODEL, SpellingServer, site

PERSONA = "You are {name}. You want {wish}. Say ###STOP### when you have it."
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


async def talk(user: SimulatedUser, answers: Sequence[str], **limits: Any) -> Trajectory:
    """Runs one row, in real time, with a model that gives these answers."""
    stage = Stage([says(answer) for answer in answers], interactions={"user": user}, **limits)
    row = {
        "raw_prompt": [{"role": "system", "content": "You help."}, {"role": "user", "content": "Hi."}],
        "interaction_kwargs": ROW,
    }
    [trajectory] = await stage.worker.run(stage.jobs([row]))
    assert user.num_open == 0
    return trajectory


def run(
    answers: Sequence[Says | str], said_by_model: Sequence[str], **settings: Any
) -> tuple[Trajectory, Endpoint]:
    async def main() -> tuple[Trajectory, Endpoint]:
        async with endpoint(*answers) as served:
            return await talk(user_at(served.url, **settings), said_by_model), served

    return asyncio.run(main())


def test_the_user_sees_the_conversation_from_its_own_side() -> None:
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


def test_the_user_may_speak_first() -> None:
    trajectory, served = run(["I am Ada.", "Bye. ###STOP###"], ["Hello Ada."], opens=True)
    assert trajectory.output.messages[1] == {"role": "user", "content": "Hi.\n\nI am Ada."}
    assert served.requests[0]["messages"][1:] == [{"role": "user", "content": "Hello! How can I help you?"}]


def test_after_its_last_turn_the_user_is_gone() -> None:
    trajectory, served = run(["One.", "Two."], ["a", "b", "c"], max_turns=2)
    assert len(served.requests) == 2
    assert trajectory.output.stop_reason is StopReason.INTERACTION_FINISHED
    assert trajectory.output.turn_scores == (0.0, 0.0, 0.0)


def test_an_endpoint_that_is_busy_is_asked_again() -> None:
    trajectory, served = run(
        [Says(status=503), Says(status=429), "Fine. ###STOP###"], ["Hello."], max_retries=2
    )
    assert trajectory.output.failure is None
    assert len(served.requests) == 3


@pytest.mark.parametrize(
    ("answer", "settings", "message"),
    [
        (Says(status=500), {}, "gave no answer (without retries): InternalServerError"),
        (Says(status=404), {"max_retries": 3}, "NotFoundError: Error code: 404"),
        (Says(hangs=True), {"timeout_s": 0.2}, "APITimeoutError"),
        (Says(None), {}, "answered without a text"),
        (Says(" \n"), {}, "answered without a text"),
        (Says(body='"a page"'), {}, "answered without a text: 'a page'"),
        (Says(body='{"choices": [{"message": null}]}'), {}, "answered without a text"),
        (Says(body="<html>"), {}, "gave no answer (without retries): JSONDecodeError"),
    ],
)
def test_an_endpoint_that_gives_no_answer_fails_the_trajectory_by_name(
    answer: Says, settings: dict[str, Any], message: str
) -> None:
    trajectory, _ = run([answer], ["Hello."], **settings)
    failure = trajectory.output.failure
    assert failure is not None
    assert failure.error.startswith("InteractionUnavailable: interaction 'user': model 'any' at http://")
    assert message in failure.error
    assert len(trajectory.output.response_ids) > 0


def test_an_endpoint_that_is_not_there_is_named() -> None:
    async def main() -> None:
        user = user_at("http://127.0.0.1:9/v1")
        await user.start_interaction("1", wish="peace")
        with pytest.raises(InteractionUnavailable, match="APIConnectionError"):
            await user.generate_response("1", said("Hi.", "Hello."))
        await user.finalize_interaction("1")

    asyncio.run(main())


def test_cancelling_hangs_up_and_leaves_nothing_open() -> None:
    async def main() -> None:
        async with endpoint(Says(hangs=True)) as served:
            trajectory = await talk(user_at(served.url), ["Hello."], deadline_s=0.3)
            assert trajectory.output.stop_reason is StopReason.DEADLINE

    asyncio.run(main())


def test_a_reply_that_was_cut_says_so() -> None:
    trajectory, _ = run([Says("I want", is_cut=True), "###STOP###"], ["Hello.", "Yes?"])
    assert trajectory.output.feedback[0].extra["is_cut"] is True


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="api_key_env is 'USER_KEY', but that variable is not set"):
        user_at("http://127.0.0.1:9/v1", api_key_env="USER_KEY")
    monkeypatch.setenv("USER_KEY", "secret")
    _, served = run(["###STOP###"], ["Hello."], api_key_env="USER_KEY")
    assert served.keys == ["Bearer secret"]


def test_a_row_that_lacks_a_field_of_the_persona_is_named() -> None:
    async def main() -> None:
        user = user_at("http://127.0.0.1:9/v1")
        with pytest.raises(DataError, match=r"with the fields \['name'\]: KeyError: 'wish'"):
            await user.start_interaction("1", name="x")
        await user.finalize_interaction("1")

    asyncio.run(main())


def test_a_pool_of_this_package_plays_the_user() -> None:
    pool = SpellingServer(says("I want tea. ###STOP###"))

    with site([pool]) as served:
        user = user_at(served.url, model=MODEL)
        trajectory = asyncio.run(talk(user, ["What would you like?"]))
    assert trajectory.output.failure is None
    assert trajectory.output.messages[-1] == {"role": "user", "content": "I want tea."}


def test_tools_and_silence_are_not_shown_to_the_user() -> None:
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
    assert flipped(messages, greeting="Yes?") == [
        {"role": "user", "content": "Yes?"},
        {"role": "assistant", "content": "What is it?"},
        {"role": "user", "content": "Let me look.\n\nA cat."},
    ]
    assert flipped(said("Hi.", ""), greeting="Yes?")[-1] == {"role": "user", "content": SILENCE}


def test_replies_are_counted_after_the_first_answer() -> None:
    assert num_replies(said("prompt")) == 0
    assert num_replies(said("prompt", "answer")) == 0
    assert num_replies(said("prompt", "answer", "reply", "answer")) == 1
