"""Limits of an episode: which one ends it, and the parameters that they leave for a turn."""

from __future__ import annotations

import pytest

from agent_loop.episode.limits import EpisodeLimits
from agent_loop.types import SamplingParams, StopReason


def limits(**values: int) -> EpisodeLimits:
    return EpisodeLimits(**{"prompt_length": 10, "response_length": 100, **values})


@pytest.mark.parametrize(
    ("assistant_turns", "num_tokens", "forbidden"),
    [
        (0, 0, None),
        (2, 99, None),
        (2, 100, StopReason.RESPONSE_LENGTH),
        (3, 0, StopReason.MAX_ASSISTANT_TURNS),
        (3, 100, StopReason.MAX_ASSISTANT_TURNS),
    ],
)
def test_another_turn_is_forbidden_by_the_limit_of_turns_or_of_tokens(
    assistant_turns: int, num_tokens: int, forbidden: StopReason | None
) -> None:
    assert (
        limits(max_assistant_turns=3).forbids_turn(assistant_turns=assistant_turns, num_tokens=num_tokens)
        is forbidden
    )


@pytest.mark.parametrize(
    ("requested", "per_turn", "used", "allowed"),
    [(None, None, 0, 100), (7, None, 0, 7), (7, 5, 0, 5), (7, 5, 98, 2)],
)
def test_max_tokens_is_the_minimum_of_the_request_the_turn_limit_and_the_tokens_left(
    requested: int | None, per_turn: int | None, used: int, allowed: int
) -> None:
    applied = EpisodeLimits(10, 100, max_turn_tokens=per_turn).applied(
        SamplingParams(max_tokens=requested, stop_token_ids=(1,)), num_tokens=used, stop_token_ids=[2]
    )
    assert applied.max_tokens == allowed
    assert applied.stop_token_ids == (1, 2)
