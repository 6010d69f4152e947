"""Calls the user's reward function and reads what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from agent_loop.boundary import (
    REWARD_LIMIT,
    DeadlineExpired,
    as_reward,
    call_function,
    describe_error,
    describe_value,
    run_bounded,
)
from agent_loop.copying import copied
from agent_loop.errors import ConfigError, RewardError
from agent_loop.foreign_values import plain_mapping
from agent_loop.loading import load_object
from agent_loop.trajectory import AgentLoopOutput
from agent_loop.types import Row

FUNCTION_KEY = "reward.function"
REWARD_NAMES = ("reward", "score")
"""Under which a mapping may hold the reward; the first that is there counts."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a trajectory was found to be worth."""

    reward: float
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What else the function returned; becomes columns of the batch."""


class RewardFunction:
    """A user's `(output, row) -> float | dict` within a time limit.

    An async function runs on the event loop, any other in a thread of its own. A mapping holds `reward` (or `score`),
    and the rest of it is extra. Booleans count as 0 and 1.

    Args:
        function: Called with the trajectory's output and its row, by position.
        timeout_s: For one trajectory.
        name: For errors.
    """

    def __init__(
        self, function: Callable[[AgentLoopOutput, Row], Any], *, timeout_s: float, name: str | None = None
    ) -> None:
        self.function = function
        self.timeout_s = timeout_s
        self.name = name or str(getattr(function, "__qualname__", type(function).__qualname__))

    async def __call__(self, output: AgentLoopOutput, row: Row) -> Score:
        """Scores one trajectory. The function gets copies of the messages, the fields and the row.

        Raises:
            RewardError: The function raised, took too long, or returned no reward.
        """
        source = f"reward function {self.name}"

        async def score() -> Score:
            returned = await call_function(self.function, output.copied(), copied(dict(row)))
            return read_score(returned, source=source)

        try:
            return await run_bounded(score, timeout_s=self.timeout_s, name=source)
        except DeadlineExpired as error:
            raise RewardError(
                f"reward function {self.name} {error}; mend it, or raise reward.timeout_s"
            ) from error
        except RewardError:
            raise
        except Exception as error:
            raise RewardError(
                f"reward function {self.name} raised {describe_error(error)}; mend it"
            ) from error


def load_reward(reference: str, *, timeout_s: float) -> RewardFunction:
    """The reward function that a reference names.

    Args:
        reference: `file.py:name` or `module:name`.
        timeout_s: For one trajectory.

    Raises:
        ConfigError: There is no such function, or it does not take `(output, row)`.
    """
    function = load_object(reference, key=FUNCTION_KEY)
    if not callable(function) or isinstance(function, type):
        kind = "a class" if isinstance(function, type) else f"an object of type {type(function).__name__}"
        raise ConfigError(
            f"{FUNCTION_KEY} is {reference!r}, {kind}; name a function (output, row) -> float | dict"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:
        return RewardFunction(function, timeout_s=timeout_s, name=reference)
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"{FUNCTION_KEY} is {reference!r}, which takes {signature}; it is called as (output, row): {error}"
        ) from None
    return RewardFunction(function, timeout_s=timeout_s, name=reference)


def read_score(returned: Any, *, source: str) -> Score:
    """A number, or a mapping with `reward` and whatever else.

    Args:
        source: Who returned it, for the error.

    Raises:
        RewardError: It is something else.
    """
    if not isinstance(returned, Mapping):
        return Score(_read_reward(returned, what=f"{source} returned"))
    values = dict(cast(Mapping[str, Any], returned))
    for key in REWARD_NAMES:
        if key in values:
            reward = values.pop(key)
            extra = plain_mapping(values, where=f"reward_extra of {source}")
            return Score(_read_reward(reward, what=f"{source} returned {key}"), extra)
    raise RewardError(f"{source} returned a mapping with the keys {sorted(map(str, values))}; add 'reward'")


def _read_reward(value: Any, *, what: str) -> float:
    number = as_reward(value)
    if number is None:
        raise RewardError(
            f"{what} {describe_value(value)}; return a finite number, or a mapping with 'reward' {REWARD_LIMIT}"
        )
    return number
