"""Gymnasium environment that is played through text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from agent_loop.config import NotNegative, Section
from agent_loop.environments.base import Reply
from agent_loop.environments.gymnasium.actions import ActionReader, InvalidAction
from agent_loop.errors import InteractionBug
from agent_loop.loading import import_extra, load_object
from agent_loop.runtime.describe import describe_value
from agent_loop.runtime.instances import OnReplay
from agent_loop.runtime.numeric import as_reward

ObservationText = Callable[[Any, Any], str]
"""Function `(observation, environment) -> text for the model`."""
EXTRA = "gymnasium"
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


@dataclass(frozen=True, slots=True)
class TextForm:
    """How a Gymnasium environment is made, and how its observations and actions become text."""

    settings: GymnasiumSettings
    make: Callable[..., Any]
    text_of: ObservationText
    actions: ActionReader

    @classmethod
    def of(cls, settings: GymnasiumSettings) -> TextForm:
        """Return the form that the settings describe.

        Raises:
            ConfigError: Gymnasium is not installed, or a setting is wrong.
        """
        return cls(
            settings,
            make=import_extra("gymnasium", extra=EXTRA, by=__name__).make,
            text_of=_observation_text(settings.observation),
            actions=ActionReader(words=settings.actions, pattern=settings.action_pattern),
        )


class World:
    """Environment of one trajectory. All methods block."""

    def __init__(self, form: TextForm) -> None:
        self._form = form
        self._settings = form.settings
        self._env: Any = None
        self._num_invalid_in_a_row = 0
        self.total = 0.0
        """Sum of the scores of all turns."""

    def reset(self, *, seed: int | None, options: Mapping[str, Any] | None = None, **env_kwargs: Any) -> str:
        """Create the environment, start an episode and return its first observation.

        Args:
            seed: Seed of the episode.
            options: Options of the environment's `reset`.
            **env_kwargs: Keyword arguments for `gymnasium.make`, merged over those of the settings.
        """
        self._env = self._form.make(self._settings.env_id, **{**self._settings.env_kwargs, **env_kwargs})
        observation, _ = self._env.reset(seed=seed, options=options)
        return self._form.text_of(observation, self._env)

    def play(self, text: str) -> Reply:
        """Take the action that a model turn names, and return the environment's reply."""
        try:
            action = self._form.actions.read(text, self._env.action_space)
        except InvalidAction as reason:
            return self._refuse(str(reason))
        observation, reward, terminated, truncated, _ = self._env.step(action)
        score = as_reward(reward)
        if score is None:
            raise InteractionBug(f"{self._settings.env_id} returned {describe_value(reward)} as its reward")
        self._num_invalid_in_a_row = 0
        self.total += score
        return Reply(
            self._form.text_of(observation, self._env),
            score=score,
            is_over=bool(terminated or truncated),
            extra={"terminated": bool(terminated), "truncated": bool(truncated)},
        )

    def close(self) -> None:
        """Close the environment, if it was created."""
        if self._env is not None:
            self._env.close()

    def _refuse(self, reason: str) -> Reply:
        self._num_invalid_in_a_row += 1
        self.total += self._settings.invalid_score
        return Reply(
            self._settings.invalid_reply.replace("{reason}", reason),
            score=self._settings.invalid_score,
            is_over=self._num_invalid_in_a_row > self._settings.max_invalid_in_a_row,
            extra={"terminated": False, "truncated": False, "invalid_action": reason},
        )


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
