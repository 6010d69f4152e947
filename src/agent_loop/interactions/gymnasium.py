"""Interaction that plays a Gymnasium environment through text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from agent_loop.config import NotNegative, Section
from agent_loop.errors import InteractionBug
from agent_loop.interactions.actions import ActionReader, InvalidAction
from agent_loop.interactions.base import BaseInteraction
from agent_loop.interactions.settings import read_settings
from agent_loop.interactions.swapped_roles import text_of
from agent_loop.loading import import_extra, load_object
from agent_loop.runtime.describe import describe_value
from agent_loop.runtime.instances import OnReplay
from agent_loop.runtime.numeric import as_reward
from agent_loop.runtime.threads import OneThread
from agent_loop.seeds import trajectory_seed
from agent_loop.types import Message

ObservationText = Callable[[Any, Any], str]
"""Function `(observation, environment) -> text for the model`."""
LARGEST_SEED = 2**31 - 1
_COLOURED = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0?m", re.DOTALL)


class GymnasiumSettings(Section):
    """Settings under `config` of the interaction."""

    env_id: str
    """Environment id for `gymnasium.make`: `FrozenLake-v1`, or `my_package.my_module:MyEnv-v0`, which imports the
    module."""
    env_kwargs: dict[str, Any] = Field(default={})
    """Keyword arguments for `gymnasium.make`."""
    observation: str = "text"
    """How an observation becomes text: `text` is `str(observation)`, and `render` is the result of `env.render()`, for
    which `env_kwargs` sets `render_mode: ansi`. `file.py:function` or `module:function` names your own function
    `(observation, env) -> str`."""
    actions: dict[str, Any] = Field(default={})
    """Actions by name, as in `{left: 0, down: 1}`. If empty, the model writes the action's value."""
    action_pattern: str | None = None
    """Regular expression that finds the action in the model's answer. The last match counts."""
    invalid_reply: str = "That is not a valid action: {reason}."
    """Reply to a turn without a valid action."""
    invalid_score: float = 0.0
    """Score of a turn without a valid action. The environment does not step in such a turn."""
    max_invalid_in_a_row: NotNegative = 3
    """Consecutive turns without a valid action that are allowed. One more ends the trajectory, neither terminated nor
    truncated."""
    on_replay: OnReplay = OnReplay.RESTART
    """Choose `rerun` if the rows' seeds make every step of the environment reproducible."""


class GymnasiumInteraction(BaseInteraction):
    """Plays one environment per trajectory.

    The environment's observations are the user turns, and its rewards are the scores of the model's turns. Their sum
    is the score of the trajectory.

    A row's `interaction_kwargs` may hold `seed` and `options` for `reset`; other keys go to `gymnasium.make`.
    Without a `seed` in the row, each trajectory derives its own from `rollout.seed`.
    Each reply records `terminated` and `truncated`. Every environment runs in its own thread.
    """

    opens_conversation = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._settings = read_settings(GymnasiumSettings, self.config)
        self.on_replay = self._settings.on_replay
        self._make: Callable[..., Any] = import_extra("gymnasium", extra="gymnasium", by=__name__).make
        self._text_of = _observation_text(self._settings.observation)
        self._actions = ActionReader(words=self._settings.actions, pattern=self._settings.action_pattern)
        self._games: dict[str, _Game] = {}

    async def start_interaction(
        self,
        instance_id: str,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> str:
        env_kwargs = self._settings.env_kwargs | {
            key: value for key, value in kwargs.items() if value is not None
        }
        game = self._games[instance_id] = _Game(OneThread(f"{self.name}-{instance_id[:8]}"))

        if seed is None and (derived := trajectory_seed(self.name)) is not None:
            seed = derived & LARGEST_SEED

        def reset() -> str:
            game.env = self._make(self._settings.env_id, **env_kwargs)
            observation, _ = game.env.reset(seed=seed, options=options)
            return self._text_of(observation, game.env)

        return await game.thread.run(reset)

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        game = self._games[instance_id]
        try:
            action = self._actions.read(text_of(messages[-1]), game.env.action_space)
        except InvalidAction as reason:
            return self._refuse(game, str(reason))
        text, score, terminated, truncated = await game.thread.run(self._step, game, action)
        game.num_invalid_in_a_row = 0
        game.total += score
        return terminated or truncated, text, score, {"terminated": terminated, "truncated": truncated}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        return self._games[instance_id].total

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        game = self._games.pop(instance_id, None)
        if game is None:
            return
        try:
            await game.thread.run(game.close)
        finally:
            game.thread.shutdown()

    def _step(self, game: _Game, action: Any) -> tuple[str, float, bool, bool]:
        observation, reward, terminated, truncated, _ = game.env.step(action)
        score = as_reward(reward)
        if score is None:
            raise InteractionBug(f"{self._settings.env_id} returned {describe_value(reward)} as its reward")
        return self._text_of(observation, game.env), score, bool(terminated), bool(truncated)

    def _refuse(self, game: _Game, reason: str) -> tuple[bool, str, float, dict[str, Any]]:
        game.num_invalid_in_a_row += 1
        game.total += self._settings.invalid_score
        is_over = game.num_invalid_in_a_row > self._settings.max_invalid_in_a_row
        extra = {"terminated": False, "truncated": False, "invalid_action": reason}
        return (
            is_over,
            self._settings.invalid_reply.replace("{reason}", reason),
            self._settings.invalid_score,
            extra,
        )


@dataclass(slots=True)
class _Game:
    """Environment of one trajectory."""

    thread: OneThread
    env: Any = None
    """None until it is created. Used only in `thread`."""
    total: float = 0.0
    num_invalid_in_a_row: int = 0

    def close(self) -> None:
        if self.env is not None:
            self.env.close()


def _observation_text(observation: str) -> ObservationText:
    if observation == "text":
        return lambda value, env: str(value)
    if observation == "render":
        return lambda value, env: _rendered(env)
    return load_object(observation, key="observation")


def _rendered(env: Any) -> str:
    """Return the text that the environment renders, with brackets in place of colour, which marks positions."""
    drawn = env.render()
    if not isinstance(drawn, str):
        raise InteractionBug(
            f"render() of {env} returned {describe_value(drawn)} instead of a str; set render_mode: ansi in "
            "env_kwargs, or set observation to file.py:function"
        )
    return _COLOURED.sub(r"[\1]", drawn).strip("\n")
